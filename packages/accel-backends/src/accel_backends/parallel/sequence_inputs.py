"""Inputs of models over shards of sequences: full ones are sharded before each forward, and the loss is that of all."""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from accel_backends.parallel.context_parallel import IGNORED, Context
from accel_state.errors import BackendError, PrepareError

_TOKENS = ("input_ids", "inputs_embeds")
_OUTPUTS = ("logits", "last_hidden_state", "hidden_states")
_COUNTED_FROM_PADDING = "create_position_ids_from_inputs_embeds"
"""Method of transformers' embeddings whose positions begin at ``padding_idx + 1``, as those of RoBERTa."""
_NEXT_TOKEN = (None, "ForCausalLM", "ForConditionalGeneration")
"""Kinds of loss of the next token, in transformers' names; the last one is that of models of images and text."""


@final
class SequenceInputs:
    """Shards the inputs of models over the ranks of a context, which are given the same full sequences.

    A model is called with full sequences as keywords. Its loss is the mean over the labelled tokens of all ranks. Its
    other outputs are those of this rank's tokens (``Context.positions``) where gradients are computed, and otherwise
    those of full sequences. Within ``sharded_buffers`` the inputs, and therefore all outputs, are shards already.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._given_shards = False

    def attach(self, model: nn.Module) -> None:
        """Registers the hooks that shard the model's inputs, and that make its loss that of all ranks."""
        model.register_forward_pre_hook(self._shard, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._share_outputs)

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
                shard = self.context.shard(buffer.detach(), dim)
                if not any(buffer is one for one in kept):
                    full.append((buffer, buffer.detach()))
                buffer.data = shard  # other memory: slices of one batch share theirs
            yield
        finally:
            self._given_shards = before
            for buffer, values in full:
                buffer.data = values

    def _shard(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            raise BackendError(
                f"{type(model).__name__} was called with {len(args)} arguments without names, and "
                f"{self.context.kind} models shard tensors by name; nearest: model({_TOKENS[0]}=..., labels=...)"
            )
        return args, self.sharded(kwargs)

    def sharded(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns this rank's shard of a model's arguments, with the number by which the loss of its tokens is divided.

        Means over ranks of such losses, and of their gradients, are those of all labelled tokens. A number that is
        given (``num_items_in_batch``) divides the sum over the tokens of all ranks, as in one process.

        Raises:
            BackendError: shards whose labels are not shifted, or without tokens; or logits of the last tokens only.
            PrepareError: sequences that cannot be sharded, see ``Context.shard_batch``.

        Collective: every rank of the context must call this.
        """
        kept = None if self._given_shards else given.get("logits_to_keep")
        if isinstance(kept, torch.Tensor) or kept:
            raise BackendError(
                f"logits_to_keep={kept} with a {self.context.kind} model, each of whose ranks would keep those of its "
                "own shard; nearest: leave it out, and take the last logits of an evaluation"
            )
        shards = self._completed(given) if self._given_shards else self.context.shard_batch(given)
        labels = shards.get("shift_labels", shards.get("labels"))
        number, size = shards.get("num_items_in_batch"), self.context.mesh.size()
        if number is not None:
            shards["num_items_in_batch"] = number / size
        elif isinstance(labels, torch.Tensor):
            count = (labels != IGNORED).sum().to(torch.float64 if labels.device.type == "cpu" else torch.float32)
            dist.all_reduce(count, group=self.context.group)
            shards["num_items_in_batch"] = count.clamp(min=1) / size
        return shards

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """Mean over the ranks of the context of a loss without gradients, in place.

        Collective: every rank of the context must call this.
        """
        dist.all_reduce(loss, group=self.context.group)
        return loss.div_(self.context.mesh.size())

    def full(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns a model's outputs, those of tokens of full sequences, unless the inputs were given as shards.

        Collective: every rank of the context must call this.
        """
        names = () if self._given_shards else _OUTPUTS
        return {name: self._joined(value) if name in names else value for name, value in outputs.items()}

    def _completed(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that are shards, with the positions of their tokens, and with labels for models that need both."""
        given = dict(kwargs)
        if given.get("labels") is not None and given.get("shift_labels") is None:
            raise BackendError(
                "labels of shards: the label of a shard's last token is on another rank; nearest: shift the labels of "
                "full sequences by one, shard them too, and pass them as shift_labels"
            )
        if given.get("shift_labels") is not None:
            given["labels"] = given["shift_labels"]
        first = next((given[name] for name in _TOKENS if given.get(name) is not None), None)
        if first is None:
            raise BackendError(f"shards of {', '.join(given)} without {' or '.join(_TOKENS)}")
        length = first.shape[1] * self.context.mesh.size()
        self.context.check_length(length)
        if given.get("position_ids") is None:
            given["position_ids"] = self.context.positions(length, device=first.device).expand(first.shape[:2])
        return given

    def _share_outputs(self, model: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, tuple):
            raise BackendError(
                f"{type(model).__name__} returned a tuple, and a {self.context.kind} model gives the loss and the "
                "outputs of all ranks by name; nearest: return_dict=True"
            )
        loss = getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor):
            output.loss = loss + (self.mean(loss.detach().clone()) - loss.detach())
        if torch.is_grad_enabled() or self._given_shards:
            return
        for name in _OUTPUTS:
            if isinstance(shard := getattr(output, name, None), torch.Tensor):
                setattr(output, name, self._joined(shard))
            elif isinstance(shard, tuple):  # of each layer
                setattr(output, name, tuple(map(self._joined, shard)))

    def _joined(self, shard: torch.Tensor) -> torch.Tensor:
        """Full sequences from the shards of all ranks."""
        size = self.context.mesh.size()
        shards = [torch.empty_like(shard) for _ in range(size)]
        dist.all_gather(shards, shard.contiguous(), group=self.context.group)
        length = shard.shape[1] * size
        places = [self.context.sharding.positions(length, rank, device=shard.device) for rank in range(size)]
        return torch.cat(shards, 1).index_select(1, torch.cat(places).argsort())


def check_inputs(model: nn.Module) -> None:
    """Refuses models that do not pass the number of labelled tokens on to their loss, or have another loss.

    Raises:
        PrepareError: the forward has no keywords of its own choice, as transformers' models have; the loss is not that
            of the next token, as in classification; or the model is one of transformers that places tokens by their
            number in its input, as decoders of the kind of BART do, that does not begin at 0, or whose loss is its own.
    """
    kind, config = getattr(model, "loss_type", None), getattr(model, "config", None)
    names = inspect.signature(model.forward).parameters
    reason = None
    if kind not in _NEXT_TOKEN:
        reason = f"computes the loss {kind}, not that of the next token"
    elif getattr(config, "is_encoder_decoder", False):
        reason = "is an encoder-decoder, whose labels are those of its decoder"
    elif type(model).__module__.startswith("transformers.") and "position_ids" not in names:
        reason = "takes no position_ids, so that positions begin anew in each shard"
    elif any(hasattr(module, _COUNTED_FROM_PADDING) for module in model.modules()):
        reason = "has positions that begin behind padding_idx, and not at 0"
    elif type(model).__module__.startswith("transformers.") and _computes_own_loss(model):
        reason = "computes its loss itself, and not by transformers' loss_function"
    if reason is not None:
        raise PrepareError(
            f"{type(model).__name__} {reason}; nearest: a causal language model of transformers, or full sequences "
            "(cp_size=1, sp_size=1)"
        )
    parameters = names.values()
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD or one.name == "num_items_in_batch" for one in parameters):
        raise PrepareError(
            f"the forward of {type(model).__name__} takes no num_items_in_batch, by which the loss is averaged "
            "over the tokens of all ranks; nearest: a model of transformers, or a forward with **kwargs that "
            "go to its loss function"
        )


def _computes_own_loss(model: nn.Module) -> bool:
    """Whether a model's forward computes a loss without ``loss_function``, which would ignore shifted labels."""
    used = inspect.unwrap(type(model).forward).__code__.co_names
    return "CrossEntropyLoss" in used or "cross_entropy" in used
