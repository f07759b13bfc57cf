"""Repeated-layer compression: traces three of a run of equal blocks, and repeats the second block's marks.

The first two and the last block of a run of equal blocks in one list are traced; the others return their input. The
marks of the second block are then repeated, in forward and in backward, for each block left out.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn

from accel_planner.profile.profile import Mark, Timeline

_KEPT = 3


@final
@dataclass(slots=True)
class _Output:
    """Output of the preceding block: shapes of its tensors, and a weak reference to the first one."""

    many: bool = False
    shapes: "tuple[Any, ...]" = ()
    first: "Callable[[], Any]" = lambda: None

    def look(self, value: Any) -> None:
        """Records an output."""
        self.many = isinstance(value, tuple)
        values = value if self.many else (value,)
        self.shapes = tuple(_shape(one) for one in values)
        if values and isinstance(values[0], torch.Tensor):
            self.first = weakref.ref(values[0])


@final
class PassedOver(nn.Module):
    """Placeholder of a block: returns its first argument, in a tuple if the blocks return tuples."""

    def __init__(self, before: _Output) -> None:
        super().__init__()
        self._before = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the first argument.

        Raises:
            CannotFoldError: the blocks' outputs differ from their inputs in shape or number; or the model computes
                between blocks (for example adds their input), which would be counted twice for each block.
        """
        first = args[0] if args else next(iter(kwargs.values()))
        given, *rest = self._before.shapes
        if given != _shape(first) or any(shape is not None for shape in rest) or self._before.first() is not first:
            raise CannotFoldError
        return (first, *rest) if self._before.many else first


class CannotFoldError(Exception):
    """The blocks cannot be left out; all of them must be traced."""


def foldable(model: nn.Module, blocks: Sequence[str]) -> list[list[str]]:
    """Runs of more than three consecutive blocks of one list that are equal except for their index; pure."""
    runs: list[list[str]] = []
    for name in blocks:
        parent, _, place = name.rpartition(".")
        before = runs[-1][-1].rpartition(".") if runs else None
        follows = before and before[0] == parent and before[2].isdecimal() and place == str(int(before[2]) + 1)
        if follows and _alike(model.get_submodule(runs[-1][0]), model.get_submodule(name), len(runs[-1])):
            runs[-1].append(name)
        else:
            runs.append([name])
    return [run for run in runs if len(run) > _KEPT]


def fold(model: nn.Module, runs: Iterable[Sequence[str]]) -> None:
    """Replaces, in place, all but the first two and the last block of each run with placeholders."""
    for run in runs:
        before = _Output()
        model.get_submodule(run[1]).register_forward_hook(lambda _, args, output, before=before: before.look(output))
        for name in run[2:-1]:
            parent, _, place = name.rpartition(".")
            model.get_submodule(parent).register_module(place, PassedOver(before))


def unfold(timeline: Timeline, units: Sequence[str], runs: Iterable[Sequence[str]]) -> Timeline:
    """Reconstructs the timeline of all blocks; pure.

    Raises:
        CannotFoldError: the backward did not reach the blocks.
    """
    index = {name: place for place, name in enumerate(units)}
    for run in runs:
        first, pattern, last = index[run[0]], index[run[1]], index[run[-1]]
        missing = [index[name] for name in run[2:-1]]
        marks, flops = _repeat(list(timeline.marks), (first, pattern, last), missing)
        timeline = Timeline(tuple(marks), timeline.flops + flops)
    return timeline


def _repeat(marks: list[Mark], kept: tuple[int, int, int], missing: Sequence[int]) -> tuple[list[Mark], int]:
    """Inserts copies of the second block's marks before the last block, each at a higher memory level."""
    first, pattern, last = kept
    begun, ended = _place(marks, "enter", pattern), _place(marks, "enter", last)
    back, stop = _place(marks, "reenter", pattern), _place(marks, "reenter", first)
    if not begun < ended < back < stop:
        raise CannotFoldError
    flops = marks[ended].flops - marks[begun].flops + marks[stop].flops - marks[back].flops
    forward = marks[begun + 1 : ended + 1]  # from the block's entry to the next block's entry
    grown = marks[ended].level - marks[begun].level
    result = marks[: ended + 1]
    result[-1] = replace(result[-1], unit=missing[0])
    for number, unit in enumerate(missing, 1):
        following = missing[number] if number < len(missing) else last
        copies = [_moved(mark, number * grown, unit if mark.unit == pattern else mark.unit) for mark in forward]
        copies[-1] = replace(copies[-1], unit=following)
        result += copies
    # Memory that blocks keep until the forward ends (weights cast by autocast) is freed by then: the backward starts
    # lower.
    shrunk = marks[back].level - marks[stop].level
    out = _place(marks, "exit", 0)
    if not ended < out < back:
        raise CannotFoldError
    result += [_moved(mark, len(missing) * grown, mark.unit) for mark in marks[ended + 1 : out + 1]]
    result += [_moved(mark, len(missing) * shrunk, mark.unit) for mark in marks[out + 1 : back + 1]]
    first_after = len(result) - (back - out)
    highest = max(marks[out].level + len(missing) * grown, marks[out + 1].highest + len(missing) * shrunk)
    result[first_after] = replace(result[first_after], highest=highest)
    result[-1] = replace(result[-1], unit=missing[-1])
    backward = marks[back + 1 : stop + 1]
    for number, unit in enumerate(reversed(missing), 1):
        following = missing[-1 - number] if number < len(missing) else pattern
        copies = [
            _moved(mark, (len(missing) - number + 1) * shrunk, unit if mark.unit == pattern else mark.unit)
            for mark in backward
        ]
        copies[-1] = replace(copies[-1], unit=following)
        result += copies
    return result + marks[back + 1 :], flops * len(missing)


def _place(marks: Sequence[Mark], kind: str, unit: int) -> int:
    """Index of the only mark of this kind for ``unit``.

    Raises:
        CannotFoldError: there is not exactly one.
    """
    found = [place for place, mark in enumerate(marks) if mark.kind == kind and mark.unit == unit]
    if len(found) != 1:
        raise CannotFoldError
    return found[0]


def _moved(mark: Mark, by: int, unit: int) -> Mark:
    return replace(mark, highest=mark.highest + by, level=mark.level + by, unit=unit)


def _alike(one: nn.Module, other: nn.Module, distance: int) -> bool:
    """Whether two modules have the same classes, parameters and options; integers may differ by ``distance``."""
    mine, theirs = list(one.named_modules()), list(other.named_modules())
    if [(name, type(module)) for name, module in mine] != [(name, type(module)) for name, module in theirs]:
        return False
    for (_, left), (_, right) in zip(mine, theirs, strict=True):
        if [(_shape(t), getattr(t, "requires_grad", None)) for t in _own(left)] != [
            (_shape(t), getattr(t, "requires_grad", None)) for t in _own(right)
        ]:
            return False
        if any(not _counts(vars(right).get(key), value, distance) for key, value in vars(left).items()):
            return False
    return True


def _own(module: nn.Module) -> list[Any]:
    return [*module._parameters.values(), *module._buffers.values()]


def _shape(tensor: Any) -> Any:
    return (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, torch.Tensor) else None


def _counts(theirs: object, mine: object, distance: int) -> bool:
    if isinstance(mine, bool | float | str) or mine is None:
        return theirs == mine
    return not isinstance(mine, int) or theirs in (mine, mine + distance)
