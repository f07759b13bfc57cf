"""Outcome of a contract: the ending on each rank, and the verdict over all ranks."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Tensor

Verdict = Literal["equal", "refused", "different", "raised", "late", "unnamed", "uneven", "hung", "died"]


@final
@dataclass(frozen=True, slots=True)
class Ending:
    """End of training on one rank.

    ``tensors`` are the state and the noted tensors, empty after an error; ``error`` is its class and text, ``ours``
    whether it is an ``AccelError``, ``position`` the step in which it was raised (0: ``prepare``).
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    error: str = ""
    ours: bool = False
    position: int = 0


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """Verdict over the endings of all ranks.

    ``equal`` and ``refused`` satisfy the contract. All others violate it: ``different`` weights, an error that is
    ``raised`` but not an accel error, or too ``late``, or ``unnamed`` (mentions no name of the model), ranks that end
    ``uneven``, a rank that ``hung`` or ``died``.
    """

    verdict: Verdict
    text: str = ""

    @property
    def ok(self) -> bool:
        """Whether the contract is satisfied."""
        return self.verdict in ("equal", "refused")

    def __str__(self) -> str:
        return f"{self.verdict}: {self.text}" if self.text else self.verdict


def judge(
    reference: Mapping[str, Tensor],
    endings: Sequence[Ending],
    *,
    tolerance: float,
    since: int | None,
    names: Iterable[str],
) -> Outcome:
    """Judges a case by the ``endings`` of its ranks and the tensors that one process trained.

    Every rank's tensors are compared, and the main process must have all of them. The largest absolute distance of a
    tensor must be at most ``tolerance`` times the largest element of the reference, which counts as at least 0.1.
    """
    failed = [rank for rank, ending in enumerate(endings) if ending.error]
    if not failed:
        return _compared(reference, endings, tolerance)
    said = "; ".join(f"rank {rank} in step {endings[rank].position}: {endings[rank].error}" for rank in failed)
    if len(failed) < len(endings):
        return Outcome("uneven", f"ranks {failed} of {len(endings)} raised: {said}")
    if not all(ending.ours for ending in endings):
        mixed = any(ending.ours for ending in endings)
        return Outcome("uneven" if mixed else "raised", said)
    if len({ending.position for ending in endings}) > 1:
        return Outcome("uneven", said)
    if since is None or endings[0].position > since:
        return Outcome("late", f"{'no refusal is due' if since is None else f'due in step {since}'}: {said}")
    known = tuple(names)
    if any(not _mentions(ending.error, known) for ending in endings):
        return Outcome("unnamed", said)
    return Outcome("refused", said)


def _compared(reference: Mapping[str, Tensor], endings: Sequence[Ending], tolerance: float) -> Outcome:
    if missing := [name for name in reference if name not in endings[0].tensors]:
        return Outcome("different", f"the main process has no {', '.join(missing)}")
    for rank, ending in enumerate(endings):
        away = {
            name: _distance(expected, ending.tensors[name])
            for name, expected in reference.items()
            if name in ending.tensors
        }
        name = max(away, key=lambda key: away[key], default="")
        if away and not away[name] <= tolerance:
            return Outcome("different", f"{name} on rank {rank} is {away[name]:.1e} away, allowed are {tolerance:.0e}")
    return Outcome("equal")


def _distance(expected: Tensor, tensor: Tensor) -> float:
    """Distance relative to the largest element; infinite if shapes differ or an element is nan."""
    if expected.shape != tensor.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    wanted, given = expected.to(torch.float64), tensor.to(torch.float64)
    distance = float((wanted - given).abs().max() / wanted.abs().max().clamp(min=0.1))
    return distance if distance == distance else float("inf")


def _mentions(text: str, names: Iterable[str]) -> bool:
    return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names)
