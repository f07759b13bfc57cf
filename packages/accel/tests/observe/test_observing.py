"""Every rank writes its profile; memory that runs out is accounted for by name; errors are shown where one looks."""

import json
import math
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from accel import Accelerator, ProfileKwargs
from accel.state import distributed_type
from accel_observe.meters import count_flops
from accel_observe.profiling.memory_snapshot import write_snapshot
from accel_observe.profiling.profiler import MERGED, OTHER_KERNELS, SUMMARY, merge_traces, top_operators
from accel_state.device.device import Device
from accel_state.device.functions import DeviceFunctions
from accel_state.device.kinds import DEVICE_KINDS, DeviceKind
from accel_state.errors import ConfigError


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))


@pytest.mark.ranks(2)
def test_every_rank_writes_a_trace_and_one_holds_all(rank: int, tmp_path: Path) -> None:
    handler = ProfileKwargs(
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1},
        output_trace_dir=tmp_path,
        record_shapes=True,
        with_flops=True,
        profile_memory=True,
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model = accelerator.prepare(net())
    with accelerator.profile() as profiler:
        for _ in range(4):
            accelerator.backward(model(torch.ones(4, 8)).sum())
            profiler.step()
    accelerator.wait_for_everyone()
    own = json.loads((tmp_path / f"profile_{rank}.json").read_text())
    assert any(event.get("name") == "aten::addmm" for event in own["traceEvents"])
    rows = top_operators(profiler, 5)
    assert len(rows) == 5
    assert rows == sorted(rows, key=lambda row: -(row["cpu_us"] + row["device_us"]))
    products = next(row for row in top_operators(profiler, 100) if row["name"] == "aten::addmm")
    # Two of the four steps were recorded, each with two products of 4 rows.
    assert (products["calls"], products["flops"]) == (4, 2 * 2 * 4 * (8 * 16 + 16 * 2))
    assert any(row["bytes"] > 0 for row in top_operators(profiler, 100))
    if rank == 0:
        lines = (tmp_path / SUMMARY).read_text().splitlines()
        assert lines[1].split()[0] == rows[0]["name"][:40]
        events = json.loads((tmp_path / MERGED).read_text())["traceEvents"]
        ranks = {str(event["pid"]).split(":")[0] for event in events if event.get("name") == "aten::addmm"}
        assert ranks == {"rank 0", "rank 1"}


def test_traces_are_laid_on_one_time_axis(tmp_path: Path) -> None:
    for rank, base in enumerate((1_000_000, 3_000_000)):  # nanoseconds
        event = {"ph": "X", "pid": 7, "tid": 1, "ts": 5.0, "dur": 1.0, "name": "op"}
        text = json.dumps({"baseTimeNanoseconds": base, "traceEvents": [event]})
        (tmp_path / f"{rank}.json").write_text(text)
    merged = merge_traces([(rank, tmp_path / f"{rank}.json") for rank in range(2)], tmp_path / "all.json")
    first, second = json.loads(merged.read_text())["traceEvents"]
    assert (first["ts"], second["ts"]) == (5.0, 2005.0)
    assert (first["pid"], second["pid"]) == ("rank 0: 7", "rank 1: 7")


def test_wrong_profiles_are_refused() -> None:
    with pytest.raises(ConfigError, match="Invalid profiler activity 'gpu'"):
        ProfileKwargs(activities=["gpu"])
    with pytest.raises(ConfigError, match="no 'every'"):
        ProfileKwargs(schedule_option={"every": 1})
    if not torch.accelerator.is_available():
        with pytest.raises(ConfigError, match="here there are cpu"):
            ProfileKwargs(activities=["mtia"]).build()


def test_operations_are_counted_as_the_matrices_say() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    x = torch.randn(5, 8)
    assert count_flops(lambda: model(x).sum(), backward=False) == 2 * 5 * (8 * 16 + 16 * 4)
    # Backward: both weights' gradients, and that of the layer between.
    assert count_flops(lambda: model(x).sum()) == 2 * 5 * (2 * 8 * 16 + 3 * 16 * 4)


def test_memory_that_runs_out_is_accounted_for_by_name(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    net = nn.Linear(600, 500)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.backward(model(torch.ones(1, 600)).sum())
    optimizer.step()
    other = torch.zeros(900_000)
    with pytest.raises(RuntimeError, match="allocate memory") as caught:  # noqa: SIM117
        with accelerator.memory_snapshot(tmp_path / "memory_{rank}.txt"):
            torch.empty(2**60)
    text = (tmp_path / "memory_0.txt").read_text()
    for name in ("model.weight", "gradient of model.weight", "exp_avg of model.weight", "exp_avg_sq of model.weight"):
        assert f"float32 [500, 600] on cpu: {name}\n" in text
    assert "float32 [900000] on cpu: unnamed" in caught.value.__notes__[0]
    sizes = [float(line.split()[0]) for line in text.splitlines() if " MiB  " in line]
    assert len(sizes) >= 5
    assert sizes == sorted(sizes, reverse=True)
    assert math.isclose(other.sum().item(), 0.0)


def test_the_allocator_of_any_device_is_summarised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Functions(DeviceFunctions):
        def module(self, kind: DeviceKind) -> Any:
            return SimpleNamespace(memory_summary=lambda index: f"beads of {index}")

    monkeypatch.setitem(cast(Any, DEVICE_KINDS), "abacus", DeviceKind("abacus", "gloo", functions=Functions()))
    write_snapshot(tmp_path / "a.txt", MemoryError("no"), [], Device("abacus", 3))
    assert (tmp_path / "a.txt").read_text() == "MemoryError: no\n\n\nbeads of 3\n"


@pytest.mark.parametrize(
    ("device", "world", "named"),
    [("cuda", 2, "MULTI_GPU"), ("xpu", 2, "MULTI_XPU"), ("mps", 2, "NO"), ("cuda", 1, "NO")],
)
def test_the_kind_of_distribution_is_in_the_row_of_the_device(device: str, world: int, named: str) -> None:
    session: Any = SimpleNamespace(world_size=world, device=Device(device))
    assert distributed_type(session) == named


def test_other_errors_pass_untouched() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="mine") as caught, accelerator.memory_snapshot():
        raise ValueError("mine")
    assert not getattr(caught.value, "__notes__", [])


FAILING = """
from accel.observe.tracebacks import install_tracebacks

install_tracebacks(show_locals=True)


def halved(number: int) -> float:
    return 1 / (number - 7)


halved(7)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_terminal_gets_errors_in_colour_from_one_process(rank: int, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    said = on_a_terminal([sys.executable, str(script)], {**where, "TERM": "xterm-256color", "COLUMNS": "100"})
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
    assert "ZeroDivisionError: division by zero" in plain
    assert ("\x1b[" in said and "╭" in plain) == (rank == 0)
    assert ("number = 7" in plain) == (rank == 0)


def on_a_terminal(words: list[str], env: dict[str, str]) -> str:
    """What a program writes to its errors where these are a terminal."""
    terminal, end = os.openpty()
    with os.fdopen(terminal, "rb", buffering=0) as reader:
        program = subprocess.Popen(words, stderr=end, stdout=end, env={**os.environ, **env})
        os.close(end)
        said = b""
        with suppress(OSError):  # how a terminal that nobody holds any more ends
            while part := reader.read(4096):
                said += part
        assert program.wait(60) == 1
    return said.decode()


def test_a_file_gets_plain_tracebacks() -> None:
    from accel.observe.tracebacks import install_tracebacks

    before = sys.excepthook
    assert not install_tracebacks()
    assert sys.excepthook is before


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
    }


def test_a_loss_that_is_overwritten_after_its_step_counts_as_it_was() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    meter = accelerator.meter(every=2, watch_loss=False)
    loss = torch.ones(())
    meter.step(loss)
    loss.fill_(7.0)  # as the next run of a CUDA graph does
    reading = meter.step(torch.ones(()))
    assert reading is not None
    assert reading.loss == 1.0
    meter.close()
    accelerator.end_training()
