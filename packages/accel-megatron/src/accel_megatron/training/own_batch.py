"""Batches that a user's own forward step takes, and what it reports of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist

from accel_precision.convert import accumulation_dtype
from accel_state.errors import BackendError

LOSS = ""
"""Name of the loss among what a micro-batch reports; no name of the user's own is empty."""


@final
@dataclass(frozen=True, slots=True)
class OwnBatch:
    """Keyword arguments of a call, which only the user's functions know.

    Attributes:
        values: tensors of shape [samples, ...], which are split, and others, which each micro-batch has.
    """

    values: Mapping[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], arguments: Mapping[str, Any]) -> "OwnBatch":
        """Returns the batch of a call.

        Raises:
            BackendError: arguments that are no keywords, which have no names to split them by.
        """
        if args:
            raise BackendError("a call with an own forward step takes keywords only; nearest: model(**batch)")
        return cls(arguments)

    @property
    def samples(self) -> int:
        """Number of samples.

        Raises:
            BackendError: no tensors, or tensors of other numbers of samples.
        """
        found = {name: value.shape[0] for name, value in self._tensors().items()}
        if len(set(found.values())) != 1:
            raise BackendError(
                f"a call with an own forward step takes keywords whose tensors have one number of samples, and it has "
                f"{found or 'none'}; nearest: model(**batch)"
            )
        return next(iter(found.values()))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Longest second dim; the schedule is told the shapes between stages by the stages."""
        return (max((one.shape[1] for one in self._tensors().values() if one.dim() > 1), default=1),)

    def split(self, count: int) -> Iterator[dict[str, Any]]:
        """Yields ``count`` micro-batches of equal size."""
        parts = {name: one.chunk(count) for name, one in self._tensors().items()}
        for number in range(count):
            yield {name: parts[name][number] if name in parts else value for name, value in self.values.items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: one for name, one in self.values.items() if isinstance(one, torch.Tensor) and one.dim()}


def reporting(forward_step: Callable[..., Any], context_ranks: int) -> Callable[..., Any]:
    """Returns the forward step, whose loss function reports the loss, too.

    The schedule multiplies a loss by the number of ``context_ranks``, over which gradients are averaged, unless the
    function returns the number of tokens.
    """

    def step(parts: Iterator[Any], model: Any) -> tuple[Any, Callable[[Any], Any]]:
        output, function = forward_step(parts, model)

        def loss(output: Any) -> tuple[Any, ...]:
            value, *tokens, reported = function(output)
            mean = value.detach() / tokens[0].clamp(min=1) if tokens else value.detach().clone()
            return value * (context_ranks if tokens else 1), *tokens, {LOSS: mean, **reported}

        return output, loss

    return step


def joined(found: Sequence[Mapping[str, Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """Returns what the micro-batches reported: means of scalars, other tensors joined along the first dim.

    Only the last stage has it; all stages get it.

    Collective: every rank of the group must call this.
    """
    from megatron.core import parallel_state

    total: dict[str, torch.Tensor] = {}
    for name in found[0] if found else ():
        values = [torch.as_tensor(one[name], device=device).detach() for one in found]
        total[name] = (
            torch.cat(values) if values[0].dim() else torch.stack(values).to(accumulation_dtype(values[0].dtype)).mean()
        )
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return total
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    described: list[Any] = [{name: (one.shape, one.dtype) for name, one in total.items()}]
    dist.broadcast_object_list(described, last, group=group)
    for name, (shape, dtype) in described[0].items():
        value = total[name].contiguous() if found else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(value, last, group=group)
        total[name] = value
    return total
