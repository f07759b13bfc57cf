"""Observation of a run: meters, progress, profiles, explanations."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from torch.profiler import profile

    from accel.loop.accumulator import StepClock
    from accel.observe.explain import Explanation
    from accel.observe.profiler import ProfileKwargs
    from accel.observe.run_log import RunLog
    from accel.prepared import PreparedObjects
    from accel.setup.run_strategy import RunStrategy
    from accel_launch.config.model import AccelConfig
    from accel_observe.meters.health import LossWatch
    from accel_observe.meters.meter import Meter
    from accel_observe.meters.progress import Progress


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


@final
class Monitor:
    """Observers of a run; nothing is observed by default.

    Attributes:
        run_progress: progress of the run over restarts.
    """

    def __init__(
        self,
        strategy: "RunStrategy",
        prepared: "PreparedObjects",
        clock: "StepClock",
        config: "AccelConfig",
        log: "RunLog",
        profiling: "ProfileKwargs | None",
    ) -> None:
        self._strategy = strategy
        self._prepared = prepared
        self._clock = clock
        self._config = config
        self._log = log
        self._profiling = profiling
        self.run_progress = RunProgress.start()
        self._meter: Meter | None = None
        self._told_stragglers: set[tuple[int, str]] = set()
        self._counted: Mapping[str, dict[str, int]] = {}

    def meter(
        self,
        *,
        every: int = 10,
        tokens: Callable[[Any], int] | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
        watch_loss: "LossWatch | bool" = True,
    ) -> "Meter":
        """See ``Accelerator.meter``."""
        from accel_observe.meters.flops import peak_flops as looked_up
        from accel_observe.meters.health import LossWatch
        from accel_observe.meters.meter import Meter
        from accel_observe.meters.observed_run import ObservedRun

        if self._meter is not None:
            self._meter.close()
        session = self._strategy.session
        run = ObservedRun(
            session=session,
            backend=self._strategy.backend,
            models=tuple(self._prepared.models),
            optimizers=tuple(self._prepared.inner_optimizers),
            progress=self.run_progress,
            log=self._log,
            told_stragglers=self._told_stragglers,
        )
        self._meter = Meter(
            run,
            every=every,
            tokens=tokens,
            flops_per_sample=flops_per_sample,
            peak=peak_flops or looked_up(session.device),
            watch_loss=LossWatch() if watch_loss is True else watch_loss or None,
        )
        self._log.phases = self._meter.clock
        return self._meter

    def progress(self, loader: Any, *, description: str, seconds: float, options: Mapping[str, Any]) -> "Progress":
        """See ``Accelerator.progress``."""
        from accel_observe.meters.progress import Progress

        meter = self.meter(**options) if self._meter is None or options else self._meter
        shown = self._strategy.session.is_main_process
        return Progress(loader, meter, shown=shown, stream=sys.stderr, description=description, seconds=seconds)

    @contextmanager
    def profile(self, options: "ProfileKwargs | None" = None) -> "Iterator[profile]":
        """See ``Accelerator.profile``."""
        from accel.observe.profiler import MERGED, SUMMARY, ProfileKwargs, merge_traces, summary_table, top_operators

        options = options or self._profiling or ProfileKwargs()
        session = self._strategy.session
        profiler = options.build()
        with profiler:
            yield profiler
        if options.output_trace_dir is None:
            return
        folder = Path(options.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"profile_{session.rank}.json"))
        session.wait_for_everyone()
        if session.is_main_process:
            traces = [(rank, folder / f"profile_{rank}.json") for rank in range(session.world_size)]
            merge_traces([(rank, path) for rank, path in traces if path.exists()], folder / MERGED)
            (folder / SUMMARY).write_text(summary_table(top_operators(profiler, 30)) + "\n", encoding="utf-8")

    def explain(self) -> "Explanation":
        """See ``Accelerator.explain``."""
        from accel.observe.explain import explain

        return explain(self._strategy, self._prepared, self._clock, self._config, self._counted)

    @contextmanager
    def count_communication(self) -> "Iterator[dict[str, dict[str, int]]]":
        """See ``Accelerator.count_communication``."""
        from accel.observe.explain import counted_communication

        with counted_communication() as found:
            yield found
        self._counted = found

    @contextmanager
    def memory_snapshot(self, path: str | Path | None, count: int) -> Iterator[None]:
        """See ``Accelerator.memory_snapshot``."""
        from accel_state.device.memory import should_reduce_batch_size

        try:
            yield
        except Exception as error:
            if should_reduce_batch_size(error):
                from accel.observe.memory_snapshot import largest_tensors, names_of, write_snapshot

                held = largest_tensors(names_of(self._prepared.models, self._prepared.inner_optimizers), count)
                error.add_note("the largest tensors:\n" + "\n".join(map(str, held)))
                if path is not None:
                    session = self._strategy.session
                    place = Path(str(path).replace("{rank}", str(session.rank)))
                    write_snapshot(place, error, held, session.device)
            raise
