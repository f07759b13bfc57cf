"""Selection of the modules of a model that are quantized."""

from collections.abc import Mapping, Sequence

from torch import nn

from accel_inference.module_tensors.access import is_below
from accel_inference.module_tensors.ties import device_of, find_tied_parameters
from accel_inference.placement.budgets import HOST_DEVICES
from accel_inference.quantization.config import QuantizationConfig


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Names of modules that keep their precision by default: those with tied weights, and the head.

    A model of which no weight is tied has a head only if transformers says that it has a base model.
    """
    tied = [name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group]
    base = getattr(model, "base_model_prefix", "")
    children = [name for name, _ in model.named_children()]
    has_head = bool(tied) or (bool(base) and base in children)
    return sorted({*tied, *(children[-1:] if has_head else ())})


def quantized_modules(
    model: nn.Module, config: QuantizationConfig, device_map: Mapping[str, object] | None
) -> dict[str, nn.Linear]:
    """Linear modules by name that the configuration quantizes; those that are offloaded keep their precision."""
    skipped = get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules
    skipped = [*skipped, *(config.keep_in_fp32_modules or ())]
    offloaded = _offloaded_places(device_map)
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and name
        and not is_below(name, skipped)
        and (device_map is None or str(device_of(name, device_map)) not in offloaded)
    }


def _offloaded_places(device_map: Mapping[str, object] | None) -> Sequence[str]:
    computes_on_host = device_map is None or all(str(device) in HOST_DEVICES for device in device_map.values())
    return ("disk",) if computes_on_host else HOST_DEVICES
