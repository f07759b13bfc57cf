"""What the meters say is so: shares add up, the rank and phase that hold others up are named, bad losses are placed."""

import io
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel import Accelerator
from accel_observe.meters import PHASES, LossWatch, PhaseClock, Progress, count_flops, find_stragglers, peak_flops
from accel_observe.meters.health import Trouble, worst_of_others
from accel_observe.meters.observed_run import RunProgress
from accel_observe.meters.progress import clock_text

QUICKLY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Slow(Dataset):
    """Samples of which each takes a while on one rank, and one of which is not a number."""

    def __init__(self, count: int = 24, seconds: float = 0.0, bad: int | None = None) -> None:
        self.count, self.seconds, self.bad = count, seconds, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.full((4,), math.nan if index == self.bad else 0.1)


@QUICKLY
@given(st.lists(st.tuples(st.sampled_from(PHASES), st.floats(0, 1e3)), max_size=30))
def test_phases_add_up_to_the_time_that_has_passed(moves: list[tuple[str, float]]) -> None:
    now = 5.0

    def clock() -> float:
        return now

    phases = PhaseClock(clock)
    expected = dict.fromkeys(PHASES, 0.0)
    current = "compute"
    for phase, seconds in moves:
        expected[current] += seconds
        now += seconds
        assert phases.enter(phase) == current
        current = phase
    assert phases.read() == pytest.approx(expected)
    assert sum(phases.read().values()) == pytest.approx(now - 5.0)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ([{"data": 0.1, "compute": 1.0}, {"data": 2.1, "compute": 1.0}], [(1, "data")]),
        (
            [{"data": 0.1, "compute": 3.0}, {"data": 0.1, "compute": 1.0}, {"data": 0.1, "compute": 1.1}],
            [(0, "compute")],
        ),
        ([{"data": 0.1, "communication": 9.0}, {"data": 0.1, "communication": 0.0}], []),
        ([{"data": 0.10}, {"data": 0.101}], []),
        ([{"data": 5.0}], []),
    ],
)
def test_a_straggler_is_named_with_its_phase(table: list[dict[str, float]], expected: list[tuple[int, str]]) -> None:
    assert [(one.rank, one.phase) for one in find_stragglers(table, steps=10)] == expected


@pytest.mark.ranks(2)
def test_a_slow_data_path_is_attributed_to_its_rank_and_the_shares_fill_the_time(rank: int, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.init_trackers("p")
    loader = DataLoader(Slow(12, 0.2 if rank == 1 else 0.0), batch_size=1)
    model, loader = accelerator.prepare(nn.Linear(4, 1), loader)
    meter = accelerator.meter(every=6)
    first = time.perf_counter()
    meter.clock.read()
    started = time.perf_counter()
    before = dict(meter.clock.seconds)
    for batch in meter.watch(loader):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        meter.step(loss)
    ended = time.perf_counter()
    seconds = meter.clock.read()
    wall = sum(seconds.values()) - sum(before.values())
    assert ended - started - 1e-3 <= wall <= time.perf_counter() - first + 1e-3
    straggler = meter.stragglers[0]  # the worst; beside others at work on this machine there may be more
    assert (straggler.rank, straggler.phase) == (1, "data")
    assert 0.18 < straggler.seconds - straggler.usual < 2.0  # a machine that is busy with others makes it more
    assert "rank 1 takes" in str(straggler)
    assert meter.last is not None
    assert sum(meter.last.shares.values()) == pytest.approx(1.0)
    # The other rank waits for it where gradients are exchanged.
    assert meter.last.shares["data" if rank else "communication"] > 0.4
    accelerator.end_training()
    if rank == 0:
        (log,) = tmp_path.glob("p/*/run.jsonl")
        events = [json.loads(line) for line in log.read_text().splitlines()]
        first = next(event for event in events if event["kind"] == "straggler")
        assert (first["rank"], first["phase"]) == (1, "data")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("together", [False, True], ids=["other samples", "the same samples"])
def test_tokens_are_those_of_all_ranks_once(rank: int, together: bool) -> None:
    from accel import ParallelismConfig

    options = {"strategy": "fsdp", "parallelism_config": ParallelismConfig(tp_size=2)} if together else {}
    accelerator = Accelerator(cpu=True, **options)
    loader = accelerator.prepare(DataLoader(Slow(8), batch_size=2))
    meter = accelerator.meter(every=100, tokens=lambda batch: 10 + 5 * rank * (not together), watch_loss=False)
    for _ in meter.watch(loader):
        meter.step()
    reading = meter.read()
    assert reading.tokens_per_second is not None
    assert meter.steps == (4 if together else 2)
    per_step = reading.tokens_per_second * reading.seconds_per_step
    assert per_step == pytest.approx(10 if together else 25)


def test_a_save_is_not_computing(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(4, 1))
    meter = accelerator.meter()
    accelerator.save_state(tmp_path / "c")
    assert meter.clock.read()["save"] > 0


LATE = pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
"""On an accelerator a meter looks at a loss after the next step."""


@LATE
def test_a_loss_that_is_no_number_is_placed(late: bool, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(nn.Linear(4, 1), DataLoader(Slow(24, bad=13), batch_size=4))
    meter = accelerator.meter()
    meter._late = late
    for batch in meter.watch(loader):
        model.zero_grad()
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        meter.step(loss)
    (trouble,) = meter.troubles
    assert (trouble.kind, trouble.step, trouble.epoch, trouble.samples) == ("nonfinite", 4, 0, (12, 16))
    assert "weight" in trouble.parameters
    assert "samples 12 to 15 of epoch 0" in caplog.text


class Spiking(Dataset):
    """One sample is a thousand times larger than the others in its first number, which only one weight sees."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.full((4,), 0.1)
        row[0] = 100.0 if index == 90 else 0.1
        return row


class TwoWays(nn.Module):
    """The first number goes through one layer, the others through another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.others = nn.Linear(1, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x[:, :1]).square() + self.others(x[:, 1:]).square()


@pytest.mark.parametrize("when", ["before-zero-grad", "after-zero-grad"])
@pytest.mark.parametrize("accumulate", [1, 2])
@LATE
def test_a_spike_names_parameters_step_and_samples(
    late: bool, when: str, accumulate: int, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, project_dir=tmp_path)
    accelerator.init_trackers("p")
    net = TwoWays()
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.0), DataLoader(Spiking(), batch_size=2 // accumulate)
    )
    meter = accelerator.meter(every=10)
    meter._late = late
    total = torch.zeros(())
    for batch in meter.watch(loader):
        with accelerator.accumulate(model):
            loss = model(batch).sum()
            accelerator.backward(loss)
            optimizer.step()
            if when == "after-zero-grad":
                optimizer.zero_grad()
        total = total + loss.detach()
        if accelerator.sync_gradients:
            meter.step(total)
            total = torch.zeros(())
            if when == "before-zero-grad":
                optimizer.zero_grad()
    accelerator.end_training()
    trouble = meter.troubles[0]
    assert (trouble.kind, trouble.step, trouble.samples) == ("spike", 46, (90, 92))
    named = trouble.parameters.split(", ")
    assert named[0].startswith("first.weight (x ")
    assert named[1].startswith("first.bias (x ")
    assert f"samples 90 to 91 of epoch 0; gradients that grew most: {trouble.parameters}" in caplog.text
    (log,) = tmp_path.glob("p/*/run.jsonl")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert next(event for event in events if event["kind"] == "trouble")["step"] == 46


@pytest.mark.ranks(2)
def test_the_main_rank_hears_of_a_bad_loss_on_another(rank: int, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.init_trackers("p")
    model, loader = accelerator.prepare(nn.Linear(4, 1), DataLoader(Slow(24, bad=14), batch_size=2))
    meter = accelerator.meter(every=3)
    for batch in meter.watch(loader):
        meter.step(model(batch).square().mean())  # samples 12 to 15 are step 4: 12 and 13 here, 14 and 15 on rank 1
    assert [(one.rank, one.step, one.samples) for one in meter.troubles] == [(1, 4, (12, 16))]
    accelerator.end_training()
    if rank == 0:
        (log,) = tmp_path.glob("p/*/run.jsonl")
        assert "on rank 1" in log.read_text()


def test_the_last_batch_of_an_epoch_is_placed_too() -> None:
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(nn.Linear(4, 1), DataLoader(Slow(8, bad=7), batch_size=4))
    meter = accelerator.meter(every=2)
    for _ in range(2):
        for batch in meter.watch(loader):
            meter.step(model(batch).square().mean())
    assert [(one.epoch, one.samples) for one in meter.troubles] == [(0, (4, 8)), (1, (4, 8))]
    assert meter.last is not None
    assert meter.steps == 4


def test_a_spike_stands_out_and_does_not_become_usual() -> None:
    watch = LossWatch(window=16)
    losses = [2.0 + 0.01 * math.sin(step) for step in range(20)]
    assert all(watch.check(loss) is None for loss in losses)
    for _ in range(3):
        found = watch.check(9.0)
        assert found is not None
        assert found[0] == "spike"
        assert found[1] == pytest.approx(2.0, abs=0.02)
    assert watch.check(1.0) is None


def test_a_new_level_is_reported_until_it_is_usual() -> None:
    watch = LossWatch(window=16)
    assert not any(watch.check(2.0 + 0.01 * math.sin(step)) for step in range(20))
    assert [bool(watch.check(9.0 + 0.1 * math.sin(step))) for step in range(20)] == [True] * 4 + [False] * 16


def test_of_ranks_that_saw_the_same_one_is_heard() -> None:
    def trouble(rank: int, step: int, loss: float) -> Trouble:
        return Trouble("spike", step, loss, 1.0, rank=rank)

    seen = [trouble(0, 3, 9.0), trouble(1, 3, 10.0), trouble(2, 3, 8.0), trouble(1, 5, 7.0), trouble(2, 5, 8.0)]
    assert worst_of_others(seen) == [seen[4]]


@given(st.lists(st.floats(0.5, 1.5), min_size=1, max_size=100))
@QUICKLY
def test_losses_of_one_size_are_no_spikes(losses: list[float]) -> None:
    watch = LossWatch(times=2000.0)
    assert all(watch.check(loss) is None for loss in losses)


def test_speed_counts_samples_tokens_and_operations() -> None:
    accelerator = Accelerator(cpu=True)
    net = nn.Linear(4, 8, bias=False)
    flops = count_flops(lambda: net(torch.ones(1, 4)).sum())
    assert flops == 2 * 4 * 8 * 2  # forward, and the gradient of the weight; that of the input is not needed
    net.zero_grad()
    model, loader = accelerator.prepare(net, DataLoader(Slow(24), batch_size=4))
    meter = accelerator.meter(every=6, tokens=lambda batch: batch.numel(), flops_per_sample=flops, peak_flops=1e9)
    for batch in meter.watch(loader):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        reading = meter.step(loss)
    assert reading is not None
    seconds = reading.seconds_per_step * 6
    assert reading.samples_per_second == pytest.approx(24 / seconds)
    assert reading.tokens_per_second == pytest.approx(96 / seconds)
    assert reading.mfu == pytest.approx(24 * flops / seconds / 1e9)
    assert reading.loss is not None
    assert reading.memory > 0
    assert reading.goodput == pytest.approx(1.0)
    assert set(reading.flat()) >= {"meter/samples_per_second", "meter/share_data", "meter/mfu"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_mean_of_losses_neither_rounds_nor_overflows(dtype: torch.dtype) -> None:
    meter = Accelerator(cpu=True).meter(every=500, watch_loss=False)
    loss = torch.tensor(2000.0, dtype=dtype)
    readings = [meter.step(loss) for _ in range(500)]
    assert readings[-1] is not None
    assert readings[-1].loss == 2000.0


def test_goodput_counts_what_a_crash_has_cost() -> None:
    now = time.time()
    first = RunProgress(began=now - 100, resumed=now - 100, steps=50)
    saved = first.save()
    later = RunProgress.start()
    later.load({**saved, "began": now - 200})
    assert later.steps == 50
    assert later.goodput(time.time()) == pytest.approx(0.5, abs=0.02)


def test_steps_and_goodput_come_with_the_checkpoint(tmp_path: Path) -> None:
    first = Accelerator(cpu=True)
    first.prepare(nn.Linear(2, 1))
    meter = first.meter()
    for _ in range(7):
        meter.step()
    first.save_state(tmp_path / "c")
    second = Accelerator(cpu=True)
    second.prepare(nn.Linear(2, 1))
    second.load_state(tmp_path / "c")
    assert second.meter().steps == 7


def test_without_a_terminal_progress_is_plain_lines() -> None:
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(nn.Linear(4, 1), DataLoader(Slow(12), batch_size=4))
    written = io.StringIO()
    bar = Progress(loader, accelerator.meter(every=3), shown=True, stream=written, description="train", seconds=0)
    assert len(bar) == 3
    for batch in bar:
        bar.step(model(batch).square().mean(), lr=0.1)
    lines = written.getvalue().splitlines()
    assert "\r" not in written.getvalue()
    assert lines[-1].startswith("train: 3/3 in 0:0")
    for part in ("lr 0.1", "loss ", "samples/s", "MiB", " left"):
        assert part in lines[-1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_one_bar_with_everything_on_it() -> None:
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(nn.Linear(4, 1), DataLoader(Slow(12), batch_size=4))
    shown = Terminal()
    meter = accelerator.meter(every=1, tokens=lambda batch: batch.numel())
    for batch in (bar := Progress(loader, meter, shown=True, stream=shown, description="train")):
        bar.step(model(batch).square().mean(), lr=0.1)
    frames = shown.getvalue().split("\r")
    assert "\n" not in shown.getvalue().rstrip("\n")
    for part in ("train: 100%", "3/3", "lr 0.1", "loss ", "samples/s", "tokens/s", "MiB"):
        assert part in frames[-1], part
    assert any("<00:" in frame for frame in frames)  # what is left


def test_a_loop_that_breaks_off_closes_its_bar() -> None:
    from tqdm import tqdm

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Slow(12), batch_size=4))
    shown = Terminal()
    bar = Progress(loader, accelerator.meter(), shown=True, stream=shown)
    open_before = len(getattr(tqdm, "_instances", ()))
    for _ in range(2):
        for _batch in bar:
            break
    assert len(getattr(tqdm, "_instances", ())) == open_before
    assert "\x1b[A" not in shown.getvalue()  # no second bar below a first


@pytest.mark.ranks(2)
def test_only_the_main_rank_shows_progress(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(nn.Linear(4, 1), DataLoader(Slow(8), batch_size=2))
    for batch in (bar := accelerator.progress(loader, seconds=0)):
        accelerator.backward(model(batch).square().mean())
        bar.step()
    assert ("/2 in" in written.getvalue()) == (rank == 0)


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65, "1:05"), (3723, "1:02:03")])
def test_times_are_readable(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA L40S", 362e12), ("Abacus 7", None)])
def test_the_peak_of_any_type_is_that_of_its_product(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel_state.device.functions import DeviceFunctions
    from accel_state.device.kinds import DEVICE_KINDS, DeviceKind

    class Functions(DeviceFunctions):
        def module(self, kind: DeviceKind) -> Any:
            return SimpleNamespace(get_device_name=lambda index=0: name)

    monkeypatch.setitem(DEVICE_KINDS, "abacus", DeviceKind("abacus", "gloo", functions=Functions()))  # type: ignore[index]
    assert (peak_flops("abacus:1"), peak_flops("cpu")) == (peak, None)


def test_norms_of_halves_are_sums_in_fp32_without_copies() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    from accel_observe.meters.gradients import norms_in_fp32

    copies: list[str] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            copies.extend([str(function)] if "_to_copy" in str(function) else [])
            return function(*args, **(kwargs or {}))

    tensors = [torch.full((1 << 12,), 0.3, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    with Copies():
        found = norms_in_fp32(tensors)
    assert copies == []
    assert {one.dtype for one in found} == {torch.float32}
    torch.testing.assert_close(torch.stack(list(found)), torch.stack([one.float().norm() for one in tensors]))
    (double,) = norms_in_fp32([torch.full((4,), 1e30, dtype=torch.float64)])
    assert double.item() == pytest.approx(2e30)


def test_a_late_loss_is_told_after_the_next_step_or_with_the_loops_end() -> None:
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(nn.Linear(4, 1), DataLoader(Slow(12, bad=5), batch_size=2))
    meter = accelerator.meter()
    meter._late = True
    told = []
    for batch in meter.watch(loader):
        meter.step(model(batch).square().mean())
        told.append(len(meter.troubles))
    assert told == [0, 0, 0, 1, 1, 1]
    assert [(one.step, one.samples) for one in meter.troubles] == [(3, (4, 6))]
    meter.step(torch.tensor(math.inf))
    assert len(meter.troubles) == 1
    meter.close()
    assert [one.step for one in meter.troubles] == [3, 7]


def test_the_peak_of_memory_is_read_and_not_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_observe.meters.meter import device_memory

    def reset(device: torch.device) -> None:
        raise AssertionError("a peak that the user measures would be lost")

    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 7)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", reset)
    assert device_memory(torch.device("meta")) == 7


def test_memory_that_torch_does_not_observe_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_observe.meters.meter import device_memory

    def refuse(device: torch.device) -> int:
        raise RuntimeError("Allocator for mps is not a DeviceAllocator.")

    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", refuse)
    assert device_memory(torch.device("mps")) == 0
