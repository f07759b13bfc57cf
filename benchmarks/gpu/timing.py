"""Times of variants that take turns: on the wall, on the device and of the host's thread."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.gpu.bench import Bench

Step = Callable[[], object]


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, as means over a block of steps.

    Attributes:
        wall: from the first call until the device has finished the last.
        device: between two events on the device's stream; the wall's on a CPU.
        host: processor time of the calling thread.
    """

    wall: float
    device: float
    host: float


@dataclass
class Times:
    """Blocks by variant; the same position in each list was measured in the same round."""

    blocks: dict[str, list[StepTime]] = field(default_factory=dict)

    def median(self, name: str, clock: str = "wall") -> float:
        """Median seconds of one step."""
        return float(statistics.median(getattr(block, clock) for block in self.blocks[name]))

    def ratio(self, name: str, base: str, clock: str = "wall") -> float:
        """Median over the rounds of ``name``'s time over ``base``'s."""
        pairs = zip(self.blocks[name], self.blocks[base], strict=True)
        return float(statistics.median(getattr(a, clock) / max(getattr(b, clock), 1e-12) for a, b in pairs))

    def added(self, name: str, base: str, clock: str = "wall") -> float:
        """Median over the rounds of what ``name`` takes longer, in microseconds a step."""
        pairs = zip(self.blocks[name], self.blocks[base], strict=True)
        return float(statistics.median(getattr(a, clock) - getattr(b, clock) for a, b in pairs)) * 1e6


def block(bench: Bench, step: Step, steps: int) -> StepTime:
    """Times ``steps`` steps in a row."""
    bench.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if bench.on_cuda else []
    wall, host = time.perf_counter(), time.thread_time()
    if events:
        events[0].record()
    for _ in range(steps):
        step()
    host = time.thread_time() - host
    if events:
        events[1].record()
    bench.synchronize()
    wall = time.perf_counter() - wall
    device = events[0].elapsed_time(events[1]) / 1e3 if events else wall
    return StepTime(wall / steps, device / steps, host / steps)


def measure(
    bench: Bench, variants: Mapping[str, Step], *, steps: int, rounds: int, warmup: int = 1, seconds: float = 20.0
) -> Times:
    """Times all variants once a round, in an order that turns; after ``seconds`` no round but the third begins."""
    names, times = list(variants), Times({name: [] for name in variants})
    for name in names:
        for _ in range(warmup):
            block(bench, variants[name], steps)
    ends = time.monotonic() + min(seconds, max(bench.left, 0.0))
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            if number >= 3 and time.monotonic() > ends:
                break
            for position in range(len(names)):
                name = names[(position + number) % len(names)]
                times.blocks[name].append(block(bench, variants[name], steps))
    finally:
        gc.enable()
    return times
