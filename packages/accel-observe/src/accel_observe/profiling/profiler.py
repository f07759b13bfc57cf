"""Profiles of a run by torch's profiler: a trace for each rank, a merged trace, and the slowest operators."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from torch.profiler import profile

    from accel_state.session import Session

_LOG = logging.getLogger(__name__)
OTHER_KERNELS = "(kernels outside of operators)"
MERGED, SUMMARY = "profile_merged.json", "profile_summary.txt"
_RUNTIME_CALL = re.compile(r"(cuda|cu|hip)[A-Z]\w*")
# Rows of the profiler's own work, by the names of torch's Kineto, at which torch lists kernels that ran meanwhile.
_OVERHEADS = frozenset(
    (
        "Activity Buffer Request",
        "Buffer Flush",
        "Command Buffer Full",
        "Driver Compiler",
        "Instrumentation",
        "Lazy Function Loading",
        "Resource",
        "Runtime Triggered Module Loading",
        "UVM Activity Init",
    )
)
_ACTIVITIES = ("cpu", "xpu", "mtia", "cuda", "hpu")
_SCHEDULE = ("wait", "warmup", "active", "repeat", "skip_first")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKwargs:
    """Options of ``accelerator.profile()``; each field has its meaning in ``torch.profiler.profile``.

    Attributes:
        activities: of ``cpu``, ``cuda``, ``xpu``, ``mtia``, ``hpu``; None: all that are available.
        schedule_option: ``wait``, ``warmup``, ``active``, ``repeat``, ``skip_first``: steps, counted by the profiler's
            ``step()``.
        on_trace_ready: called with the profiler whenever a recording is done.
        output_trace_dir: folder for ``profile_<rank>.json``, a Chrome trace for each rank, one of all ranks, and the
            main rank's summary.

    Raises:
        ConfigError: an unknown activity, or one whose device is not available.
    """

    activities: Sequence[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | Path | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.activities or () if name not in _ACTIVITIES]
        if unknown:
            raise ConfigError(f"Invalid profiler activity {unknown[0]!r}; there are: {', '.join(_ACTIVITIES)}")
        strange = sorted(set(self.schedule_option or ()) - set(_SCHEDULE))
        if strange:
            raise ConfigError(f"a profiler's schedule has no {strange[0]!r}; it has {', '.join(_SCHEDULE)}")

    def build(self) -> "profile":
        """Builds the profiler without starting it.

        Raises:
            ConfigError: an activity whose device is not available.
        """
        from torch import profiler

        chosen = None
        if self.activities is not None:
            there = {activity.name.lower(): activity for activity in profiler.supported_activities()}
            missing = [name for name in self.activities if name not in there]
            if missing:
                raise ConfigError(
                    f"Invalid profiler activity {missing[0]!r}: here there are {', '.join(sorted(there))}"
                )
            chosen = [there[name] for name in self.activities]
        schedule = None if self.schedule_option is None else profiler.schedule(**self.schedule_option)
        return profiler.profile(
            activities=chosen,
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@contextmanager
def profiled(options: ProfileKwargs, session: "Session") -> "Iterator[profile]":
    """Profiles the block on every rank; writes traces and the main rank's summary if the options name a folder.

    A block that ends before its schedule records anything has no trace, and a warning says so.

    Collective: every rank of the group must call this.
    """
    profiler = options.build()
    with profiler:
        yield profiler
    if options.output_trace_dir is None:
        return
    folder = Path(options.output_trace_dir)
    folder.mkdir(parents=True, exist_ok=True)
    recorded = profiler.profiler is not None
    if recorded:
        profiler.export_chrome_trace(str(folder / f"profile_{session.rank}.json"))
    else:
        ended = profiler.step_num, options.schedule_option
        _LOG.warning("nothing was profiled: the block ended in step %d of %s", *ended)
    session.wait_for_everyone()
    if session.is_main_process and recorded:
        traces = [(rank, folder / f"profile_{rank}.json") for rank in range(session.world_size)]
        merge_traces([(rank, path) for rank, path in traces if path.exists()], folder / MERGED)
        (folder / SUMMARY).write_text(summary_table(top_operators(profiler, 30)) + "\n", encoding="utf-8")


def top_operators(profiler: "profile", count: int = 10) -> list[dict[str, Any]]:
    """Operators with the longest self time: calls, microseconds on host and device, bytes, operations.

    torch lists the time of a kernel twice, at the operator that launched it and at the kernel itself. Here it counts at
    the operator; kernels that no operator launched (CUDA graphs, for example) are one row, ``OTHER_KERNELS``. Calls of
    the device's runtime, work of the profiler and annotations are no operators, so kernels that torch lists at them
    count at neither.
    """
    operators, kernels = [], []
    for row in profiler.key_averages():
        if row.device_type.name == "CPU":
            operators.append(row)
        elif not getattr(row, "is_user_annotation", False):
            kernels.append(row)
    found: list[dict[str, Any]] = [
        {
            "name": row.key,
            "calls": row.count,
            "cpu_us": row.self_cpu_time_total,
            "device_us": 0.0 if _launches_nothing(row) else row.self_device_time_total,
            "bytes": row.self_cpu_memory_usage + row.self_device_memory_usage,
            "flops": row.flops,
        }
        for row in operators
    ]
    other = sum(row.self_device_time_total for row in kernels) - sum(row["device_us"] for row in found)
    if other > 0:
        found.append({"name": OTHER_KERNELS, "calls": 0, "cpu_us": 0.0, "device_us": other, "bytes": 0, "flops": 0})
    return sorted(found, key=lambda row: -(row["cpu_us"] + row["device_us"]))[:count]


def _launches_nothing(row: Any) -> bool:
    is_annotation = getattr(row, "is_user_annotation", False)
    return is_annotation or row.key in _OVERHEADS or _RUNTIME_CALL.fullmatch(row.key) is not None


def summary_table(rows: Iterable[dict[str, Any]]) -> str:
    """Formats the result of ``top_operators``: shares of time, calls, and bytes and operations if recorded."""
    listed = list(rows)
    total = sum(row["cpu_us"] + row["device_us"] for row in listed) or 1
    lines = [f"{'operator':40} {'calls':>7} {'host ms':>10} {'device ms':>10} {'share':>6} {'MiB':>9} {'MFLOP':>10}"]
    lines += [
        f"{row['name'][:40]:40} {row['calls']:7} {row['cpu_us'] / 1e3:10.3f} {row['device_us'] / 1e3:10.3f} "
        f"{(row['cpu_us'] + row['device_us']) / total:6.1%} {row['bytes'] / 2**20:9.2f} {row['flops'] / 1e6:10.3f}"
        for row in listed
    ]
    return "\n".join(lines)


def merge_traces(traces: Iterable[tuple[int, Path]], target: Path) -> Path:
    """Merges the Chrome traces of ranks into one; every process of rank r is named ``rank r`` and its own name.

    One trace at a time is in memory, because that of a GPU may have hundreds of megabytes.
    """
    kept: dict[str, Any] | None = None
    between = ""
    with target.open("w", encoding="utf-8") as file:
        file.write('{"traceEvents": [')
        for rank, path in traces:
            trace = json.loads(path.read_text(encoding="utf-8"))
            events = trace.pop("traceEvents")
            kept = trace if kept is None else kept
            shift = (trace.get("baseTimeNanoseconds", 0) - kept.get("baseTimeNanoseconds", 0)) / 1e3
            for event in events:
                file.write(between + json.dumps(_of_rank(event, rank, shift)))
                between = ", "
            del trace, events  # otherwise they would be in memory while the next trace is read
        file.write("]")
        for name, value in (kept or {}).items():
            file.write(f", {json.dumps(name)}: {json.dumps(value)}")
        file.write("}")
    return target


def _of_rank(event: Mapping[str, Any], rank: int, shift: float) -> dict[str, Any]:
    """Returns a trace's event under its rank's name, ``shift`` microseconds later."""
    moved = dict(event)
    if "pid" in moved:
        moved["pid"] = f"rank {rank}: {moved['pid']}"
    if "ts" in moved and moved.get("ph") != "M":
        moved["ts"] = moved["ts"] + shift
    if "id" in moved:
        moved["id"] = f"{rank}-{moved['id']}"
    return moved
