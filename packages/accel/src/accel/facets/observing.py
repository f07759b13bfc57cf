"""An Accelerator's side towards whoever watches the run: meters, progress, profiles, explanations."""

import sys
import time
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.profiler import profile

    from accel.observe.explain import Explanation
    from accel.observe.profiler import ProfileKwargs
    from accel.optimizer import PreparedOptimizer
    from accel_backends import Backend
    from accel_observe.meters.health import LossWatch
    from accel_observe.meters.meter import Meter
    from accel_observe.meters.phases import PhaseClock
    from accel_observe.meters.progress import Progress
    from accel_state.session import Session


@final
@dataclass(slots=True)
class RunProgress:
    """How far a run has come, over restarts: what goes into a checkpoint to know what a crash has cost.

    Attributes:
        began: when the run was first started, in seconds since 1970.
        resumed: when this process began to work at it.
        productive: seconds of earlier processes that went into what was saved.
        steps: optimizer steps that count.
    """

    began: float
    resumed: float
    productive: float = 0.0
    steps: int = 0

    @classmethod
    def start(cls) -> "RunProgress":
        """A run that begins now."""
        now = time.time()
        return cls(now, now)

    def goodput(self, now: float) -> float:
        """Part of the time since the first start that went into steps that count."""
        return (self.productive + now - self.resumed) / max(now - self.began, 1e-9)

    def save(self) -> dict[str, Any]:
        """For the checkpoint."""
        now = time.time()
        return asdict(RunProgress(self.began, now, self.productive + now - self.resumed, self.steps))

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Goes on from a checkpoint; what came after it is lost."""
        if saved:
            self.began, self.productive, self.steps = saved["began"], saved["productive"], saved["steps"]
            self.resumed = time.time()


class ObservingFacet(ABC):
    """Opens what watches a run; nothing is watched unless it is asked for."""

    session: "Session"
    backend: "Backend"
    _models: list[nn.Module]
    _optimizers: "list[PreparedOptimizer]"
    _meter: "Meter | None" = None
    _phases: "PhaseClock | None" = None
    _progress_of_run: RunProgress
    _told_stragglers: set[tuple[int, str]]
    _profile_options: "ProfileKwargs | None" = None
    _counted: Mapping[str, dict[str, int]] = MappingProxyType({})

    @property
    def device(self) -> torch.device:
        """Where prepared models and batches live."""
        return self.session.device.torch

    def log_event(self, kind: str, step: int | None = None, **facts: Any) -> None:
        """Notes in the run's own log that something happened. Default: there is no log."""

    def _note_skip(self) -> None:
        """An optimizer step was left out on all ranks."""
        scaler = self.backend.scaler
        scale = "" if scaler is None else f" at a loss scale of {scaler.current:g}"
        self.log_event("skipped", text=f"an optimizer step was left out, as gradients had overflowed{scale}")

    def meter(
        self,
        *,
        every: int = 10,
        tokens: Callable[[Any], int] | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
        watch_loss: "LossWatch | bool" = True,
    ) -> "Meter":
        """Measures speed, shares of time, memory and health, from now on; one meter at a time. On all ranks.

        Args:
            every: optimizer steps of one reading.
            tokens: how many tokens a batch of this rank holds.
            flops_per_sample: operations of one sample, forward and backward (``accel_observe.meters.count_flops``).
            peak_flops: operations a second that one device could do; None: looked up by its name.
            watch_loss: what is unusual for a loss; False: losses are not looked at (looking waits for the device).
        """
        from accel_observe.meters.flops import peak_flops as looked_up
        from accel_observe.meters.health import LossWatch
        from accel_observe.meters.meter import Meter

        if self._meter is not None:
            self._meter.close()
        watch = LossWatch() if watch_loss is True else watch_loss or None
        self._meter = Meter(
            self,
            every=every,
            tokens=tokens,
            flops_per_sample=flops_per_sample,
            peak=peak_flops or looked_up(self.device.type),
            watch_loss=watch,
        )
        self._phases = self._meter.clock
        return self._meter

    def progress(self, loader: Any, *, description: str = "", seconds: float = 10.0, **options: Any) -> "Progress":
        """The loader's batches with one line about the run on the main rank: a bar, or plain lines every few seconds.

        Iterate it instead of the loader, on all ranks, and call its ``step(loss, lr=...)`` at the end of each step.
        ``options`` are those of ``meter``; the meter is kept from one epoch to the next.
        """
        from accel_observe.meters.progress import Progress

        meter = self.meter(**options) if self._meter is None or options else self._meter
        shown = self.session.is_main_process
        return Progress(loader, meter, shown=shown, stream=sys.stderr, description=description, seconds=seconds)

    @contextmanager
    def profile(self, profile_handler: "ProfileKwargs | None" = None) -> "Iterator[profile]":
        """Records what happens inside with torch's profiler, and yields that. To be entered on all processes.

        With ``output_trace_dir`` every rank writes ``profile_<rank>.json`` there, and the main one, once all have, all
        of them in one, and a table of its operators that took longest. Without an argument, the ``ProfileKwargs`` of
        ``kwargs_handlers`` count.
        """
        from accel.observe.profiler import MERGED, SUMMARY, ProfileKwargs, merge_traces, summary_table, top_operators

        options = profile_handler or self._profile_options or ProfileKwargs()
        profiler = options.build()
        with profiler:
            yield profiler
        if options.output_trace_dir is None:
            return
        folder = Path(options.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"profile_{self.session.rank}.json"))
        self.session.wait_for_everyone()
        if self.session.is_main_process:
            ranks = range(self.session.world_size)
            traces = [(rank, folder / f"profile_{rank}.json") for rank in ranks]
            merge_traces([(rank, path) for rank, path in traces if path.exists()], folder / MERGED)
            (folder / SUMMARY).write_text(summary_table(top_operators(profiler, 30)) + "\n", encoding="utf-8")

    def explain(self) -> "Explanation":
        """What was chosen for this run and why, and what its steps are: to print, or to look into.

        Nothing is computed or communicated; ask once everything is prepared. What a step sends has to be counted while
        it is taken (``count_communication``), and is told from then on.
        """
        from accel.observe.explain import explain

        return explain(self)  # type: ignore[arg-type]

    @contextmanager
    def count_communication(self) -> "Iterator[dict[str, dict[str, int]]]":
        """Counts collectives inside, and the bytes that this rank gives to them: ``{"all_reduce": {"calls": 1, ...``.

        Filled when the block ends; what the backend does on its own is counted too, as torch's profiler sees it.
        """
        from accel.observe.explain import counted_communication

        with counted_communication() as found:
            yield found
        self._counted = found

    @contextmanager
    def memory_snapshot(self, path: str | Path | None = None, *, count: int = 20) -> Iterator[None]:
        """If memory runs out inside, the error says what the largest tensors were, by name where they have one.

        With ``path`` that is also written to a file (``{rank}`` in it stands for the rank), with the allocator's own
        account where there is one. The error goes on as it was.
        """
        from accel_state.device.memory import should_reduce_batch_size

        try:
            yield
        except Exception as error:
            if should_reduce_batch_size(error):
                from accel.observe.memory_snapshot import largest_tensors, names_of, write_snapshot

                held = largest_tensors(names_of(self._models, [one.optimizer for one in self._optimizers]), count)
                error.add_note("the largest tensors:\n" + "\n".join(map(str, held)))
                if path is not None:
                    place = Path(str(path).replace("{rank}", str(self.session.rank)))
                    write_snapshot(place, error, held, self.device)
            raise
