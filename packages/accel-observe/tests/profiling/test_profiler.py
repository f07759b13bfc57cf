"""Profiles: options, merged traces, and the rows of the busiest operators."""

import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from accel import Accelerator
from accel_observe.profiling.profiler import OTHER_KERNELS, ProfileKwargs, merge_traces, top_operators
from accel_state.errors import ConfigError


def test_traces_are_laid_on_one_time_axis(tmp_path: Path) -> None:
    for rank, base in enumerate((1_000_000, 3_000_000)):  # nanoseconds
        event = {"ph": "X", "pid": 7, "tid": 1, "ts": 5.0, "dur": 1.0, "name": "op"}
        text = json.dumps({"baseTimeNanoseconds": base, "traceEvents": [event]})
        (tmp_path / f"{rank}.json").write_text(text)
    merged = merge_traces([(rank, tmp_path / f"{rank}.json") for rank in range(2)], tmp_path / "all.json")
    first, second = json.loads(merged.read_text())["traceEvents"]
    assert (first["ts"], second["ts"]) == (5.0, 2005.0)
    assert (first["pid"], second["pid"]) == ("rank 0: 7", "rank 1: 7")


def test_merging_takes_the_memory_of_one_trace(tmp_path: Path) -> None:
    for rank in range(4):
        events = [{"ph": "X", "pid": rank, "ts": float(n), "name": f"operator {rank} {n}"} for n in range(2000)]
        (tmp_path / f"{rank}.json").write_text(json.dumps({"traceEvents": events}))

    def peak(ranks: int) -> int:
        tracemalloc.start()
        merge_traces([(rank, tmp_path / f"{rank}.json") for rank in range(ranks)], tmp_path / "all.json")
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert peak(4) < 1.2 * peak(1)


def test_wrong_profiles_are_refused() -> None:
    with pytest.raises(ConfigError, match="Invalid profiler activity 'gpu'"):
        ProfileKwargs(activities=["gpu"])
    with pytest.raises(ConfigError, match="no 'every'"):
        ProfileKwargs(schedule_option={"every": 1})
    if not torch.accelerator.is_available():
        with pytest.raises(ConfigError, match="here there are cpu"):
            ProfileKwargs(activities=["mtia"]).build()


def test_the_time_of_a_kernel_counts_once() -> None:
    def row(key: str, device: str, cpu: float, on_device: float, *, annotation: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            key=key,
            count=1,
            device_type=SimpleNamespace(name=device),
            is_user_annotation=annotation,
            self_cpu_time_total=cpu,
            self_device_time_total=on_device,
            self_cpu_memory_usage=0,
            self_device_memory_usage=0,
            flops=0,
        )

    rows = [
        row("aten::mm", "CPU", 10.0, 100.0),
        row("aten::add", "CPU", 5.0, 20.0),
        row("cudaDeviceSynchronize", "CPU", 1.0, 20.0),
        row("Activity Buffer Request", "CPU", 9.0, 9.4),
        row("Runtime Triggered Module Loading", "CPU", 9.0, 9.4),
        row("the user's own", "CPU", 1.0, 100.0, annotation=True),
        row("gemm", "CUDA", 0.0, 100.0),
        row("elementwise", "CUDA", 0.0, 20.0),
        row("replayed", "CUDA", 0.0, 30.0),
        row("step 1", "CUDA", 0.0, 150.0, annotation=True),
    ]
    found = top_operators(cast(Any, SimpleNamespace(key_averages=lambda: rows)))
    assert {one["name"]: one["device_us"] for one in found} == {
        "aten::mm": 100.0,
        OTHER_KERNELS: 30.0,
        "aten::add": 20.0,
        "Activity Buffer Request": 0.0,
        "Runtime Triggered Module Loading": 0.0,
        "cudaDeviceSynchronize": 0.0,
        "the user's own": 0.0,
    }


def test_a_block_that_its_schedule_does_not_reach_has_no_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = {"wait": 5, "warmup": 1, "active": 1}
    options = ProfileKwargs(activities=["cpu"], schedule_option=schedule, output_trace_dir=tmp_path)
    with Accelerator(cpu=True).profile(options) as profiler:
        profiler.step()
    assert list(tmp_path.iterdir()) == []
    assert "nothing was profiled: the block ended in step 1" in caplog.text
