"""Inputs of context-parallel models: full sequences are sharded before each forward, and the loss is that of all."""

import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from accel_backends.parallel.context_parallel import IGNORED, Context
from accel_state.errors import BackendError, PrepareError

_TOKENS = ("input_ids", "inputs_embeds")


@final
class SequenceInputs:
    """Shards the inputs of models over a context-parallel group, whose ranks are given the same full sequences.

    A model is called with full sequences as keywords. Its loss is the mean over the labelled tokens of all ranks, and
    its other outputs are those of this rank's tokens (``Context.positions``). Within ``sharded_buffers`` the inputs are
    shards already.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._given_shards = False

    def attach(self, model: nn.Module) -> None:
        """Registers the hooks that shard the model's inputs, and that make its loss that of all ranks."""
        model.register_forward_pre_hook(self._shard, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._share_loss)

    @contextmanager
    def sharded_buffers(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: Collection[torch.Tensor] = ()
    ) -> Iterator[None]:
        """Context in which each buffer is, in place, this rank's shard along its dim.

        On exit buffers are full again, except those of ``kept``.

        Raises:
            BackendError: not one dim for each buffer, or a buffer without that dim.
        """
        if len(buffers) != len(dims):
            raise BackendError(
                f"{len(buffers)} buffers and {len(dims)} dims; expected one dim of the sequence for each"
            )
        full: list[tuple[torch.Tensor, torch.Tensor]] = []
        for buffer, dim in zip(buffers, dims, strict=True):
            if not -buffer.ndim <= dim < buffer.ndim:
                raise BackendError(f"a buffer of shape {tuple(buffer.shape)} has no dim {dim} to shard")
        before, self._given_shards = self._given_shards, True
        try:
            for buffer, dim in zip(buffers, dims, strict=True):
                if not any(buffer is one for one in kept):
                    full.append((buffer, buffer.detach().clone()))
                _overwrite(buffer, self.context.shard(buffer.detach(), dim))
            yield
        finally:
            self._given_shards = before
            for buffer, values in full:
                _overwrite(buffer, values)

    def _shard(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            raise BackendError(
                f"{type(model).__name__} was called with {len(args)} arguments without names, and context parallelism "
                f"shards tensors by name; nearest: model({_TOKENS[0]}=..., labels=...)"
            )
        if not self._given_shards:
            kwargs = self.context.shard_batch(kwargs)
        elif kwargs.get("position_ids") is None:
            kwargs = {**kwargs, "position_ids": self._positions(kwargs)}
        labels = kwargs.get("shift_labels", kwargs.get("labels"))
        if isinstance(labels, torch.Tensor) and kwargs.get("num_items_in_batch") is None:
            count = (labels != IGNORED).sum().to(torch.float64 if labels.device.type == "cpu" else torch.float32)
            dist.all_reduce(count, group=self.context.group)
            kwargs["num_items_in_batch"] = count.clamp(min=1) / self.context.mesh.size()
        return args, kwargs

    def _share_loss(self, model: nn.Module, args: Any, output: Any) -> None:
        loss = getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor):
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=self.context.group)
            output.loss = loss + (mean / self.context.mesh.size() - loss.detach())

    def _positions(self, kwargs: dict[str, Any]) -> torch.Tensor:
        first = next(kwargs[name] for name in _TOKENS if kwargs.get(name) is not None)
        length = first.shape[1] * self.context.mesh.size()
        return self.context.positions(length, device=first.device).expand(first.shape[0], first.shape[1])


def check_inputs(model: nn.Module) -> None:
    """Refuses models that do not pass the number of labelled tokens on to their loss.

    Raises:
        PrepareError: the forward has no keywords of its own choice, as transformers' models have.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD or one.name == "num_items_in_batch" for one in parameters):
        raise PrepareError(
            f"the forward of {type(model).__name__} takes no num_items_in_batch, by which context parallelism averages "
            "the loss over the tokens of all ranks; nearest: a model of transformers, or a forward with **kwargs that "
            "go to its loss function"
        )


def _overwrite(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Gives the tensor other values and their shape."""
    with torch.no_grad():
        buffer.resize_(values.shape).copy_(values)
