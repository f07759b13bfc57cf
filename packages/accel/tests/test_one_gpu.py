"""Paths that differ on an accelerator. Each test runs on the CPU, too, where it tests the same promise without them."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator, FullyShardedDataParallelPlugin, GradScalerKwargs, ProfileKwargs, TorchDynamoPlugin
from accel_observe.profiling.profiler import top_operators
from accel_state.errors import ConfigError

pytestmark = pytest.mark.ranks(1, group=False, timeout=120)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


OPENED: list[Accelerator] = []


def ends_training(test: Callable[..., None]) -> Callable[..., None]:
    """Ends what the test has opened; after a failure the rank does so itself."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        test(*args, **kwargs)
        while OPENED:
            OPENED.pop().end_training()

    return run


def opened(device: str, **options: Any) -> Accelerator:
    OPENED.append(Accelerator(cpu=device == "cpu", **options))
    return OPENED[-1]


def net(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Linear(width, 1))


def batches(accelerator: Accelerator, count: int = 8, width: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, width, generator=generator).to(accelerator.device) for _ in range(count)]


def train(accelerator: Accelerator, model: Any, optimizer: Any, data: list[torch.Tensor]) -> torch.Tensor:
    loss = torch.zeros(())
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return loss.detach()


def prepared(accelerator: Accelerator, *, width: int = 16, lr: float = 0.05) -> tuple[nn.Module, Any, Any]:
    own = net(width)
    model, optimizer = accelerator.prepare(own, torch.optim.AdamW(own.parameters(), lr=lr))
    return own, model, optimizer


def full(model: nn.Module) -> list[torch.Tensor]:
    values = (parameter.detach() for parameter in model.parameters())
    return [getattr(value, "full_tensor", lambda value=value: value)().cpu().clone() for value in values]


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@ends_training
def test_weights_are_those_of_a_loop_by_hand(device: str, precision: str, strategy: str) -> None:
    options = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if strategy == "fsdp" else {}
    accelerator = opened(device, mixed_precision=precision, **options)
    own, model, optimizer = prepared(accelerator)
    data = batches(accelerator)
    train(accelerator, model, optimizer, data)
    expected = net().to(accelerator.device)
    stepping = torch.optim.AdamW(expected.parameters(), lr=0.05)
    for batch in data:
        with torch.autocast(accelerator.device.type, torch.bfloat16) if precision == "bf16" else nullcontext():
            output = expected(batch)
        output.float().square().mean().backward()
        stepping.step()
        stepping.zero_grad()
    # FSDP computes in bf16 without autocast, so its gradients are rounded at other places.
    tolerance = 0.05 if (precision, strategy) == ("bf16", "fsdp") else 1e-5
    for found, wanted in zip(full(own), full(expected), strict=True):
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@ends_training
def test_four_micro_batches_make_one_batch(device: str) -> None:
    once, four = opened(device), opened(device, gradient_accumulation_steps=4)
    data = batches(once, 4)
    weights = []
    for accelerator, parts in ((once, [torch.cat(data)]), (four, data)):
        own, model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer, parts)
        weights.append(full(own))
    for found, wanted in zip(*weights, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@ends_training
def test_a_checkpoint_larger_than_the_pinned_blocks_loads_bit_for_bit(
    device: str, strategy: str, tmp_path: Path
) -> None:
    options = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if strategy == "fsdp" else {}
    accelerator = opened(device, **options)
    width = 64 if device == "cpu" else 3072  # tensors of 72 MB, more than a block of 32 MiB
    own, model, optimizer = prepared(accelerator, width=width)
    data = batches(accelerator, 2, width)
    train(accelerator, model, optimizer, data)
    before = full(own)
    accelerator.save_state(tmp_path / "saved")
    train(accelerator, model, optimizer, data)
    assert not all(torch.equal(a, b) for a, b in zip(full(own), before, strict=True))
    accelerator.load_state(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(full(own), before, strict=True))


@ends_training
def test_an_asynchronous_save_from_a_stream_of_the_users_holds_the_values_of_the_call(
    device: str, tmp_path: Path
) -> None:
    accelerator = opened(device)
    width = 64 if device == "cpu" else 3072
    own, model, optimizer = prepared(accelerator, width=width)
    data = batches(accelerator, 2, width)
    train(accelerator, model, optimizer, data)
    stream = torch.Stream(accelerator.device) if device == "gpu" else nullcontext()
    if device == "gpu":
        torch.accelerator.synchronize()
    for value in (3.0, 5.0):  # by way of pinned blocks, and straight to a buffer that is pinned by then
        with stream, torch.no_grad():
            if device == "gpu" and accelerator.device.type == "cuda":
                torch.cuda._sleep(50_000_000)  # the values of the call are computed only after it
            for parameter in own.parameters():
                parameter.fill_(value)
            accelerator.save_state(tmp_path / f"saved-{value}", asynchronous=True)
            for parameter in own.parameters():
                parameter.fill_(7.0)
    accelerator.last_save.wait(60)
    if device == "gpu":
        torch.accelerator.synchronize()
    for value in (3.0, 5.0):
        accelerator.load_state(tmp_path / f"saved-{value}")
        assert {float(found) for tensor in full(own) for found in tensor.unique()} == {value}


@ends_training
def test_a_run_that_resumes_draws_the_same_dropout(device: str, tmp_path: Path) -> None:
    accelerator = opened(device)
    torch.manual_seed(3)
    own = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.05))
    data = batches(accelerator, 6)
    train(accelerator, model, optimizer, data[:3])
    accelerator.save_state(tmp_path / "saved")
    train(accelerator, model, optimizer, data[3:])
    wanted = full(own)
    accelerator.load_state(tmp_path / "saved")
    train(accelerator, model, optimizer, data[3:])
    assert all(torch.equal(a, b) for a, b in zip(full(own), wanted, strict=True))


@ends_training
def test_the_loss_scale_follows_torchs_own(device: str) -> None:
    options = {"init_scale": 1024.0, "growth_interval": 3}
    accelerator = opened(device, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**options)])
    own, other = net().to(accelerator.device), net().to(accelerator.device)
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.01))
    stepping = torch.optim.SGD(other.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(accelerator.device.type, **options)
    scales = []
    for number, batch in enumerate(batches(accelerator, 16)):
        factor = float("inf") if number in (4, 5, 11) else 1.0
        accelerator.backward(model(batch).square().mean() * factor)
        scales.append((accelerator.scaler.get_scale(), scaler.get_scale()))  # those that this step's losses have
        optimizer.step()
        assert accelerator.optimizer_step_was_skipped == (factor != 1.0)
        optimizer.zero_grad()
        with torch.autocast(accelerator.device.type, torch.float16):
            loss = other(batch).float().square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(stepping)
        scaler.update()
        stepping.zero_grad()
    assert [ours for ours, _ in scales] == [theirs for _, theirs in scales]
    assert len({ours for ours, _ in scales}) > 2


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("mode", [None, pytest.param("reduce-overhead", id="cudagraphs")])
@ends_training
def test_a_compiled_model_trains_as_in_eager_or_is_refused(device: str, mode: str | None, accumulate: int) -> None:
    if device == "cpu" and mode is not None:
        pytest.skip("CUDA graphs are of CUDA devices")
    backend = "aot_eager" if device == "cpu" else "inductor"
    weights = []
    for options in ({}, {"dynamo_plugin": TorchDynamoPlugin(backend=backend, mode=mode)}):
        with suppress(ConfigError) if mode else nullcontext():  # a mode that cannot accumulate is refused
            accelerator = opened(device, gradient_accumulation_steps=accumulate, **options)
            own = net()
            model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.05))
            train(accelerator, model, optimizer, batches(accelerator, 4 * accumulate))
            weights.append(full(own))
    if len(weights) == 1:
        assert accumulate > 1
        return
    for found, wanted in zip(*weights, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)


@ends_training
def test_a_meter_reads_every_few_steps_and_leaves_peak_statistics_alone(device: str) -> None:
    accelerator = opened(device)
    _, model, optimizer = prepared(accelerator)
    if device == "gpu":
        large = torch.empty(2**26, device=accelerator.device)
        peak = torch.accelerator.max_memory_allocated()
        del large
    meter = accelerator.meter(every=4, watch_loss=False)
    readings = []
    for batch in batches(accelerator):
        loss = train(accelerator, model, optimizer, [batch])
        readings.append(meter.step(loss))
    found = [reading for reading in readings if reading is not None]
    assert [reading.step for reading in found] == [4, 8]
    assert all(value == value for reading in found for value in reading.flat().values())
    if device == "gpu":
        assert torch.accelerator.max_memory_allocated() >= peak


@pytest.mark.parametrize("pin", [False, True])
@ends_training
def test_batches_arrive_in_order_with_their_values(device: str, pin: bool) -> None:
    accelerator = opened(device)
    count = 20 if device == "cpu" else 200

    def collate(numbers: list[int]) -> dict[str, Any]:
        return {"x": torch.full((2**14 + numbers[0] % 5,), float(numbers[0])), "nested": [torch.tensor(numbers)]}

    loader = DataLoader(range(count), batch_size=1, collate_fn=collate, pin_memory=pin and device == "gpu")
    sums = []
    busy = torch.randn(512, 512, device=accelerator.device)
    for batch in accelerator.prepare(loader):
        assert batch["x"].device == accelerator.device == batch["nested"][0].device
        busy = torch.tanh(busy @ busy)
        sums.append(torch.stack([batch["x"].amin(), batch["x"].amax(), batch["nested"][0][0].float()]))
    assert torch.stack(sums).cpu().tolist() == [[float(number)] * 3 for number in range(count)]


@ends_training
def test_a_profile_counts_each_kernel_once(device: str, tmp_path: Path) -> None:
    accelerator = opened(device)
    model = accelerator.prepare(net(256))
    batch = torch.randn(64, 256, device=accelerator.device)
    with accelerator.profile(ProfileKwargs(output_trace_dir=tmp_path)) as profiler:
        for _ in range(3):
            accelerator.backward(model(batch).square().mean())
        if device == "gpu":
            torch.accelerator.synchronize()
    rows = top_operators(profiler, 10**6)
    assert (tmp_path / "profile_0.json").stat().st_size > 0
    assert sum(row["cpu_us"] for row in rows) > 0
    if device == "gpu" and accelerator.device.type == "cuda":
        kernels = sum(
            event.device_time_total
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        )
        assert sum(row["device_us"] for row in rows) == pytest.approx(kernels, rel=0.02)
