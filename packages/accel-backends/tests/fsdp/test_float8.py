"""Weights gathered in 8 bits: a byte for each number on the way, scales known beforehand, the same training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Bundle, FSDPBackend, FSDPConfig, Run
from accel_backends.fsdp.float8 import ByteGather, follow
from accel_precision import AORecipeKwargs, PrecisionPolicy
from accel_state import Session

pytest.importorskip("torchao", reason="fp8 layers come from torchao")
WIDTH, LAYERS = 32, 4


class Block(nn.Module):
    """Two layers, of which torchao converts both."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.last(x)
        return result


class Following:
    """A converter whose scales need nothing."""

    def convert(self, model: nn.Module) -> nn.Module:
        return model

    def follow(self, model: nn.Module) -> "Following":
        return self

    def renew(self) -> None: ...

    def check(self) -> None: ...


class Unit(nn.Module):
    """A unit that remembers the all-gather it was given."""

    gather: object = None

    def set_custom_all_gather(self, gather: object) -> None:
        self.gather = gather


@pytest.mark.parametrize(
    ("backend", "device", "by_bytes"),
    [
        ("gloo", "cpu", True),
        ("gloo", "cuda", True),
        ("cpu:gloo,cuda:nccl", "cpu", True),
        ("cpu:gloo,cuda:nccl", "cuda", False),
        ("nccl", "cuda", False),
        ("cpu:gloo,xpu:xccl", "xpu", False),
    ],
)
def test_bytes_are_gathered_only_where_gloo_serves_the_device(backend: str, device: str, by_bytes: bool) -> None:
    root, unit, converter = Unit(), Unit(), Following()
    assert follow(root, [unit], converter, collective_backend=backend, device_type=device) is converter
    assert [isinstance(one.gather, ByteGather) for one in (root, unit)] == [by_bytes] * 2


def prepared(gather: bool | None = None, **options: Any) -> tuple[FSDPBackend, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    policy = PrecisionPolicy.parse("fp8", device_type="cpu", fp8=AORecipeKwargs(enable_fsdp_float8_all_gather=gather))
    backend = FSDPBackend(Run(Session.open(cpu=True), policy), FSDPConfig(**options))
    backend.prepare(Bundle([model], [optimizer]))
    return backend, model, optimizer


def train(backend: FSDPBackend, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
        backend.backward(loss)
        assert backend.step(optimizer)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@contextmanager
def collectives() -> Iterator[list[tuple[str, int]]]:
    """Name and bytes of every collective inside."""
    import torch.distributed as dist

    seen: list[tuple[str, int]] = []
    names = ("all_gather_into_tensor", "all_gather_single")  # torch's own gathers use the second where there is one
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def counting(name: str) -> Any:
        def run(out: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append((name, out.numel() * out.element_size()))
            return originals[name](out, *args, **kwargs)

        return run

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


SHARDINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "grad_op": {"sharding_strategy": "SHARD_GRAD_OP"},
    "none": {"sharding_strategy": "NO_SHARD"},
    "hybrid": {"sharding_strategy": "HYBRID_SHARD", "shard_size": 2},
    "offload": {"cpu_offload": True},
    "checkpointing": {"activation_checkpointing": True},
}


@pytest.mark.sampled(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name in ("full", "hybrid") else pytest.mark.slow)
        for name, options in SHARDINGS.items()
    ],
)
def test_weights_gathered_in_8_bits_train_as_those_gathered_wide(options: dict[str, Any]) -> None:
    narrow, wide = train(*prepared(**options)), train(*prepared(gather=False, **options))
    assert narrow == pytest.approx(wide, rel=0.02)


@pytest.mark.ranks(2)
def test_a_number_of_a_converted_weight_travels_as_one_byte() -> None:
    """A gather of bf16 takes two."""
    sizes = {}
    for gather in (True, False):
        backend, model, optimizer = prepared(gather)
        train(backend, model, optimizer, steps=1)
        with collectives() as seen, torch.no_grad():
            model(torch.ones(2, 8))
        sizes[gather] = [size for _, size in seen]
    block = 2 * WIDTH * WIDTH
    assert sizes[True].count(block) == LAYERS
    assert sizes[False].count(2 * block) == LAYERS


def scales(model: nn.Module) -> list[Any]:
    return [getattr(p._local_tensor, "_precomputed_scale", None) for n, p in model.named_parameters() if "up" in n]


def expected_scales(backend: FSDPBackend, model: nn.Module) -> list[float]:
    """The largest number of e4m3 over the largest of the weight."""
    state = backend.states.full_model(model, main_only=False)
    largest = torch.finfo(torch.float8_e4m3fn).max
    return [largest / float(value.abs().max()) for name, value in state.items() if "up" in name]


@pytest.mark.ranks(2)
def test_scales_are_known_after_a_step_and_forgotten_with_the_values_they_fit() -> None:
    backend, model, optimizer = prepared()
    assert scales(model) == [None] * LAYERS
    train(backend, model, optimizer, steps=2)
    assert [float(scale) for scale in scales(model)] == pytest.approx(expected_scales(backend, model))
    x = torch.ones(2, 8)
    with torch.no_grad():
        model(x)
        model.blocks[0].up.weight.mul_(64.0)  # far beyond what the old scale could hold
        changed = model(x)
        assert scales(model) == [None] * LAYERS
        other_backend, other, _ = prepared()
        other_backend.states.load_model(other, backend.states.full_model(model, main_only=False))
        torch.testing.assert_close(changed, other(x))
    train(backend, model, optimizer, steps=1)
    backend.states.load_model(model, other_backend.states.full_model(other, main_only=False))
    with torch.no_grad():
        torch.testing.assert_close(model(x), changed)
    train(backend, model, optimizer, steps=1)
    assert [float(scale) for scale in scales(model)] == pytest.approx(expected_scales(backend, model))


@pytest.mark.ranks(2)
def test_a_prepared_model_with_scales_can_be_let_go() -> None:
    import gc
    import weakref

    backend, model, optimizer = prepared()
    train(backend, model, optimizer, steps=1)
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("named", "device", "backend"),
    [
        ("gloo", "cpu", "gloo"),
        ("nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
    ],
)
def test_the_backend_that_serves_a_device_is_found(named, device, backend):
    from accel_backends.fsdp.float8 import serves

    assert serves(named, device) == backend
