"""Schedules of a pipeline, as ``torch.distributed.pipelining`` has them, with the numbers that they work with.

GPipe (Huang et al. 2018, arXiv:1811.06965) runs all forwards and then all backwards. 1F1B and interleaved 1F1B with
several stages on each rank (Narayanan et al. 2021, arXiv:2104.04473) hold the activations of fewer micro-batches. The
zero-bubble schedules (Qi et al. 2024, arXiv:2401.10241) fill waiting times with the gradients of weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from accel_backends.private import hands_over_within_ranks
from accel_state.errors import ConfigError


@final
@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """A schedule: torch's class, the number of stages of each rank (None: 2 or more), and the order of the stages."""

    made_by: type[Any]
    per_rank: int | None = 1
    v_shaped: bool = False
    in_rounds: bool = False


SCHEDULES: Final[Mapping[str, ScheduleKind]] = {
    "1f1b": ScheduleKind(Schedule1F1B),
    "gpipe": ScheduleKind(ScheduleGPipe),
    "interleaved": ScheduleKind(ScheduleInterleaved1F1B, per_rank=None, in_rounds=True),
    "interleaved_zero_bubble": ScheduleKind(ScheduleInterleavedZeroBubble, per_rank=None, in_rounds=True),
    "zero_bubble_v": ScheduleKind(ScheduleZBVZeroBubble, per_rank=2, v_shaped=True),
}


def schedule_kind(name: str, stages_per_rank: int | None) -> tuple[ScheduleKind, int]:
    """Returns a schedule by name, and the number of stages of each rank.

    Raises:
        ConfigError: no such schedule, one that this torch does not run, or one that does not have so many stages on a
            rank.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"no pipeline schedule {name!r}; schedules: {', '.join(SCHEDULES)}")
    kind = SCHEDULES[name]
    if kind.v_shaped and not hands_over_within_ranks(kind.made_by):
        raise ConfigError(
            f"schedule {name!r} needs torch 2.11, this is {torch.__version__}, where a rank with two neighbouring "
            "stages sends messages to itself; nearest: schedule='interleaved_zero_bubble'"
        )
    count = stages_per_rank or kind.per_rank or 2
    if count < 1 or (kind.per_rank is not None and count != kind.per_rank) or (kind.per_rank is None and count < 2):
        able = "2 or more" if kind.per_rank is None else str(kind.per_rank)
        raise ConfigError(f"stages_per_rank={stages_per_rank} with the schedule {name!r}, which has {able} on a rank")
    return kind, count


def check_microbatches(name: str, count: int, num_ranks: int) -> None:
    """Refuses a number of micro-batches with which a schedule does not run.

    Raises:
        ConfigError: with the nearest number that works.
    """
    if name == "1f1b" and count < num_ranks:
        raise ConfigError(
            f"{count} micro-batches for a pipeline of {num_ranks} stages; nearest: num_microbatches={num_ranks}, or "
            'schedule="gpipe"'
        )
    if not runs_with(SCHEDULES[name], count, num_ranks):
        nearest = count // num_ranks * num_ranks
        raise ConfigError(
            f"{count} micro-batches with the schedule {name!r} on {num_ranks} ranks; nearest: "
            f"num_microbatches={nearest}"
        )


def runs_with(kind: ScheduleKind, count: int, num_ranks: int) -> bool:
    """Whether the micro-batches divide into the rounds of an interleaved schedule."""
    return not kind.in_rounds or count % max(1, count // num_ranks) == 0
