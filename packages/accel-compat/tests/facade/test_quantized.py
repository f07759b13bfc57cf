"""States of models whose weights another library has quantized with bitsandbytes."""

from pathlib import Path

import pytest
import torch
from torch import nn


def quantized(bits: int, seed: int) -> nn.Module:
    """Layers of bitsandbytes as transformers makes them with a ``quantization_config``."""
    layers = pytest.importorskip("bitsandbytes").nn
    torch.manual_seed(seed)
    values = torch.randn(64, 64)
    if bits == 4:
        layer = layers.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4")
        layer.weight = layers.Params4bit(values, requires_grad=False, quant_type="nf4", module=layer).to("cpu")
    else:
        layer = layers.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0)
        layer.weight = layers.Int8Params(values, requires_grad=False, has_fp16_weights=False).to("cpu")
    return nn.Sequential(layer, nn.Linear(64, 4))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("computed", [False, True])
def test_quantized_weights_are_loaded_with_their_scales(bits: int, alone: bool, computed: bool, tmp_path: Path):
    from accelerate import Accelerator

    def prepared(seed: int) -> tuple[Accelerator, nn.Module]:
        accelerator, model = Accelerator(cpu=True), quantized(bits, seed)
        if alone:
            return accelerator, accelerator.prepare_model(model, evaluation_mode=True)
        return accelerator, accelerator.prepare(model)

    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    accelerator, model = prepared(0)
    accelerator.save_state(str(tmp_path / "state"))
    expected = model(x)
    other, loaded = prepared(1)
    if computed:  # a forward may move scales from the weight to the layer
        assert not loaded(x).equal(expected)
    other.load_state(str(tmp_path / "state"))
    assert loaded(x).equal(expected)
