"""Comparison of nested tensors: which tensor differs, where, and by how much."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: Relative tolerance by dtype: about the rounding error of a few hundred reordered operations.
TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 2e-2,
}


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """Difference of one leaf: ``reason`` if it cannot be measured, otherwise distances and the first index.

    ``relative`` is the largest absolute distance divided by the largest magnitude of the expected tensor, not
    elementwise: an element near zero would dominate an elementwise ratio.
    """

    name: str
    reason: str = ""
    absolute: float = 0.0
    relative: float = 0.0
    index: tuple[int, ...] = ()
    count: int = 0
    size: int = 0

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name}: {self.reason}"
        return (
            f"{self.name}: off by {self.absolute:.3g} ({self.relative:.3g} relative) in {self.count} of {self.size} "
            f"elements, first at {list(self.index)}"
        )


def named_leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings and sequences with dotted names, in order; DTensors as full tensors."""
    if isinstance(tree, torch.nn.Module):
        tree = tree.state_dict()
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        for key, value in enumerate(tree):
            yield from named_leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree.full_tensor() if hasattr(tree, "full_tensor") else tree


def compare_trees(
    actual: Any,
    expected: Any,
    *,
    rtol: float | None = None,
    atol: float = 0.0,
    scales: Mapping[str, float] | None = None,
) -> list[TensorDifference]:
    """Differences beyond ``atol + rtol * max|expected|`` per tensor; ``rtol`` defaults to the dtype's ``TOLERANCE``.

    Modules are compared by their state. Integers, booleans and leaves that are not tensors must be equal; NaN equals
    NaN. ``scales`` replaces ``max|expected|`` for the tensors that it names.
    """
    left, right = dict(named_leaves(actual)), dict(named_leaves(expected))
    found = [TensorDifference(name, "only in the first") for name in left if name not in right]
    found += [TensorDifference(name, "only in the second") for name in right if name not in left]
    pairs = ((name, left[name], right[name]) for name in left if name in right)
    found += [
        difference
        for name, a, b in pairs
        if (difference := _compare_leaf(name, a, b, rtol=rtol, atol=atol, scale=(scales or {}).get(name))) is not None
    ]
    return found


def assert_close_state(
    actual: Any, expected: Any, *, rtol: float | None = None, atol: float = 0.0, names: tuple[str, str] = ("", "")
) -> None:
    """Fails unless the trees have the same names, shapes, dtypes and, within the tolerance, values.

    The message lists the differing tensors, the worst first. ``names`` are the names of the two trees in it.
    """
    __tracebackhide__ = True
    _fail(compare_trees(actual, expected, rtol=rtol, atol=atol), names)


def assert_equal_state(actual: Any, expected: Any, *, names: tuple[str, str] = ("", "")) -> None:
    """Fails unless the trees are bitwise equal."""
    __tracebackhide__ = True
    _fail(compare_trees(actual, expected, rtol=0.0), names)


def _fail(found: list[TensorDifference], names: tuple[str, str]) -> None:
    __tracebackhide__ = True
    if not found:
        return
    worst = sorted(found, key=lambda difference: (not difference.reason, -difference.relative))
    which = f" between {names[0]} and {names[1]}" if any(names) else ""
    more = [f"  and {len(worst) - 20} more"] if len(worst) > 20 else []
    lines = [f"{len(worst)} tensors differ{which}:" if len(worst) > 1 else f"one tensor differs{which}:"]
    raise AssertionError("\n".join([*lines, *(f"  {one}" for one in worst[:20]), *more]))


def _compare_leaf(
    name: str, actual: Any, expected: Any, *, rtol: float | None, atol: float, scale: float | None
) -> TensorDifference | None:
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        same = type(actual) is type(expected) and (actual == expected or (actual != actual and expected != expected))
        return None if same else TensorDifference(name, f"{actual!r} is not {expected!r}")
    if actual.shape != expected.shape:
        return TensorDifference(name, f"shape {tuple(actual.shape)} is not {tuple(expected.shape)}")
    if actual.dtype != expected.dtype:
        return TensorDifference(name, f"dtype {actual.dtype} is not {expected.dtype}")
    return _compare_tensors(name, actual.detach().cpu(), expected.detach().cpu(), rtol=rtol, atol=atol, scale=scale)


def largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude in a tensor; 0 for an empty one."""
    finite = tensor.abs()[tensor.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _compare_tensors(
    name: str, actual: torch.Tensor, expected: torch.Tensor, *, rtol: float | None, atol: float, scale: float | None
) -> TensorDifference | None:
    if torch.equal(actual, expected):
        return None
    exact = not (actual.is_floating_point() or actual.is_complex())
    wide = torch.complex128 if actual.is_complex() else torch.float64
    a, b = actual.to(wide), expected.to(wide)
    distance = (a - b).abs()
    # Equal infinities and NaN on both sides have distance 0; one-sided ones have infinite distance.
    distance = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, distance.nan_to_num(nan=float("inf")))
    scale = largest(b) if scale is None else scale
    tolerance = 0.0 if exact else atol + (TOLERANCE.get(actual.dtype, 0.0) if rtol is None else rtol) * scale
    beyond = distance > tolerance
    if not beyond.any():
        return None
    absolute = float(distance.max())
    first = beyond.nonzero()[0].tolist()
    return TensorDifference(
        name,
        absolute=absolute,
        relative=absolute / scale if scale else float("inf"),
        index=tuple(first),
        count=int(beyond.sum()),
        size=actual.numel(),
    )
