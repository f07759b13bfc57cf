"""Models are loaded with quantized weights, one weight at a time, and loaded back as they were."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_inference.dispatch.offload import cpu_offload, disk_offload
from accel_inference.dispatch.quantized import load_and_quantize_model
from accel_inference.module_tensors.meta_init import init_empty_weights
from accel_inference.quantization.config import BnbQuantizationConfig, TorchAOQuantizationConfig
from accel_inference.weights.loading import load_checkpoint_in_model
from accel_state.errors import CheckpointMismatchError
from accel_state.pytree.composite import inner_tensors


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.norm = nn.LayerNorm(128)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.norm(self.up(x))))


def build():
    return nn.Sequential(Block(), Block(), nn.Linear(64, 32))


BNB = [
    {"load_in_8bit": True, "torch_dtype": torch.float32},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "fp32"},
    {"load_in_4bit": True, "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "fp32"},
]
AO = [{"weights": "int8"}, {"weights": "int4"}, {"weights": "fp8"}]
TOLERANCE = {"int8": 0.02, "fp8": 0.05, "int4": 0.15, "8bit": 0.03, "4bit": 0.2}


def config_of(options, **more):
    if "weights" in options:
        pytest.importorskip("torchao")
        return TorchAOQuantizationConfig(**{"torch_dtype": torch.float32, **options, **more})
    pytest.importorskip("bitsandbytes")
    return BnbQuantizationConfig(**options, **more)


def tolerance(options):
    key = options.get("weights") or ("8bit" if options.get("load_in_8bit") else "4bit")
    return TOLERANCE[key]


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = build()
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    return model, tmp_path / "model.safetensors"


def loaded(file, config, **options):
    with init_empty_weights():
        model = build()
    return load_and_quantize_model(model, config, weights_location=file, device_map={"": "cpu"}, **options)


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("options", [*BNB, *AO], ids=str)
def test_a_quantized_model_computes_nearly_the_same_in_less_memory(saved, options):
    plain, file = saved
    model = loaded(file, config_of(options)).eval()
    x = torch.randn(16, 64)
    with torch.no_grad():
        assert relative_error(model(x), plain(x)) < tolerance(options)
    assert type(model[0].up.weight) is not nn.Parameter
    assert model[0].norm.weight.dtype is torch.float32


@pytest.mark.parametrize("options", [*BNB, *AO], ids=str)
def test_loaded_weights_are_those_of_a_model_that_is_quantized_afterwards(saved, options, caplog):
    plain, file = saved
    first = loaded(file, config_of(options)).eval()
    second = load_and_quantize_model(copy.deepcopy(plain), config_of(options)).eval()
    x = torch.randn(4, 64)
    with torch.no_grad():
        assert torch.equal(first(x), second(x))
    assert "loaded in full precision already" in caplog.text


def test_what_is_not_quantized_is_on_the_device_of_the_map_as_well():
    model = build()
    model.register_buffer("positions", torch.zeros(3), persistent=False)
    model.append(nn.Linear(64, 32))[3].weight = model[2].weight
    load_and_quantize_model(model, config_of(AO[0]), device_map={"": "meta"})  # as an accelerator would be
    assert {one.device.type for one in (*model.parameters(), *model.buffers())} == {"meta"}
    assert model[3].weight is model[2].weight
    assert model.hf_device_map == {"": "meta"}


@pytest.mark.parametrize("options", BNB, ids=str)
def test_a_saved_quantized_model_of_bitsandbytes_is_loaded_back(saved, options, tmp_path):
    _, file = saved
    model = loaded(file, config_of(options)).eval()
    save_file(model.state_dict(), tmp_path / "quantized.safetensors", metadata={"format": "pt"})
    again = loaded(tmp_path / "quantized.safetensors", config_of(options)).eval()
    x = torch.randn(4, 64)
    with torch.no_grad():
        assert torch.equal(model(x), again(x))


@pytest.mark.parametrize("options", AO, ids=str)
def test_a_saved_quantized_model_of_torchao_is_loaded_back(saved, options, tmp_path):
    _, file = saved
    model = loaded(file, config_of(options)).eval()
    torch.save(model.state_dict(), tmp_path / "quantized.bin")
    again = loaded(tmp_path / "quantized.bin", config_of(options)).eval()
    x = torch.randn(4, 64)
    with torch.no_grad():
        assert torch.equal(model(x), again(x))


@pytest.mark.parametrize("options", BNB, ids=str)
def test_a_layer_that_has_computed_loads_the_state_of_other_weights(saved, options):
    _, file = saved
    model, x = loaded(file, config_of(options)).eval(), torch.randn(4, 64)
    torch.manual_seed(1)
    other = load_and_quantize_model(build(), config_of(options)).eval()
    with torch.no_grad():
        before = other(x)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(x), model(x))
        assert not torch.equal(other(x), before)
    copied = copy.deepcopy(other)
    with torch.no_grad():
        assert torch.equal(copied(x), model(x))


@pytest.mark.parametrize(("saved_in", "said"), [(0, "in 8 bits, and .* loads 4"), (1, "in 4 bits, and .* loads 8")])
def test_a_state_of_other_bits_is_refused(saved, saved_in, said, tmp_path):
    _, file = saved
    state = loaded(file, config_of(BNB[saved_in])).state_dict()
    save_file(state, tmp_path / "quantized.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=said):
        loaded(tmp_path / "quantized.safetensors", config_of(BNB[1 - saved_in]))


def states_of(model):
    """Copies of all tensors of a model, inner ones included."""
    inner = {
        f"{name}.{attribute}": one
        for name, tensor in model.state_dict().items()
        for attribute, one in inner_tensors(tensor).items()
    }
    plain = {name: one for name, one in model.state_dict().items() if not inner_tensors(one)}
    return {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in {**plain, **inner}.items()}


@pytest.mark.parametrize("options", AO, ids=str)
def test_a_quantized_checkpoint_is_loaded_into_a_model_quantized_alike(saved, options, tmp_path):
    _, file = saved
    model, x = loaded(file, config_of(options)).eval(), torch.randn(4, 64)
    torch.save(model.state_dict(), tmp_path / "quantized.bin")
    torch.manual_seed(1)
    other = load_and_quantize_model(build(), config_of(options)).eval()
    with torch.no_grad():
        assert not torch.equal(other(x), model(x))
        load_checkpoint_in_model(other, tmp_path / "quantized.bin", strict=True)
        assert torch.equal(other(x), model(x))


KINDS = {
    "plain": None, "8bit": BNB[0], "4bit": BNB[1],
    "int8": AO[0], "int4": AO[1], "int4 in groups of 16": {**AO[1], "group_size": 16}, "fp8": AO[2],
}  # fmt: skip


def of_kind(kind, seed):
    torch.manual_seed(seed)
    return build() if KINDS[kind] is None else load_and_quantize_model(build(), config_of(KINDS[kind]))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        ("plain", "int8", r"0\.up\.weight is one tensor in float32 in the checkpoint and Int8Tensor"),
        ("plain", "int4", r"0\.up\.weight is one tensor in float32 in the checkpoint and IntxUnpacked"),
        ("int4", "int4 in groups of 16", r"scale \[\d+, \d+\] float32.* in the checkpoint and IntxUnpacked"),
        ("int8", "int4", r"is Int8Tensor .* in the checkpoint and IntxUnpacked"),
        ("int8", "fp8", r"is Int8Tensor .* in the checkpoint and Float8Tensor"),
        ("plain", "4bit", r"0\.up\.weight.* of the model are quantized by bitsandbytes"),
        ("4bit", "4bit", r"0\.up\.weight.* of the model are quantized by bitsandbytes.*load_state_dict"),
        ("8bit", "8bit", r"0\.up\.weight.* of the model are quantized by bitsandbytes"),
        ("int8", "8bit", r"0\.up\.weight.* of the model are quantized by bitsandbytes"),
        ("8bit", "plain", r"0\.up\.weight.* of the checkpoint are quantized by bitsandbytes"),
        ("4bit", "plain", r"0\.up\.weight.* of the checkpoint are quantized by bitsandbytes"),
    ],
)
def test_weights_quantized_in_another_way_are_refused_before_anything_is_loaded(there, here, said, strict, tmp_path):
    torch.save(of_kind(there, 0).state_dict(), tmp_path / "other.bin")
    model = of_kind(here, 1)
    before = states_of(model)
    with pytest.raises(CheckpointMismatchError, match=said):
        load_checkpoint_in_model(model, tmp_path / "other.bin", strict=strict)
    after = states_of(model)
    assert all(torch.equal(after[name], one) for name, one in before.items() if isinstance(one, torch.Tensor))


def test_four_bit_weights_of_another_shape_are_no_half_load_of_a_state_dict():
    config = config_of(BNB[1])
    torch.manual_seed(0)
    model, other = (load_and_quantize_model(nn.Sequential(nn.Linear(*size)), config) for size in ((64, 32), (32, 64)))
    assert model[0].weight.shape == other[0].weight.shape
    x = torch.randn(4, 64)
    with torch.no_grad():
        expected = model(x)
        with pytest.raises(
            RuntimeError, match=r"0\.weight is \[64, 32\] in the state dict and \[32, 64\] in the model"
        ):
            model.load_state_dict({name: one for name, one in other.state_dict().items() if "bias" not in name}, False)
        assert torch.equal(model(x), expected)


BLOCKS, WIDTH = 48, 1024
PEAK = f"""
import sys
from pathlib import Path
import torch
from torch import nn
from accel_inference import BnbQuantizationConfig, TorchAOQuantizationConfig
from accel_inference import init_empty_weights, load_and_quantize_model

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def build(width, blocks):
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(blocks)))

options = eval(sys.argv[2])
kind = TorchAOQuantizationConfig if "weights" in options else BnbQuantizationConfig
config = kind(**{{"torch_dtype": torch.float32, **options}})
load_and_quantize_model(build(64, 1), config)  # which imports the library
with init_empty_weights():
    model = build({WIDTH}, {BLOCKS})
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS:")
load_and_quantize_model(model, config, weights_location=Path(sys.argv[1]), device_map={{"": "cpu"}})
print(memory("VmHWM:") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
@pytest.mark.parametrize(
    "options",
    [*BNB, *AO],
    ids=str,
)
def test_a_sharded_checkpoint_is_quantized_without_a_copy_in_full_precision(options, tmp_path):
    config_of(options)
    places = {f"{index}.weight": f"model-{index // 8}.safetensors" for index in range(BLOCKS)}
    for file in set(places.values()):
        save_file({name: torch.randn(WIDTH, WIDTH) for name in places if places[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    block = WIDTH * WIDTH * 4
    run = [sys.executable, "-c", PEAK, str(tmp_path), repr(options)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=280, check=True)
    quantized = block * BLOCKS // (8 if options.get("load_in_4bit") else 4)
    assert int(done.stdout) < quantized + 16 * block < block * BLOCKS


@pytest.mark.parametrize("options", [BNB[0], BNB[1], AO[0]], ids=str)
def test_skipped_modules_keep_their_precision(saved, options):
    plain, file = saved
    config = config_of(options, skip_modules=["0.up"], keep_in_fp32_modules=["down"])
    model = loaded(file, config)
    assert torch.equal(model[0].up.weight, plain[0].up.weight.to(config.torch_dtype))
    assert torch.equal(model[1].down.weight, plain[1].down.weight)
    assert type(model[1].up.weight) is not nn.Parameter


@pytest.mark.parametrize("options", [BNB[0], BNB[1], AO[0]], ids=str)
def test_adapters_on_a_quantized_base_get_gradients_and_the_base_none(saved, options):
    _, file = saved
    base = loaded(file, config_of(options))
    base.requires_grad_(False)
    adapter = nn.Linear(32, 32)
    before = nn.Linear(64, 64)
    model = nn.Sequential(before, base, adapter)
    model(torch.randn(8, 64)).square().mean().backward()
    assert before.weight.grad.abs().sum() > 0
    assert adapter.weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in base.parameters())


@pytest.mark.parametrize("options", [AO[0]], ids=str)
def test_an_empty_model_needs_weights(options):
    with init_empty_weights():
        model = build()
    with pytest.raises(RuntimeError, match=r"0\.up\.weight is on the meta device.*`weights_location` is needed"):
        load_and_quantize_model(model, config_of(options))


def test_a_weight_of_another_shape_is_refused_before_anything_is_loaded(saved, tmp_path):
    plain, _ = saved
    state = plain.state_dict() | {"2.weight": torch.ones(7, 64)}
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointMismatchError, match=r"2\.weight is \[7, 64\] in the checkpoint and \[32, 64\]"):
        loaded(tmp_path / "other.safetensors", config_of(AO[0]))


def test_a_checkpoint_without_a_weight_is_refused(saved, tmp_path):
    plain, _ = saved
    state = {name: tensor for name, tensor in plain.state_dict().items() if name != "1.down.weight"}
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointMismatchError, match=r"lacks weights of the model: 1\.down\.weight"):
        loaded(tmp_path / "other.safetensors", config_of(AO[0]))


def test_a_map_may_keep_modules_on_disk_in_their_precision(saved, tmp_path):
    plain, file = saved
    with init_empty_weights():
        model = build()
    places = {"0": "cpu", "1": "disk", "2": "cpu"}
    config = config_of(AO[0])
    model = load_and_quantize_model(
        model, config, weights_location=file, device_map=places, offload_folder=tmp_path / "offload"
    )
    x = torch.randn(4, 64)
    with torch.no_grad():
        assert relative_error(model(x), plain(x)) < TOLERANCE["int8"]
    assert model[1].up.weight.is_meta
    assert model.hf_device_map == places


@pytest.mark.parametrize("options", AO, ids=str)
@pytest.mark.sampled(1)
def test_a_quantized_model_of_torchao_is_offloaded_to_host_memory_only(saved, options, tmp_path):
    _, file = saved
    model, x = loaded(file, config_of(options)).eval(), torch.randn(4, 64)
    with torch.no_grad():
        expected = model(x)
        with pytest.raises(
            ValueError, match=r"0\.up\.weight is a .*Tensor, which consists of several tensors.*cpu_offload"
        ):
            disk_offload(model, tmp_path / "disk")
        cpu_offload(model)
        for _ in range(2):
            assert torch.equal(model(x), expected)
        assert model[0].up.weight.is_meta


@pytest.mark.parametrize("options", [BNB[0], BNB[1], AO[0]], ids=str)
@pytest.mark.parametrize("fault", ["missing", "shape"])
def test_a_checkpoint_that_is_refused_leaves_the_model_as_it_was(saved, options, fault, tmp_path):
    plain, _ = saved
    state = plain.state_dict()
    if fault == "missing":
        del state["1.down.weight"]
    else:
        state["1.down.weight"] = torch.ones(7, 64)
    save_file(state, tmp_path / "other.safetensors")
    config = config_of(options)
    with init_empty_weights():
        model = build()
    before = dict(model.named_parameters())
    kinds = [type(part) for part in model.modules()]
    with pytest.raises(CheckpointMismatchError, match=r"1\.down\.weight"):
        load_and_quantize_model(model, config, weights_location=tmp_path / "other.safetensors")
    assert [type(part) for part in model.modules()] == kinds
    assert all(model.get_parameter(name) is one for name, one in before.items())
