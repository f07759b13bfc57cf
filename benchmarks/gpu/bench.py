"""A section's surroundings: device, sizes, time left, and the file that its rows are written to."""

import gc
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.gpu.goals import BY_NAME

T = TypeVar("T")


class NeedsCuda(Exception):
    """A measurement that the CPU cannot stand in for; the text says why."""


@dataclass
class Bench:
    """What a section measures on, and where it puts what it finds.

    Attributes:
        file: receives one JSON object a line, flushed at once, so that a section which is killed keeps its rows.
        deadline: of ``time.monotonic``, after which no further case begins.
    """

    section: str
    file: Path
    device: torch.device
    tiny: bool
    deadline: float
    folder: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def on_cuda(self) -> bool:
        """Whether the device is an NVIDIA or AMD GPU."""
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def pick(self, full: T, tiny: T) -> T:
        """The size for this run."""
        return tiny if self.tiny else full

    def note(self, kind: str, **facts: Any) -> None:
        """Writes one line."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "section": self.section, **facts}) + "\n")

    def row(self, case: str, metric: str, value: Any, unit: str = "", *, goal: str | None = None) -> None:
        """Writes one measured value; ``goal`` is the name of the goal that it is held to, on a GPU at full size."""
        assert goal is None or goal in BY_NAME, goal
        judged = {} if goal is None or self.tiny or not self.on_cuda else {"goal": goal}
        self.note("row", case=case, metric=metric, value=value, unit=unit, **judged)

    def attempt(self, case: str, measure: Callable[[], object], *, cuda: str | None = None) -> None:
        """Runs one case; its failure is a line and does not end the section. ``cuda``: why it needs a GPU."""
        if cuda is not None and not self.on_cuda:
            self.note("needs cuda", case=case, why=cuda)
            return
        if self.left <= 0:
            self.note("dropped", case=case, why="no time was left")
            return
        try:
            measure()
        except NeedsCuda as error:
            self.note("needs cuda", case=case, why=str(error))
        except Exception as error:
            short = f"{type(error).__name__}: {error}"
            self.note("failed", case=case, error=short[:2000], traceback=traceback.format_exc()[-6000:])
        finally:
            self.clear()

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def clear(self) -> None:
        """Frees the memory that nothing holds any more, so that the next case has all of it."""
        gc.collect()
        if self.on_cuda:
            torch.cuda.empty_cache()

    def accelerator(self, **options: Any) -> Any:
        """An Accelerator on the section's device."""
        from accel import Accelerator

        return Accelerator(cpu=not self.on_cuda, **options)
