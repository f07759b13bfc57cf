"""Observation of a run: meters, progress, profiles, explanations."""

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
    """Progress of a run over restarts, saved in checkpoints to compute goodput.

    Attributes:
        began: when the run was first started, in seconds since 1970.
        resumed: when this process started or resumed the run.
        productive: seconds of earlier processes that contributed to the checkpoint.
        steps: optimizer steps that count.
    """

    began: float
    resumed: float
    productive: float = 0.0
    steps: int = 0

    @classmethod
    def start(cls) -> "RunProgress":
        """Progress of a run that begins now."""
        now = time.time()
        return cls(now, now)

    def goodput(self, now: float) -> float:
        """Fraction of the time since the first start that was spent on steps that count."""
        return (self.productive + now - self.resumed) / max(now - self.began, 1e-9)

    def save(self) -> dict[str, Any]:
        """State for the checkpoint."""
        now = time.time()
        return asdict(RunProgress(self.began, now, self.productive + now - self.resumed, self.steps))

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Resumes from a checkpoint; work after it is lost."""
        if saved:
            self.began, self.productive, self.steps = saved["began"], saved["productive"], saved["steps"]
            self.resumed = time.time()


class ObservingFacet(ABC):
    """Methods that start observing a run; nothing is observed by default."""

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
        """Device of prepared models and batches."""
        return self.session.device.torch

    def log_event(self, kind: str, step: int | None = None, **facts: Any) -> None:
        """Records an event in the run log. Default: no log."""

    def _note_skip(self) -> None:
        """Called after an optimizer step was skipped on all ranks."""
        scaler = self.backend.loss_scale
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
        """Measures throughput, time by phase, memory and health from now on; one meter at a time. Call it on all ranks.

        Args:
            every: optimizer steps between two readings.
            tokens: function that returns the number of tokens in a batch of this rank.
            flops_per_sample: operations of one sample, forward and backward (``accel_observe.meters.count_flops``).
            peak_flops: peak FLOP/s of one device; None: looked up by its name.
            watch_loss: definition of an anomalous loss; False: losses are not checked (a check waits for the device).
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
        """Iterates the loader's batches with a progress line on the main rank: a bar, or plain lines every few seconds.

        Iterate it instead of the loader, on all ranks, and call its ``step(loss, lr=...)`` at the end of each step.
        ``options`` are those of ``meter``; the meter is kept from one epoch to the next.
        """
        from accel_observe.meters.progress import Progress

        meter = self.meter(**options) if self._meter is None or options else self._meter
        shown = self.session.is_main_process
        return Progress(loader, meter, shown=shown, stream=sys.stderr, description=description, seconds=seconds)

    @contextmanager
    def profile(self, profile_handler: "ProfileKwargs | None" = None) -> "Iterator[profile]":
        """Profiles the block with torch's profiler, and yields the profiler.

        With ``output_trace_dir`` every rank writes ``profile_<rank>.json`` there; after all ranks have, the main rank
        writes a merged trace, and a table of its slowest operators. Without an argument, the ``ProfileKwargs`` of
        ``kwargs_handlers`` apply.

        Collective: every rank of the group must call this.
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
        """Explains the choices made for this run, with reasons, and its steps; print the result, or read its fields.

        Computes and communicates nothing; call it after all objects are prepared. Communication of a step must be
        counted during the step (``count_communication``), and is included from then on.
        """
        from accel.observe.explain import explain

        return explain(self)  # type: ignore[arg-type]

    @contextmanager
    def count_communication(self) -> "Iterator[dict[str, dict[str, int]]]":
        """Counts collectives in the block, and the bytes that this rank passes to them, by name of the collective.

        The mapping, ``{"all_reduce": {"calls": 1, "bytes": ...}, ...}``, is filled when the block ends. Collectives
        that the backend issues itself are included, as torch's profiler records them.
        """
        from accel.observe.explain import counted_communication

        with counted_communication() as found:
            yield found
        self._counted = found

    @contextmanager
    def memory_snapshot(self, path: str | Path | None = None, *, count: int = 20) -> Iterator[None]:
        """On an out-of-memory error in the block, adds the largest tensors to the error, by name if they have one.

        With ``path`` the report is also written to a file (``{rank}`` in it stands for the rank), with the allocator's
        own statistics if there are any. The error is raised unchanged otherwise.
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
