"""Measures variants in turn, so that a machine that slows down slows all of them, and reports medians."""

import argparse
import gc
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Rounds = dict[str, list[float]]
"""Seconds of each round by variant; the same position in each list was measured in the same round."""


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""What ``--clock`` chooses from; on a machine that others use too, processor time is steadier where nothing waits."""


def interleave(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 1,
    before: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Rounds:
    """Times every variant once a round, in an order that turns from round to round.

    ``before`` is called before the clock (in seconds) starts; several ranks give a barrier. Where a variant returns a
    function, that is called after the clock has stopped, to wait for what goes on in the background or to clear away.
    """
    names = list(variants)
    times: Rounds = {name: [] for name in names}
    for number in range(-warmup, rounds):
        for position in range(len(names)):
            name = names[(position + number) % len(names)]
            gc.collect()
            if before is not None:
                before()
            gc.disable()
            started = clock()
            rest = variants[name]()
            elapsed = clock() - started
            gc.enable()
            if callable(rest):
                rest()
            if number >= 0:
                times[name].append(elapsed)
    return times


@dataclass(frozen=True)
class Blocks:
    """Seconds of short blocks of two variants, measured in turn: what a machine does lasts longer than a pair of them.

    Attributes:
        first: of the one variant, a block after the other.
        second: of the other variant; blocks of one number were measured one after the other.
    """

    first: list[float]
    second: list[float]

    def excess(self) -> tuple[float, float, float]:
        """What the first takes beyond the second, in percent: median of the pairs and the ends of its 95 % interval."""
        ratios = sorted((a / b - 1) * 100 for a, b in zip(self.first, self.second, strict=True))
        half, middle = 0.98 * len(ratios) ** 0.5, (len(ratios) - 1) / 2
        low, high = max(0, math.floor(middle - half)), min(len(ratios) - 1, math.ceil(middle + half))
        return statistics.median(ratios), ratios[low], ratios[high]


def paired(
    first: Callable[[], object],
    second: Callable[[], object],
    pairs: int,
    *,
    clocks: Sequence[Callable[[], float]],
    before: Callable[[], object] | None = None,
    warmup: int = 3,
) -> list[Blocks]:
    """Times two variants in pairs, whose order turns, by several clocks at once.

    ``before`` as in ``interleave``. Garbage is collected between pairs only.
    """
    variants = (first, second)
    found = [Blocks([], []) for _ in clocks]
    gc.collect()
    gc.disable()
    try:
        for number in range(-warmup, pairs):
            spent: dict[int, list[float]] = {}
            for place in (0, 1) if number % 2 else (1, 0):
                if before is not None:
                    before()
                started = [clock() for clock in clocks]
                variants[place]()
                spent[place] = [clock() - then for clock, then in zip(clocks, started, strict=True)]
            for blocks, one, other in zip(found, spent[0], spent[1], strict=True):
                if number >= 0:
                    blocks.first.append(one)
                    blocks.second.append(other)
            if number % 20 == 0:
                gc.collect()
    finally:
        gc.enable()
    return found


def calls(run: Callable[[], object]) -> int:
    """Calls of Python functions and of C functions by Python in this thread while ``run`` runs.

    The number is the same on any machine, however busy, unless what runs depends on time.
    """
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def ratio(times: Rounds, name: str, base: str) -> float:
    """Median over the rounds of ``name``'s time over ``base``'s."""
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


def added(times: Rounds, name: str, base: str, *, per: int = 1) -> float:
    """Median over the rounds of what ``name`` took longer than ``base``, in microseconds for each of ``per`` parts."""
    return statistics.median(a - b for a, b in zip(times[name], times[base], strict=True)) / per * 1e6


def extra_memory(run: Callable[[], object]) -> int | None:
    """Bytes by which this process's resident memory rose at most while ``run`` ran; None where that is unknown."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
        before = _memory("VmRSS")
        run()
        return _memory("VmHWM") - before
    except OSError:
        run()
        return None


def _memory(name: str) -> int:
    """One line of the kernel's account of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@dataclass
class Report:
    """The rows of one benchmark, for people and for programs."""

    title: str
    columns: Sequence[str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **row: Any) -> None:
        """Adds a row, whose keys are columns, and prints it to stderr: a run that breaks off shows what it measured."""
        self.rows.append(row)
        print(*(f"{key}={_text(value)}" for key, value in row.items()), file=sys.stderr, flush=True)

    def show(self, path: Path | None = None) -> None:
        """Prints the table; writes the rows and what they were measured with to ``path``."""
        import torch
        from rich.console import Console
        from rich.table import Table

        table = Table(title=self.title)
        for number, column in enumerate(self.columns):
            table.add_column(column.replace("_", " "), justify="right" if number else "left", no_wrap=not number)
        for row in self.rows:
            table.add_row(*(_text(row.get(column)) for column in self.columns))
        Console(width=130).print(table)
        if path is not None:
            machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"title": self.title, **machine, "rows": self.rows}, indent=2) + "\n")


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--peers", action="store_true", help="measure Accelerate and Lightning Fabric too")
    options.add_argument("--rounds", type=int, default=15, help="rounds, of which medians are taken")
    options.add_argument("--quick", action="store_true", help="a short run that shows that it works")
    options.add_argument("--json", type=Path, default=None, help="also write the rows to this file")
    return options
