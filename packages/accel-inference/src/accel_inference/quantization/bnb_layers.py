"""Linear layers of bitsandbytes."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # every ``prepare`` imports this module
    from accel_inference.quantization.config import BnbQuantizationConfig

_LOADS_SCALES: Final = "_accel_loads_scales"


def bitsandbytes() -> Any:
    """The package.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return import_module("bitsandbytes")
    except ImportError as error:
        raise ImportError(
            "BnbQuantizationConfig needs bitsandbytes 0.48 or newer (pip install bitsandbytes); "
            f"TorchAOQuantizationConfig quantizes with torchao: {error}"
        ) from error


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether a model has a layer with 4-bit weights of bitsandbytes."""
    return any(hasattr(module, "quant_storage") and hasattr(module, "compute_dtype") for module in model.modules())


def load_scales(model: nn.Module) -> None:
    """Makes layers with quantized weights of bitsandbytes load their scales from a state dict, which they would ignore.

    Also those that another library made, as transformers does with a ``quantization_config``. Layers that do so already
    stay as they are.
    """
    package = sys.modules.get("bitsandbytes")
    if package is None:  # otherwise no such layer can exist
        return
    hooks = {package.nn.Linear4bit: _take_scales_4bit, package.nn.Linear8bitLt: _take_scales_8bit}
    for module in model.modules():
        hook = next((hook for kind, hook in hooks.items() if isinstance(module, kind)), None)
        if hook is not None and _LOADS_SCALES not in module.__dict__:
            module.__dict__[_LOADS_SCALES] = True
            module.register_load_state_dict_pre_hook(hook)


@final
@dataclass(frozen=True)
class BnbQuantizer:
    """Quantization by bitsandbytes in 8 or 4 bits."""

    config: "BnbQuantizationConfig"

    def takes(self, linear: nn.Linear) -> bool:
        return True

    def layer(self, linear: nn.Linear) -> nn.Module:
        config, layers = self.config, bitsandbytes().nn
        kind: dict[str, Any] = (
            {"has_fp16_weights": False, "threshold": config.llm_int8_threshold}
            if config.load_in_8bit
            else {
                "compute_dtype": config.bnb_4bit_compute_dtype,
                "compress_statistics": config.bnb_4bit_use_double_quant,
                "quant_type": config.bnb_4bit_quant_type,
            }
        )
        made: nn.Module = (layers.Linear8bitLt if config.load_in_8bit else layers.Linear4bit)(
            linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta", **kind
        )
        made.weight.requires_grad_(False)
        if linear.bias is not None:
            made.bias = linear.bias
        load_scales(made)
        return made.train(linear.training)

    def weight(self, layer: nn.Module, value: Tensor, device: torch.device) -> nn.Parameter:
        layers = bitsandbytes().nn
        if self.config.load_in_8bit:  # which quantizes only on the way from the host
            quantized = layers.Int8Params(value.cpu(), requires_grad=False, has_fp16_weights=False)
        else:
            quantized = layers.Params4bit(
                value.to(self.config.torch_dtype),
                requires_grad=False,
                compress_statistics=self.config.bnb_4bit_use_double_quant,
                quant_type=self.config.bnb_4bit_quant_type,
                module=layer,
            )
        made: nn.Parameter = quantized.to(device)
        return made

    def saved_names(self, name: str, names: Mapping[str, object]) -> list[str]:
        beside = {f"{name}.SCB", f"{name}.weight_format"}
        return [one for one in names if one in beside or one.startswith(f"{name}.weight.")]

    def restored(
        self, layer: nn.Module, value: Tensor, saved: Mapping[str, Tensor], device: torch.device
    ) -> nn.Parameter:
        layers = bitsandbytes().nn
        if self.config.load_in_8bit:
            if value.dtype != torch.int8 or "SCB" not in saved:
                raise ValueError(f"the checkpoint has weights in 4 bits, and {self.config} loads 8")
            there, scales = value.to(device), saved["SCB"].to(device)
            made: nn.Parameter = layers.Int8Params(
                there, requires_grad=False, has_fp16_weights=False, CB=there, SCB=scales
            )
            return made
        if "SCB" in saved:
            raise ValueError(f"the checkpoint has weights in 8 bits, and {self.config} loads 4")
        statistics = {name.removeprefix("weight."): tensor for name, tensor in saved.items()}
        made = layers.Params4bit.from_prequantized(value, statistics, requires_grad=False, device=device, module=layer)
        return made


def _take_scales_8bit(module: nn.Module, _state: Mapping[str, Any], _prefix: str, *_: object) -> None:
    """Makes a layer that has computed load a state dict.

    A forward moves the scales from the weight to the layer, and loading looks for them at the weight.
    """
    layer: Any = module
    if layer.weight.SCB is None and layer.state.SCB is not None:
        layer.weight.CB, layer.weight.SCB = layer.state.CB, layer.state.SCB


def _take_scales_4bit(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    _metadata: object,
    _strict: bool,
    _missing: list[str],
    _unexpected: list[str],
    errors: list[str],
) -> None:
    """Makes a layer load its scales from a state dict, where they are beside the weight; it would ignore them.

    Scales of a weight of another shape are an error of the load, and the layer keeps its weight.
    """
    layer: Any = module
    begin = f"{prefix}weight."
    given = {name.removeprefix(begin): state.pop(name).clone() for name in list(state) if name.startswith(begin)}
    if not given:
        return
    if getattr(layer.quant_state, "packing_format_for_cpu", False):
        layer.state_dict()  # as a side effect the weight gets the layout of checkpoints again
    found = bitsandbytes().functional.QuantState.from_dict(qs_dict=given, device=layer.weight.device)
    expected = (layer.out_features, layer.in_features)
    if tuple(found.shape) != expected:
        state.pop(f"{prefix}weight", None)
        errors.append(f"{prefix}weight is {list(found.shape)} in the state dict and {list(expected)} in the model")
        return
    layer.quant_state = layer.weight.quant_state = found
