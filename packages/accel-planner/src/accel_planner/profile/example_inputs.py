"""Example inputs of a model, and a loss computed from its output."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from accel_planner import private
from accel_planner.errors import PlanError

Loss = Callable[[nn.Module, Any], torch.Tensor]

_IDS = ("input_ids", "tokens", "idx", "ids", "inputs", "x")


@final
@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as a loader yields it; only shapes and dtypes of its tensors matter.

    Attributes:
        value: tensors in any nesting. A mapping is passed to the model as keyword arguments, a tuple or list as
            positional arguments, anything else as the only argument.
        batch_size, seq_length: sizes that the batch was made up with, if it was.
    """

    value: Any
    batch_size: int | None = None
    seq_length: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(
            leaf.numel() * leaf.dtype.itemsize for leaf in private.leaves(self.value) if isinstance(leaf, torch.Tensor)
        )

    def fake(self, dtype: torch.dtype | None = None) -> Any:
        """The same nesting with empty tensors, floating-point ones in ``dtype``; call within a fake tensor mode."""

        def empty(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            wanted = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
            return torch.empty(tuple(leaf.shape), dtype=wanted, device="cpu")

        return private.mapped(empty, self.value)


def tokens(model: nn.Module, batch_size: int, seq_length: int) -> Batch:
    """Makes a batch of token ids for a language model whose forward takes ``input_ids`` (and ``labels``).

    Raises:
        PlanError: the forward requires other arguments as well.
    """
    with torch.device("meta"):
        ids = torch.empty(batch_size, seq_length, dtype=torch.long)
    parameters = [p for p in inspect.signature(model.forward).parameters.values() if p.kind not in (p.VAR_KEYWORD,)]
    names = [parameter.name for parameter in parameters]
    if "input_ids" in names:
        value: Any = {"input_ids": ids} | ({"labels": ids} if "labels" in names else {})
        return Batch(value, batch_size, seq_length)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    if len(needed) > 1:
        raise PlanError(
            f"forward of {type(model).__name__} needs {', '.join(needed)}, and token ids are but one argument; give a "
            "sample function that makes the full batch"
        )
    return Batch(ids, batch_size, seq_length)


def call(model: nn.Module, value: Any) -> Any:
    """Calls a model with a batch."""
    if isinstance(value, Mapping):
        return model(**value)
    return model(*value) if isinstance(value, list | tuple) else model(value)


def guessed_loss(model: nn.Module, value: Any) -> torch.Tensor:
    """Computes a loss with the memory use of a typical one.

    The output itself if it is a scalar or has a ``loss``; the cross entropy of (batch, length, classes) with token ids;
    otherwise the mean of all outputs. If the batch is (inputs, targets) and the model takes one argument, the model
    gets the inputs, and the targets' dtype selects the loss.

    Raises:
        PlanError: the output has no floating-point tensor.
    """
    inputs, targets = _split(model, value)
    output = call(model, inputs)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    found = [leaf for leaf in private.leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if not found:
        raise PlanError(
            f"{type(model).__name__} gives no floating-point tensor to compute a loss of; give a loss function"
        )
    first = found[0]
    if len(found) == 1 and first.numel() == 1:
        return first
    goal = targets if targets is not None else _ids(inputs)
    if goal is not None and not goal.is_floating_point() and tuple(first.shape[:-1]) == tuple(goal.shape):
        return nn.functional.cross_entropy(first.flatten(0, -2), goal.flatten())
    if goal is not None and tuple(goal.shape) == tuple(first.shape) and goal.is_floating_point():
        return nn.functional.mse_loss(first, goal.to(first.dtype))
    return torch.stack([tensor.float().mean() for tensor in found]).sum()


def _split(model: nn.Module, value: Any) -> tuple[Any, torch.Tensor | None]:
    """Splits (inputs, targets) if the model takes one argument; otherwise returns the full batch and no targets."""
    if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[1], torch.Tensor):
        taken = [
            p
            for p in inspect.signature(model.forward).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if len(taken) == 1:
            return value[0], value[1]
    return value, None


def _ids(value: Any) -> torch.Tensor | None:
    if isinstance(value, Mapping):
        value = next((value[name] for name in _IDS if name in value), None)
    elif isinstance(value, list | tuple):
        value = value[0] if value else None
    return value if isinstance(value, torch.Tensor) and not value.is_floating_point() else None
