"""Adapters on a quantized base are trained with FSDP while the base stays whole; a base to be sharded is refused."""

import pytest
import torch
from torch import nn

from accel_backends.core.bundle import Bundle
from accel_backends.fsdp import validate
from accel_state.errors import PrepareError

from .test_backend import open_backend

torchao = pytest.importorskip("torchao.quantization")


class Adapted(nn.Module):
    """A quantized layer and a trainable adapter of rank 4."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.down = nn.Linear(64, 4, bias=False)
        self.up = nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.up(self.down(x))
        return result


def quantized() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), Adapted())
    for layer in model:
        torchao.quantize_(layer.base, torchao.Int8WeightOnlyConfig())
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_adapters_are_trained_as_on_one_process_if_the_base_is_ignored() -> None:
    backend, model, alone = open_backend(ignored_modules=r".*\.base"), quantized(), quantized()
    bundle = backend.prepare(Bundle([model], [optimizer_of(model)]))
    optimizers = (*bundle.optimizers, optimizer_of(alone))
    x = torch.linspace(-1, 1, 128).reshape(2, 64)
    for _ in range(3):
        for each, optimizer in zip((*bundle.models, alone), optimizers, strict=True):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert type(model[0].base.weight).__name__ == "Int8Tensor"
    for name, parameter in alone.named_parameters():
        if parameter.requires_grad:
            found = bundle.models[0].get_parameter(name)
            torch.testing.assert_close(found.full_tensor(), parameter, rtol=1e-5, atol=1e-7)


@pytest.mark.ranks(2)
def test_a_quantized_weight_to_be_sharded_is_refused_by_name() -> None:
    with pytest.raises(PrepareError, match=r"0\.base\.weight .* Int8Tensor of torchao.*ignored_modules with '0\.base'"):
        open_backend().prepare(Bundle([quantized()]))


def packed(storage: torch.dtype) -> nn.Linear:
    """A layer whose weight has the bytes of 4-bit numbers, and scales elsewhere, as those of bitsandbytes have."""
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(torch.zeros(64, dtype=torch.uint8).view(storage)[:, None], requires_grad=False)
    layer.weight.quant_state = object()
    return layer


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_packed_weights_that_the_precision_would_convert_are_refused(precision: str) -> None:
    said = r"0\.weight .* stored as torch.float32.*to torch.bfloat16 .*_quant_storage=torch.bfloat16, or torch.uint8"
    with pytest.raises(PrepareError, match=said):
        open_backend(precision).prepare(Bundle([nn.Sequential(packed(torch.float32))]))
    kept = open_backend(precision).prepare(Bundle([nn.Sequential(packed(torch.bfloat16), nn.Linear(8, 8))]))
    assert kept.models[0][0].weight.dtype is torch.bfloat16


@pytest.mark.ranks(2)
def test_integers_that_this_torch_cannot_shard_are_refused_before_any_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "shards_integers", lambda: False)
    model = nn.Sequential(nn.Linear(8, 8), packed(torch.uint8))
    with pytest.raises(PrepareError, match=r"1\.weight .* uint8.*fully_shard of torch .*ignored_modules with '1'"):
        open_backend().prepare(Bundle([model]))
    assert not any(validate.is_sharded(module) for module in model.modules())
