"""Every rank writes its profile; memory that runs out is accounted for by name; errors are shown where one looks."""

import json
import math
import os
import re
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, ProfileKwargs
from accel.state import distributed_type
from accel_observe.profiling.profiler import MERGED, SUMMARY, top_operators
from accel_state.device.device import Device


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


@pytest.mark.sampled(1)
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


def test_free_memory_ends_the_meter_and_with_it_what_the_meter_observes() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    meter, weight = weakref.ref(accelerator.progress([]).meter), weakref.ref(model.weight)
    assert accelerator.progress([]).meter is meter()
    [model] = accelerator.free_memory(model)
    assert weight() is None
    assert meter() is None
