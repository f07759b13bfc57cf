"""Adapters are trained on a base whose weights are quantized, on one rank and several."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accel import Accelerator
from accel.utils import (
    BnbQuantizationConfig,
    FullyShardedDataParallelPlugin,
    TorchAOQuantizationConfig,
    load_and_quantize_model,
)
from accel_state.errors import CheckpointError, CheckpointMismatchError, PrepareError


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.down = nn.Linear(64, 4, bias=False)
        self.up = nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def quantized(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    skip = ["down", "up"]
    if kind == "int8":
        pytest.importorskip("torchao")
        config = TorchAOQuantizationConfig(torch_dtype=dtype, skip_modules=skip)
        return load_and_quantize_model(Adapted(), config)
    pytest.importorskip("bitsandbytes")
    bits = {"load_in_8bit": True} if kind == "8bit" else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    if kind != "8bit":
        bits |= {"bnb_4bit_compute_dtype": "fp32", "bnb_4bit_use_double_quant": kind == "nested"}
    return load_and_quantize_model(Adapted(), BnbQuantizationConfig(**bits, torch_dtype=dtype, skip_modules=skip))


@dataclass(frozen=True)
class Trained:
    """What ten steps leave: their losses, how far the base's outputs have moved, and every rank's adapter."""

    losses: list[float]
    moved: float
    adapters: torch.Tensor


def train(kind: str, rank: int) -> Trained:
    model = quantized(kind)  # may skip, which no rank may do while another one opens its group
    accelerator = Accelerator(cpu=True)
    for parameter in model.base.parameters():
        parameter.requires_grad = False
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        before = model.base(x).clone()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(10):
        loss = (model(x) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    own = accelerator.unwrap_model(model)
    with torch.no_grad():
        moved = (own.base(x) - before).abs().max().item()
    return Trained(losses, moved, accelerator.gather(own.up.weight.detach()[None].clone()))


@pytest.mark.parametrize("kind", ["int8", "8bit", "4bit"])
def test_adapters_learn_on_a_quantized_base(kind: str) -> None:
    found = train(kind, 0)
    assert found.losses[-1] < found.losses[0]
    assert found.moved == 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["int8", "8bit", "4bit"])
def test_adapters_of_two_ranks_learn_the_same(rank: int, kind: str) -> None:
    found = train(kind, rank)
    assert found.losses[-1] < found.losses[0]
    assert found.moved == 0
    assert torch.equal(*found.adapters)


def in_4_bits(rows: int, *, seed: int, nested: bool = False) -> nn.Module:
    """One layer in 4 bits; as many numbers whatever the rows."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(seed)
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="fp32", bnb_4bit_use_double_quant=nested)
    layer = nn.Linear(4096 // rows, rows, bias=False)
    layer.weight.data *= 1 + seed  # which gives the scales an offset with other digits
    return load_and_quantize_model(nn.Sequential(layer), config)


def test_a_base_with_nested_scales_resumes_whatever_the_digits_of_its_offset(tmp_path: Path) -> None:
    states = [in_4_bits(64, seed=seed, nested=True) for seed in range(12)]
    lengths = [state.state_dict()["0.weight.quant_state.bitsandbytes__fp4"].numel() for state in states]
    assert len(set(lengths)) > 1, "the seeds must give descriptions of several lengths"
    first, other = states[lengths.index(min(lengths))], states[lengths.index(max(lengths))]
    x = torch.randn(4, 64)
    accelerator, resumed = Accelerator(cpu=True), Accelerator(cpu=True)
    saved, loaded = accelerator.prepare_model(first), resumed.prepare_model(other)
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(saved, tmp_path / "export")
    assert not loaded(x).equal(saved(x))
    resumed.load_state(tmp_path / "state")
    assert loaded(x).equal(saved(x))
    again = Accelerator(cpu=True)
    exported = again.prepare_model(in_4_bits(64, seed=20, nested=True))
    again.load_model(exported, tmp_path / "export")
    assert exported(x).equal(saved(x))


@pytest.mark.parametrize("nested", [False, True])
def test_a_base_of_another_shape_with_as_many_bytes_is_refused_before_anything_is_loaded(
    nested: bool, tmp_path: Path
) -> None:
    accelerator, other = Accelerator(cpu=True), Accelerator(cpu=True)
    accelerator.prepare_model(in_4_bits(32, seed=0, nested=nested))
    accelerator.save_state(tmp_path / "state")
    model = other.prepare_model(in_4_bits(128, seed=1, nested=nested))
    x = torch.randn(4, 32)
    before = model(x)
    said = r"0\.weight\.quant_state\.bitsandbytes__fp4 is about a weight of shape \(32, 128\).* and about .*\(128, 32\)"
    with pytest.raises(CheckpointMismatchError, match=said):
        other.load_state(tmp_path / "state")
    assert model(x).equal(before)


def of_torchao(seed: int, **options: Any) -> nn.Module:
    pytest.importorskip("torchao")
    torch.manual_seed(seed)
    config = TorchAOQuantizationConfig(torch_dtype=torch.float32, skip_modules=["down", "up"], **options)
    return load_and_quantize_model(Adapted(), config)


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_a_base_of_torchao_is_saved_and_loaded_to_the_bit(weights: str, tmp_path: Path) -> None:
    accelerator, x = Accelerator(cpu=True), torch.randn(4, 64)
    model = accelerator.prepare(of_torchao(0, weights=weights))
    accelerator.save_state(tmp_path / "state")
    other = Accelerator(cpu=True)
    loaded = other.prepare(of_torchao(1, weights=weights))
    kept, before = loaded.base[0].weight, loaded(x)
    other.load_state(tmp_path / "state")
    assert loaded.base[0].weight is kept
    assert loaded(x).equal(model(x))
    assert not loaded(x).equal(before)
    for different in (
        of_torchao(1, weights="int8" if weights != "int8" else "int4", group_size=64),
        Adapted(),
    ):
        another = Accelerator(cpu=True)
        another.prepare(different)
        with pytest.raises(CheckpointMismatchError, match=r"base\.0\.weight is torchao.* there and .*quantize"):
            another.load_state(tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"base\.0\.weight is a torchao.*nearest: save_state"):
        accelerator.save_model(model, tmp_path / "export")


def by_another_library(seed: int) -> nn.Module:
    """Layers of bitsandbytes as transformers makes them with a ``quantization_config``."""
    layers = pytest.importorskip("bitsandbytes").nn
    torch.manual_seed(seed)
    model = Adapted()
    for number in (0, 2):
        made = layers.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0)
        made.weight = layers.Int8Params(torch.randn(64, 64), requires_grad=False, has_fp16_weights=False).to("cpu")
        model.base[number] = made
    return model


def test_a_base_in_8_bits_that_another_library_quantized_is_resumed(tmp_path: Path) -> None:
    x = torch.randn(4, 64)
    accelerator, other = Accelerator(cpu=True), Accelerator(cpu=True)
    model = accelerator.prepare_model(by_another_library(0)).eval()
    accelerator.save_state(tmp_path / "state")
    expected = model(x)
    loaded = other.prepare_model(by_another_library(1)).eval()
    assert not loaded(x).equal(expected)
    other.load_state(tmp_path / "state")
    assert loaded(x).equal(expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("version", [1, 2])
def test_an_ignored_base_of_torchao_is_loaded_beside_sharded_adapters(rank: int, version: int, tmp_path: Path) -> None:
    x, models = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), []
    for seed in (0, 1):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, ignored_modules="base")
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        made = of_torchao(seed, weights="int8")
        for parameter in made.base.parameters():
            parameter.requires_grad = False
        model, optimizer = accelerator.prepare(made, torch.optim.SGD([made.down.weight, made.up.weight], lr=0.1))
        if seed == 0:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            accelerator.save_state(tmp_path / "state")
        else:
            accelerator.load_state(tmp_path / "state")
        models.append(model)
    saved, loaded = models
    assert loaded(x).equal(saved(x))


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: one for name, one in model.named_parameters() if name.startswith(("down", "up"))}
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in found.items()}


def with_optimizer(kind: str, dtype: torch.dtype, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = quantized(kind, seed=seed, dtype=dtype)
    for parameter in model.base.parameters():
        parameter.requires_grad = False
    return model, torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.5, momentum=0.9)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "strategy", "dtype"),
    [
        ("int8", "ddp", torch.float32),
        ("8bit", "ddp", torch.float64),
        ("4bit", "ddp", torch.float32),
        ("4bit", "fsdp", torch.float32),
        ("nested", "fsdp", torch.float32),
    ],
)
def test_two_ranks_train_the_adapters_of_one_process_and_resume_with_the_saved_base(
    rank: int, kind: str, strategy: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model, optimizer = accelerator.prepare(*with_optimizer(kind, dtype))
    alone, optimizer_alone = with_optimizer(kind, dtype)
    x = torch.randn(8, 64, dtype=dtype, generator=torch.Generator().manual_seed(0))

    def steps(count: int) -> None:
        for _ in range(count):
            accelerator.backward((model(x[rank::2]) - 1).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    def steps_alone(count: int) -> None:
        for _ in range(count):
            (alone(x) - 1).square().mean().backward()
            optimizer_alone.step()
            optimizer_alone.zero_grad()

    steps(2)
    accelerator.save_state(tmp_path / "state")
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model, optimizer = accelerator.prepare(*with_optimizer(kind, dtype, seed=1))  # another base, until it is loaded
    model(x)
    accelerator.load_state(tmp_path / "state")
    steps(2)
    steps_alone(4)
    tolerance = 1e-10 if dtype is torch.float64 else 1e-6
    expected = adapters(alone)
    for name, found in adapters(accelerator.unwrap_model(model)).items():
        torch.testing.assert_close(found, expected[name], rtol=10 * tolerance, atol=tolerance)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "strategy", "said"),
    [
        (
            "8bit",
            "fsdp",
            r"base\.0\.weight of Adapted is an Int8Params of bitsandbytes.*ignored_modules with 'base\.0'",
        ),
        ("4bit", "fsdp1", r"base\.0\.weight of Adapted is uint8.*fsdp_version=2, which shards 4-bit weights"),
    ],
)
def test_weights_that_a_shard_would_not_describe_are_refused_by_name(kind: str, strategy: str, said: str) -> None:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    with pytest.raises(PrepareError, match=said):
        accelerator.prepare(*with_optimizer(kind, torch.float32))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "version"), [("8bit", 2), ("8bit", 1), ("4bit", 1)])
def test_an_ignored_base_stays_replicated_while_the_adapters_are_sharded(rank: int, kind: str, version: int) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, ignored_modules=r"base")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(*with_optimizer(kind, torch.float32))
    alone, optimizer_alone = with_optimizer(kind, torch.float32)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    accelerator.backward((model(x[rank::2]) - 1).square().mean())
    optimizer.step()
    (alone(x) - 1).square().mean().backward()
    optimizer_alone.step()
    expected = adapters(alone)
    with accelerator.full_parameters(model):
        found = {name.replace("_fsdp_wrapped_module.", ""): one for name, one in model.named_parameters()}
        for name, one in expected.items():
            torch.testing.assert_close(found[name].to_local() if isinstance(found[name], DTensor) else found[name], one)
    assert type(accelerator.unwrap_model(model).base[0].weight) is type(alone.base[0].weight)
