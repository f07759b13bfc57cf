"""What is explained is what happens: every number equals one that was counted while it happened."""

import json
import sys
from collections.abc import Iterator
from itertools import accumulate as accumulate_sums
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from accel import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs
from accel_testing.programs.runs import run_command


class Rows(Dataset):
    """Counts what is read of it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.reads = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return torch.full((8,), index / self.count)


class Stream(IterableDataset):
    """The same, read from its beginning."""

    def __init__(self, count: int, divides: bool = False) -> None:
        self.rows, self.divides = Rows(count), divides
        self.reads = self.rows.reads

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info() if self.divides else None
        mine = range(len(self.rows)) if info is None else range(info.id, len(self.rows), info.num_workers)
        yield from (self.rows[index] for index in mine)


class DividedStream(Stream):
    """Gives each rank a part of its own when it is asked."""

    def shard(self, num_shards: int, index: int) -> "DividedStream":
        part = DividedStream(len(self.rows) // num_shards)
        part.reads = part.rows.reads = self.reads
        return part


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))


def epoch(accelerator: Accelerator, model: nn.Module, loader: Any) -> tuple[list[int], list[int]]:
    """Trains; this rank's rows in each micro-batch, and how many of these made each optimizer step."""
    batches, steps = [], [0]
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().sum())
        batches.append(len(x))
        steps[-1] += 1
        if accelerator.sync_gradients:
            steps.append(0)
    return batches, steps[:-1]


DATA = {
    "plain": (56, {}, {}, 1),
    "accumulated": (56, {}, {}, 3),
    "padded": (50, {}, {}, 1),
    "dropped": (50, {}, {"drop_last": True}, 2),
    "split": (56, {"split_batches": True}, {}, 1),
    "elastic": (56, {"global_batch_size": 16}, {}, 1),
    "elastic-dropped": (56, {"global_batch_size": 16}, {"drop_last": True}, 1),
    "dispatched": (56, {"dispatch_batches": True}, {}, 2),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", DATA)
def test_batches_and_steps_are_what_is_trained_on(case: str) -> None:
    count, options, loading, accumulate = DATA[case]
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulate, dataloader_config=DataLoaderConfiguration(**options)
    )
    data = Rows(count)
    model, loader = accelerator.prepare(nn.Linear(8, 2), DataLoader(data, batch_size=4, **loading))
    (told,) = accelerator.explain().loaders
    batches, steps = epoch(accelerator, model, loader)
    *rows, reads = accelerator.gather(torch.tensor([[*batches, data.reads]])).sum(dim=0).tolist()
    ends = list(accumulate_sums(steps))
    rows_of_steps = [sum(rows[end - size : end]) for end, size in zip(ends, steps, strict=True)]
    assert (told.batches_per_epoch, told.steps_per_epoch) == (len(batches), len(steps))
    assert (told.accumulated, told.effective_batch) == (max(steps), max(rows_of_steps))
    assert told.batch_per_step == max(rows)
    assert told.samples_per_epoch == count
    assert reads == told.read_amplification * sum(rows)


STREAMS: dict[str, tuple[type[Stream], dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "strided": (Stream, {}, {"dispatch_batches": False}, {}, 2),
    "strided-workers": (Stream, {}, {"dispatch_batches": False}, {"num_workers": 2}, 4),
    "divided-by-workers": (Stream, {"divides": True}, {"dispatch_batches": False}, {"num_workers": 2}, 2),
    "sharded": (DividedStream, {}, {"dispatch_batches": False}, {}, 1),
    "dispatched": (Stream, {}, {"dispatch_batches": True}, {}, 1),
}


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:every reader of")
@pytest.mark.parametrize("case", STREAMS)
def test_how_often_a_stream_is_read_is_told(case: str) -> None:
    kind, traits, options, loading, expected = STREAMS[case]
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    data = kind(48, **traits)
    loader = accelerator.prepare(DataLoader(data, batch_size=4, **loading))
    before = accelerator.explain().loaders[0].read_amplification
    assert before == (None if loading else expected)
    rows = sum(len(batch) for batch in loader)
    counts = accelerator.gather(torch.tensor([[rows, int(data.reads)]])).sum(dim=0).tolist()
    told = accelerator.explain()
    assert counts[1] == counts[0] * told.loaders[0].read_amplification
    assert told.loaders[0].read_amplification == expected
    assert f"read {expected} times" in str(told) or (expected == 1 and "is read once" in str(told))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_is_sent_is_what_was_counted(accumulate: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model, loader = accelerator.prepare(net(), DataLoader(Rows(56), batch_size=4))
    told = accelerator.explain()
    (facts,) = told.models
    assert told.communication == {}
    epoch(accelerator, model, loader)  # DDP arranges its buckets anew after the first backward
    with accelerator.count_communication() as counted:
        _, steps = epoch(accelerator, model, loader)
    assert facts.parameters == sum(p.numel() for p in model.parameters()) == facts.dtypes["float32"] == facts.trainable
    assert facts.parameter_bytes == sum(p.nbytes for p in model.parameters())
    assert facts.buffer_bytes == sum(b.nbytes for b in model.buffers())
    assert counted["all_reduce"]["bytes"] == len(steps) * facts.parameter_bytes
    assert counted["broadcast"]["bytes"] == len(steps) * facts.buffer_bytes
    assert accelerator.explain().communication == counted
    assert f"all_reduce: {counted['all_reduce']['calls']} calls" in str(accelerator.explain())
    json.dumps(accelerator.explain().to_dict())


DTYPES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool complex64 complex128"
)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", DTYPES.split())
def test_bytes_are_those_of_the_dtype(rank: int, name: str) -> None:
    import torch.distributed as dist

    accelerator = Accelerator(cpu=True)
    sent = torch.zeros(6).to(getattr(torch, name))
    with accelerator.count_communication() as counted:
        dist.send(sent, 1) if rank == 0 else dist.recv(sent, 0)
    assert counted["send" if rank == 0 else "recv"] == {"calls": 1, "bytes": sent.nbytes}


@pytest.mark.ranks(2)
def test_shards_are_gathered_once_a_step_and_counted() -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    own = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))
    for _ in range(2):
        with accelerator.count_communication() as counted:
            accelerator.backward(model(torch.ones(4, 8)).sum())
            optimizer.step()
            optimizer.zero_grad()
    (facts,) = accelerator.explain().models
    assert facts.parameters == sum(p.to_local().numel() for p in model.parameters())
    assert counted["all_gather"] == {"calls": 1, "bytes": facts.parameter_bytes}


@pytest.mark.ranks(2, group=False)
def test_the_timeout_is_the_one_in_force(tmp_path: Path) -> None:
    import time
    from datetime import timedelta

    import torch.distributed as dist

    options = InitProcessGroupKwargs(timeout=timedelta(seconds=3))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    told = accelerator.explain().timeout_seconds
    assert told == 3
    began = time.monotonic()
    if accelerator.is_main_process:
        with pytest.raises(RuntimeError):
            dist.recv(torch.zeros(1), src=1)
        assert told <= time.monotonic() - began < 30 + told
        (tmp_path / "over").touch()
    while not (tmp_path / "over").exists():
        time.sleep(0.01)
    accelerator.session.close()


def test_the_rest_is_what_the_objects_say() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    own = net()
    model, _ = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.25))
    told = accelerator.explain()
    assert told.learning_rates == (0.25,)
    assert told.processes == told.data_shards == accelerator.num_processes == 1
    assert told.backend == accelerator.choice.name == "single"
    assert told.timeout_seconds is None
    assert model(torch.ones(2, 8)).dtype == torch.float32
    assert "compute  bf16" in told.precision
    assert "Sequential" in str(told)


def test_settings_are_told_with_their_origins() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    assert ("gradient_accumulation_steps", "3", "call") in accelerator.explain().settings
    assert "gradient_accumulation_steps = 3  (call)" in str(accelerator.explain())


RUN_WITH_A_PROJECT = """
import os, torch
from accel import Accelerator, ProjectConfiguration
from accel.utils import ProfileKwargs
project = ProjectConfiguration(project_dir="project", automatic_checkpoint_naming=True)
accelerator = Accelerator(log_with="tensorboard", project_config=project)
own = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), 0.1))
accelerator.init_trackers("net", {"lr": 0.1})
board = accelerator.get_tracker("tensorboard", unwrap=True)
accelerator.resume()
if os.path.exists("project/checkpoints"):
    accelerator.load_state()
with accelerator.profile(ProfileKwargs(output_trace_dir="project/trace")) as profiler:
    for step in range(8):
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        accelerator.log({"loss": float(step)}, step=step)
        if accelerator.is_main_process:
            board.add_scalar("own", float(step), step)
        accelerator.save_state()
        accelerator.save_model(model, "project/model")
        profiler.step()
accelerator.end_training()
"""


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_explaining_leaves_the_project_of_a_run_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    script = tmp_path / "train.py"
    script.write_text(RUN_WITH_A_PROJECT)
    run_command([sys.executable, script], cwd=tmp_path, timeout=120).check()
    before = contents(tmp_path)
    assert len(before) > 20
    words = [sys.executable, "-m", "accel", "explain", "--num_processes", "2", "--cpu", "train.py"]
    said = run_command(words, cwd=tmp_path, timeout=120).check().output
    assert "backend ddp: 2 processes" in said
    assert "module" not in said, "it is the launcher's own setting"
    assert contents(tmp_path) == before


def test_a_script_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "accel", "explain", "nothere.py"]
    said = run_command(words, cwd=tmp_path, timeout=120)
    assert said.output.splitlines()[0].startswith("accel: error: there is no script 'nothere.py'")
    assert "Traceback" not in said.output


def test_a_script_is_explained_and_ended(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom accel import Accelerator\naccelerator = Accelerator()\n"
        "model = accelerator.prepare(torch.nn.Linear(4, 2))\nwhile True:\n"
        "    accelerator.backward(model(torch.ones(1, 4)).sum())\n"
    )
    words = [sys.executable, "-m", "accel", "explain", "--num_processes", "2", "--cpu", script]
    said = run_command(words, cwd=tmp_path, timeout=120).check().output
    assert "backend ddp: 2 processes" in said
    assert "all_reduce: 1 calls, 40 bytes" in said  # 10 parameters of 4 bytes
