"""Programs to train under different layouts: a model, its loss, and the global batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer


def momentum_sgd(model: nn.Module) -> Optimizer:
    """SGD with momentum, which unlike Adam does not hide a gradient of the wrong scale."""
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


@final
@dataclass(frozen=True)
class Program:
    """One training program, made anew on every rank by the user's function.

    Attributes:
        model: with its initial weights.
        loss: function of the model and a batch: the mean over the batch's samples; with ``weight``, the sum.
        batches: global batches, one for each optimizer step: trees (dict, list, tuple) of tensors whose first
            dimension counts samples, the same number in all batches.
        optimizer: made from the model.
        scheduler: made from the optimizer; None: a constant learning rate.
        clip: the norm to which gradients are clipped; None: not clipped.
        weight: weight of a batch, if losses are sums to be divided by another number than that of samples (for example
            tokens).
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batches: Sequence[Any]
    optimizer: Callable[[nn.Module], Optimizer] = momentum_sgd
    scheduler: Callable[[Optimizer], Any] | None = None
    clip: float | None = None
    weight: Callable[[Any], float] | None = None

    def __post_init__(self) -> None:
        if not self.batches:
            raise ValueError("the program has no batches; each is one optimizer step, and about 20 show enough")
        sizes = {count_samples(batch) for batch in self.batches}
        if len(sizes) > 1:
            raise ValueError(
                f"the program's global batches hold {sorted(sizes)} samples; all must hold the same number"
            )

    @property
    def batch_size(self) -> int:
        """Samples of one global batch."""
        return count_samples(self.batches[0])


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Applies ``fn`` to the tensors of a tree; mappings, lists, tuples and named tuples keep their type."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, Mapping):
        return type(tree)({key: map_tensors(fn, value) for key, value in tree.items()})  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(fn, value) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(fn, value) for value in tree)
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in order."""
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, tree)  # type: ignore[func-returns-value]
    return found


def count_samples(batch: Any) -> int:
    """Length of the first dimension, equal for all tensors of a batch."""
    sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors_of(batch)}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"a batch's tensors must share a first dimension of samples; theirs are {sorted(sizes)}")
    return sizes.pop()


def join_batches(batches: Sequence[Any]) -> Any:
    """Concatenates all batches into one."""
    columns = zip(*(tensors_of(batch) for batch in batches), strict=True)
    joined = iter([torch.cat(column) for column in columns])
    return map_tensors(lambda _: next(joined), batches[0])


def take_samples(batch: Any, rows: slice | Sequence[int]) -> Any:
    """The samples at ``rows``."""
    return map_tensors(lambda tensor: tensor[rows], batch)


def in_dtype(tree: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors of a tree to ``dtype``."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


def uneven_sizes(total: int, parts: int, *, zeros: bool = False) -> list[int]:
    """Splits ``total`` samples into ``parts`` of clearly different sizes, none empty; with ``zeros``, the second is."""
    if total < parts:
        raise ValueError(f"{total} samples cannot be spread over {parts} micro-batches; make the global batches larger")
    shares = [index % 3 + 1 for index in range(parts)]
    if zeros and parts > 1:
        shares[1] = 0
    ends = [total * sum(shares[: index + 1]) // sum(shares) for index in range(parts)]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    while not zeros and 0 in sizes:
        sizes[sizes.index(0)] += 1
        sizes[sizes.index(max(sizes))] -= 1
    return sizes
