"""Runner of a script as one rank of many: ``python -m accel.observe.one_rank RANK WORLD {text|json} KIND TARGET``.

The process group is a fake one, so that no other rank and no network is needed. The script runs until its first
optimizer step has been taken; then the report is printed, and the process ends. KIND is ``script`` or ``module``.
"""

import contextlib
import functools
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from accel.accelerator import Accelerator
from accel.observe.explain_script import keep_files
from accel.observe.monitor import Monitor
from accel.optimizer import PreparedOptimizer
from accel_launch.launch.child_main import run_module, run_script
from accel_observe.report.rank_report import RankReport, by_axis
from accel_state.process_group.fake_group import CountedCollective, FakeTraffic, open_fake_group

if TYPE_CHECKING:
    from torch.optim import Optimizer

_SKIPS = 3
"""Skipped steps of fp16 after which the report is made without a step."""
_PATIENCE = 10.0
"""Seconds in which the script's own ``finally`` blocks may end."""
_UNPREPARED = 10
"""Steps of optimizers after which a script that has prepared nothing ends."""


@final
class _Ended(BaseException):
    """Ends the script; not an ``Exception``, so that the script's own ``except Exception`` does not catch it."""


@final
class _StepObserver:
    """Watches a script up to its first optimizer step, and prints the report.

    Attributes:
        monitor: the monitor of the newest Accelerator that has prepared an optimizer, or else of the first one.
        reported: the report has been printed.
    """

    def __init__(self, rank: int, world_size: int, traffic: FakeTraffic, write: Callable[[RankReport], None]) -> None:
        self.monitor: Monitor | None = None
        self.reported = False
        self._rank, self._world_size, self._traffic, self._write = rank, world_size, traffic, write
        self._setup: list[CountedCollective] = []
        self._stepped: set[int] = set()
        self._sent: dict[int, tuple[CountedCollective, ...]] = {}
        self._skips = self._unprepared = 0
        self._begun = False
        self._resident = 0
        self._profile = ExitStack()
        self._profiler: Any = None

    def prepared(self, monitor: Monitor) -> None:
        """Adds the collectives so far to the setup, after each ``prepare`` of an Accelerator."""
        self._setup += self._traffic.take()
        if self.monitor is None or monitor.optimizers:
            self.monitor = monitor

    def forward(self, module: object, _: object) -> None:
        """Begins the step at the first forward of a prepared model in training."""
        if self._begun or not torch.is_grad_enabled() or self.monitor is None or not self.monitor.trains(module):
            return
        self._begun = True
        self._setup += self._traffic.take()
        self._resident = self.monitor.memory().total
        if self.monitor.device_type != "cpu":
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
        else:
            from torch.profiler import ProfilerActivity, profile

            self._profiler = self._profile.enter_context(
                profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            )

    def inner_step(self, optimizer: "Optimizer", *_: object) -> None:
        """Notes that an optimizer has stepped; ends a script that trains without an Accelerator."""
        self._stepped.add(id(optimizer))
        self._unprepared += self.monitor is None
        if self._unprepared == _UNPREPARED:
            _fail(f"{_UNPREPARED} steps were taken, and no Accelerator of accel has prepared a model or an optimizer")

    def before(self, optimizer: PreparedOptimizer) -> None:
        """Ends the script before an optimizer takes a second step."""
        if id(optimizer.optimizer) in self._stepped:
            self.end()

    def after(self, optimizer: PreparedOptimizer) -> None:
        """Ends the script when every prepared optimizer has stepped, or due steps are skipped again and again."""
        assert self.monitor is not None
        self._sent[id(optimizer.optimizer)] = self._traffic.take()  # instead of that of a skipped step
        self._skips += optimizer.step_was_skipped
        if self._stepped.issuperset(map(id, self.monitor.optimizers)):
            self.end()
        if self._skips == _SKIPS:
            self.end(f"the loss scale skipped {_SKIPS} steps, so optimizer states may be missing")

    def end(self, *notes: str) -> NoReturn:
        """Prints the report once, and ends the script."""
        if self.reported:
            os._exit(0)  # the script has caught what ended it, and goes on
        try:
            self._write(self._report(notes))
        except BaseException:  # the script would catch it
            _fail(f"the report failed:\n{traceback.format_exc()}")
        self.reported = True
        threading.Thread(target=_exit_after, args=(_PATIENCE,), daemon=True).start()
        raise _Ended

    def close(self) -> None:
        """Stops the profiler, which otherwise crashes an interpreter that exits after an error of the script."""
        self._profile.close()

    def _report(self, notes: tuple[str, ...]) -> RankReport:
        assert self.monitor is not None
        step = [one for sent in self._sent.values() for one in sent]
        degrees = self.monitor.degrees()
        told = self.monitor.explain()
        return RankReport(
            rank=self._rank,
            world_size=self._world_size,
            backend=told.backend,
            reasons=told.reasons,
            axes=told.axes,
            memory=self.monitor.memory(),
            peak=self._peak(),
            setup=by_axis(self._setup, degrees, self._world_size),
            step=by_axis(step, degrees, self._world_size),
            notes=(*notes, "numbers of other ranks are taken to be this rank's: losses and gradients mean nothing"),
        )

    def _peak(self) -> int | None:
        if not self._begun:
            return None
        if self._profiler is None:
            torch.accelerator.synchronize()
            return torch.accelerator.max_memory_allocated()
        from accel_planner.measurement import highest_allocation

        self._profile.close()
        return self._resident + highest_allocation(self._profiler)


def _fail(message: str) -> NoReturn:
    """Ends this process with an error, whatever the script catches."""
    print(f"accel: {message}", file=sys.stderr, flush=True)
    os._exit(1)


def _exit_after(seconds: float) -> None:
    threading.Event().wait(seconds)
    os._exit(0)


def _watch(observer: _StepObserver) -> None:
    """Makes every Accelerator of this process report to the observer, and keep its files."""

    def observed(prepare: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(prepare)
        def prepare_observed(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
            result = prepare(self, *args, **kwargs)
            observer.prepared(self._monitor)
            return result

        return prepare_observed

    step = PreparedOptimizer.step

    def step_observed(self: PreparedOptimizer, *args: Any, **kwargs: Any) -> Any:
        if not self._clock.due:
            return step(self, *args, **kwargs)
        observer.before(self)
        result = step(self, *args, **kwargs)
        observer.after(self)
        return result

    for name in ("prepare", "prepare_model", "prepare_optimizer"):
        setattr(Accelerator, name, observed(getattr(Accelerator, name)))
    PreparedOptimizer.step = step_observed  # type: ignore[method-assign]
    register_module_forward_pre_hook(observer.forward)
    register_optimizer_step_post_hook(observer.inner_step)
    keep_files()


@final
class _WithoutCompat:
    """Finder of modules that refuses accel-compat, whose Accelerator is not observed: it would train and write."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "accel_compat":
            raise ImportError(
                "accel.compat cannot run as one rank of many: its Accelerator would train and write files"
            )


@contextlib.contextmanager
def _fake_siblings() -> Iterator[None]:
    """Context in which ``torch.distributed.new_group`` makes fake groups, whatever backend is named."""
    import torch.distributed as dist

    new_group: Any = dist.new_group

    def without_backend(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any) -> Any:
        return new_group(ranks, timeout, None, *args, **options)

    dist.new_group = without_backend
    try:
        yield
    finally:
        dist.new_group = new_group


def main(words: list[str]) -> int:
    """Runs the script in ``words`` (rank, world size, form of the report, kind, target, arguments)."""
    rank, world_size, form, kind, target, *arguments = words
    out = sys.stdout
    if form == "json":
        sys.stdout = sys.stderr  # what the script prints

    def write(report: RankReport) -> None:
        sys.stdout.flush()
        text = json.dumps(report.to_dict()) if form == "json" else str(report)
        print(text, file=out, flush=True)

    traffic = open_fake_group(int(rank), int(world_size))
    observer = _StepObserver(int(rank), int(world_size), traffic, write)
    _watch(observer)
    sys.argv = [target, *arguments]
    sys.meta_path.insert(0, _WithoutCompat())
    try:
        with _fake_siblings():
            {"script": run_script, "module": run_module}[kind](target)
    except _Ended:
        return 0
    except SystemExit as error:
        if not observer.reported and error.code not in (None, 0):
            raise
    finally:
        observer.close()
    if observer.reported:
        return 0
    print(f"{target} ended before an optimizer step was taken, so there is nothing to report", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
