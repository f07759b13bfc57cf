"""Observation of a run: meters, progress, profiles, explanations."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from accel_observe.meters.observed_run import ObservedRun, RunLog, RunProgress

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.profiler import profile

    from accel.loop.accumulator import StepClock
    from accel.prepared import PreparedObjects
    from accel.setup.run_strategy import RunStrategy
    from accel_launch.config.model import AccelConfig
    from accel_observe.meters.health import LossWatch
    from accel_observe.meters.meter import Meter
    from accel_observe.meters.progress import Progress
    from accel_observe.profiling.held_memory import HeldMemory
    from accel_observe.profiling.profiler import ProfileKwargs
    from accel_observe.report.explanation import Explanation
    from accel_state import ParallelismConfig


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
        log: RunLog,
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

        if self._meter is not None:
            self._meter.close()
        session = self._strategy.session
        run = ObservedRun(
            session=session,
            data_shards=self._strategy.data_shard.count,
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

    def close(self) -> None:
        """Closes the meter, which looks at the last loss of this rank."""
        if self._meter is not None:
            self._meter.close()

    def release(self) -> None:
        """Closes the meter and drops it, with the models and optimizers that it observes."""
        self.close()
        self._meter = None

    def progress(self, loader: Any, *, description: str, seconds: float, options: Mapping[str, Any]) -> "Progress":
        """See ``Accelerator.progress``."""
        from accel_observe.meters.progress import Progress

        meter = self.meter(**options) if self._meter is None or options else self._meter
        shown = self._strategy.session.is_main_process
        return Progress(loader, meter, shown=shown, stream=sys.stderr, description=description, seconds=seconds)

    def profile(self, options: "ProfileKwargs | None" = None) -> "AbstractContextManager[profile]":
        """See ``Accelerator.profile``."""
        from accel_observe.profiling.profiler import ProfileKwargs, profiled

        return profiled(options or self._profiling or ProfileKwargs(), self._strategy.session)

    def explain(self) -> "Explanation":
        """See ``Accelerator.explain``. Not a collective: any rank may call it."""
        from accel_observe.report.explanation import Explanation, summary_of_loader, summary_of_model

        strategy, prepared, clock = self._strategy, self._prepared, self._clock
        session, ends_windows = strategy.session, clock.plugin.sync_with_dataloader
        readers = session.world_size // strategy.data_shard.count
        return Explanation(
            backend=strategy.choice.name,
            reasons=tuple(strategy.choice.reasons),
            device=str(session.device.torch),
            processes=session.world_size,
            data_shards=strategy.data_shard.count,
            accumulation=clock.num_steps,
            timeout_seconds=None if session.timeout is None else session.timeout.total_seconds(),
            precision=strategy.policy.table(),
            models=tuple(summary_of_model(model, strategy.backend.unwrap(model)) for model in prepared.models),
            loaders=tuple(
                summary_of_loader(one, num_steps=clock.num_steps, ends_windows=ends_windows, readers=readers)
                for one in prepared.loaders
            ),
            learning_rates=tuple(group["lr"] for one in prepared.optimizers for group in one.param_groups),
            settings=tuple((row.name, str(row.value), str(row.origin)) for row in self._config.explain()),
            communication=dict(self._counted),
            axes={axis: strategy.parallelism.size(axis) for axis in strategy.parallelism.active_mesh_dims},
        )

    def describe(self) -> dict[str, Any]:
        """The explanation as plain values, for the trackers."""
        return self.explain().to_dict()

    def memory(self) -> "HeldMemory":
        """Bytes that the prepared models and optimizers take on this rank at this moment."""
        from accel_observe.profiling.held_memory import held_memory

        return held_memory(self._strategy.backend, self._prepared.models, self._prepared.optimizers_of)

    def degrees(self) -> "ParallelismConfig":
        """Degrees of parallelism, as the backend applies them."""
        return self._strategy.parallelism

    def trains(self, module: object) -> bool:
        """Whether ``prepare`` returned this model."""
        return any(module is model for model in self._prepared.models)

    @property
    def device_type(self) -> str:
        """Type of the device that this rank computes on."""
        return self._strategy.session.device.type

    @property
    def optimizers(self) -> "Sequence[Optimizer]":
        """The users' optimizers inside the prepared ones."""
        return self._prepared.inner_optimizers

    @contextmanager
    def count_communication(self) -> "Iterator[dict[str, dict[str, int]]]":
        """See ``Accelerator.count_communication``."""
        from accel_observe.profiling.communication import counted_communication

        with counted_communication() as found:
            yield found
        self._counted = found

    def memory_snapshot(self, path: str | Path | None, count: int) -> AbstractContextManager[None]:
        """See ``Accelerator.memory_snapshot``."""
        from accel_observe.profiling.memory_snapshot import memory_snapshot

        return memory_snapshot(self._strategy.session, self._prepared, path, count)
