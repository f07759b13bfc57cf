"""Requests of ``save_state`` and ``load_state``: what ranks have to agree on, because it decides their collectives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, final

from accel.checkpoints.load_report import LoadOptions
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from accel_ckpt.io.storage import Location


@final
@dataclass(frozen=True, slots=True)
class SaveRequest:
    """One call of ``save_state``.

    Attributes:
        parts: names of the parts of the run.
        asynchronous: whether the values are written in the background.
        hooked: whether there are save hooks; once agreed, on any rank.
        unstepped: whether gradients of a full window may wait for their step; once agreed, on any rank.
        gradients: whether there are gradients of later steps, zero ones not counted; once agreed, on any rank.
        zeros: names of parameters whose gradients are zero at least, by model position; once agreed, those of all
            ranks, which may hold shards of different parameters.
    """

    parts: tuple[str, ...]
    asynchronous: bool
    hooked: bool
    unstepped: bool
    gradients: bool
    zeros: Mapping[str, Sequence[str]]

    @classmethod
    def agreed(cls, requests: Sequence[Self]) -> Self:
        """The request of all ranks.

        Raises:
            CheckpointError: names the first rank that differs, and in what.
        """
        first = requests[0]
        for rank, one in enumerate(requests):
            if differing := sorted(set(one.parts) ^ set(first.parts)):
                raise CheckpointError(
                    f"ranks save different parts: only one of rank 0 and rank {rank} has {', '.join(differing)}; "
                    "prepare and register the same objects, in the same order, on all processes"
                )
            if one.asynchronous != first.asynchronous:
                raise CheckpointError(
                    f"save_state was called on rank 0 with asynchronous={first.asynchronous} and on rank {rank} with "
                    f"asynchronous={one.asynchronous}; give the same on all processes"
                )
        zeros: dict[str, set[str]] = {}
        for one in requests:
            for position, names in one.zeros.items():
                zeros.setdefault(position, set()).update(names)
        return cls(
            first.parts,
            first.asynchronous,
            hooked=any(one.hooked for one in requests),
            unstepped=any(one.unstepped for one in requests),
            gradients=any(one.gradients for one in requests),
            zeros={position: sorted(names) for position, names in zeros.items()},
        )


@final
@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One call of ``load_state``.

    Attributes:
        options: what to load.
        place: the checkpoint; None: the newest intact one of the series.
        hooked: whether there are load hooks; once agreed, on any rank.
    """

    options: LoadOptions
    place: "Location | None"
    hooked: bool

    @classmethod
    def agreed(cls, requests: Sequence[Self], rank: int) -> Self:
        """The request of all ranks, with the place of ``rank``.

        Raises:
            CheckpointError: names the first rank with other options, or without a place where others have one.
        """
        first = requests[0]
        for other, one in enumerate(requests):
            if one.options != first.options or (one.place is None) != (first.place is None):
                raise CheckpointError(
                    f"load_state was called on rank 0 with {first} and on rank {other} with {one}; give the same on "
                    "all processes"
                )
        return cls(first.options, requests[rank].place, any(one.hooked for one in requests))

    def __str__(self) -> str:
        return f"{'the newest checkpoint' if self.place is None else self.place}, {self.options}"
