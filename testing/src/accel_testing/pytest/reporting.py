"""Reports of a failure on a rank: its traceback, the other failures in a line each, the output of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback

from accel_testing.ranks.wire import Answer


@dataclass(frozen=True, slots=True)
class _Story:
    text: str
    reason: str
    place: tuple[str, int]
    outputs: Sequence[tuple[int, str]]


def attach(
    error: BaseException,
    outputs: Sequence[tuple[int, str]],
    *,
    first: tuple[int, Answer] | None = None,
    others: Sequence[tuple[int, Answer]] = (),
) -> BaseException:
    """Returns the same exception with the data that ``show_ranks`` needs."""
    if first is None:
        text, reason, place = str(error), str(error).partition("\n")[0], ("ranks", 0)
    else:
        rank, answer = first
        text = f"{answer.report.rstrip()}\n\non rank {rank}" + "".join(
            f"\nrank {other} failed later: {one.reason}" for other, one in others
        )
        reason, place = f"{answer.reason} (rank {rank})", answer.place
    error.__dict__["_accel_story"] = _Story(text, reason, place, outputs)
    return error


def show_ranks(report: pytest.TestReport, error: BaseException) -> None:
    """Replaces this process's traceback, which shows only the harness, by the rank's."""
    story = getattr(error, "_accel_story", None)
    if not isinstance(story, _Story):
        return
    if report.failed:
        entry = ReprEntryNative([story.text + "\n"])
        crash = ReprFileLocation(story.place[0], story.place[1], story.reason)
        report.longrepr = ReprExceptionInfo(ReprTraceback([entry], None, "native"), crash)
    report.sections += [(f"Captured output of rank {rank}", text) for rank, text in story.outputs]
