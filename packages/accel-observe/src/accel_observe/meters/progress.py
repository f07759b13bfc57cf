"""Progress of a run on the main rank: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, final

from accel_observe.meters.meter import Meter


@final
class Progress:
    """Progress bar made by ``accelerator.progress(loader)``: iterate it, and call ``step`` at the end of each step.

        for batch in (bar := accelerator.progress(loader)):
            ...
            bar.step(loss, lr=scheduler.get_last_lr()[0])

    Attributes:
        meter: makes the readings that are shown.
    """

    def __init__(
        self,
        loader: Any,
        meter: Meter,
        *,
        shown: bool,
        stream: IO[str] | None = None,
        description: str = "",
        seconds: float = 10.0,
    ) -> None:
        self.meter = meter
        self._loader = loader
        self._shown = shown
        self._stream = stream or sys.stderr
        self._description = description
        self._seconds = seconds
        self._facts: dict[str, Any] = {}
        self._done = 0
        self._last_line = time.monotonic()
        self._bar: Any = None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yields the loader's batches."""
        try:
            total: int | None = len(self._loader)
        except TypeError:
            total = None
        self._done = 0
        started = time.monotonic()
        write = self._open(total)
        try:
            for batch in self.meter.watch(self._loader):
                yield batch
                self._done += 1
                if write is not None:
                    write(self._line(total, time.monotonic() - started))
        finally:  # also where the loop breaks off
            if self._bar is not None:
                self._bar.close()
        if self._bar is not None:
            self._bar = None
        elif write is not None and self._done:
            self._print(self._line(total, time.monotonic() - started))

    def step(self, loss: Any = None, **facts: Any) -> None:
        """Ends a step, see ``Meter.step``; also shows ``facts`` such as ``lr``."""
        reading = self.meter.step(loss)
        self._facts.update(facts)
        if reading is not None:
            self._facts["loss"] = reading.loss

    def _open(self, total: int | None) -> Callable[[str], None] | None:
        if not self._shown:
            return None
        if not self._stream.isatty():
            return self._now_and_then
        from tqdm import tqdm

        bar = self._bar = tqdm(total=total, desc=self._description or None, file=self._stream, dynamic_ncols=True)

        def update(line: str) -> None:
            bar.update(1)
            bar.set_postfix_str(line, refresh=False)

        return update

    def _now_and_then(self, line: str) -> None:
        if time.monotonic() - self._last_line >= self._seconds:
            self._last_line = time.monotonic()
            self._print(line)

    def _print(self, line: str) -> None:
        prefix = f"{self._description}: " if self._description else ""
        print(f"{prefix}{line}", file=self._stream, flush=True)

    def _line(self, total: int | None, seconds: float) -> str:
        parts = []
        if self._bar is None:
            of = "" if total is None else f"/{total}"
            left = f", {clock_text(seconds / self._done * (total - self._done))} left" if total and self._done else ""
            parts.append(f"{self._done}{of} in {clock_text(seconds)}{left}")
        parts += [f"{name} {_number(value)}" for name, value in self._facts.items() if value is not None]
        reading = self.meter.last
        if reading is not None:
            parts.append(f"{_number(reading.samples_per_second)} samples/s")
            if reading.tokens_per_second is not None:
                parts.append(f"{_number(reading.tokens_per_second)} tokens/s")
            parts.append(f"{reading.memory / 2**20:.0f} MiB")
        return ", ".join(parts)


def clock_text(seconds: float) -> str:
    """Formats seconds as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: Any) -> str:
    return f"{float(value):.4g}" if isinstance(value, int | float) or hasattr(value, "item") else str(value)
