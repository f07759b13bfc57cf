"""Models loaded with quantized weights, from a checkpoint in full precision or one of the quantized model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn

from accel_inference.dispatch.dispatch import dispatch_model
from accel_inference.dispatch.load import AUTOMATIC
from accel_inference.hooks.align import DeviceLike
from accel_inference.module_tensors.access import is_below, set_module_tensor_to_device
from accel_inference.module_tensors.ties import device_of, find_tied_parameters, retie_parameters
from accel_inference.placement.auto_map import infer_auto_device_map
from accel_inference.placement.budgets import HOST_DEVICES, DeviceName, get_balanced_memory
from accel_inference.quantization.ao_layers import TorchAOQuantizer
from accel_inference.quantization.bnb_layers import BnbQuantizer
from accel_inference.quantization.config import BnbQuantizationConfig, QuantizationConfig
from accel_inference.quantization.quantizer import Quantizer
from accel_inference.quantization.selection import quantized_modules
from accel_inference.weights.checkpoint_files import PathLike, checkpoint_weights
from accel_inference.weights.loading import emptied_after_an_error, load_weights, missing_weights
from accel_inference.weights.reading import read_in_order, read_in_turn
from accel_inference.weights.sources import Weight
from accel_state.device.memory import trim_host_memory
from accel_state.errors import CheckpointMismatchError

_LOG = getLogger(__name__)
DeviceMap = Mapping[str, DeviceLike]
_BETWEEN_TRIMS = 2**24
"""Bytes of weights in full precision after which the host memory of the library's temporary tensors is returned."""


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: QuantizationConfig,
    weights_location: PathLike | None = None,
    device_map: str | DeviceMap | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    max_memory: Mapping[DeviceName, int | str] | None = None,
    offload_folder: PathLike | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Quantizes the Linear modules of a model, in place, and loads their weights one by one from ``weights_location``.

    A weight in full precision exists only while it is quantized. A checkpoint of the quantized model (its state dict)
    is loaded as it is. Without ``weights_location`` the weights that the model has are quantized. Modules of a map
    with accelerators that are on "cpu" or "disk" keep their precision; so do those that the configuration skips.

    Raises:
        RuntimeError: the model is on the meta device and there is no ``weights_location``.
        ValueError: the map has modules without a device, or an automatic map would offload modules.
        CheckpointMismatchError: the checkpoint lacks weights, or has them in another shape.
        ImportError: the library of the configuration is not installed.
    """
    config = bnb_quantization_config
    quantizer = _quantizer(config)
    offloaded: dict[str, Any] | None = None
    places = _places(model, config, device_map, max_memory, no_split_module_classes)
    chosen = {name: one for name, one in quantized_modules(model, config, places).items() if quantizer.takes(one)}
    if weights_location is None:
        _refuse_empty(model)
        _quantize_loaded(model, quantizer, chosen, config, places)
    else:
        sources = checkpoint_weights(weights_location)
        with _unchanged_after_an_error(model, chosen, sources):
            layers = {name: _replaced(model, name, quantizer.layer(linear)) for name, linear in chosen.items()}
            offloaded = _load(model, quantizer, layers, sources, config, places, offload_folder)
            if missing := missing_weights(model, offloaded):
                raise CheckpointMismatchError(
                    f"{weights_location} lacks weights of the model: {', '.join(missing[:8])}"
                )
    if isinstance(config, BnbQuantizationConfig):
        flags: Any = model
        flags.is_loaded_in_8bit, flags.is_loaded_in_4bit = config.load_in_8bit, config.load_in_4bit
    devices = set() if places is None else {str(device) for device in places.values()}
    if places is not None and (len(devices) > 1 or "disk" in devices):
        return dispatch_model(model, places, offload_dir=offload_folder, offload_index=offloaded)
    if places is not None:
        _place_rest(model, places)
        model.hf_device_map = dict(places)  # type: ignore[assignment]
    return model


def _place_rest(model: nn.Module, places: DeviceMap) -> None:
    """Moves to their device what is no quantized weight: weights that the model had, buffers that no checkpoint has."""
    ties = find_tied_parameters(model)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        if not tensor.is_meta and (device := device_of(name, places)) is not None:
            set_module_tensor_to_device(model, name, device)
    retie_parameters(model, ties)


@contextmanager
def _unchanged_after_an_error(
    model: nn.Module, chosen: Mapping[str, nn.Linear], sources: Mapping[str, Weight]
) -> Iterator[None]:
    """After an error inside, the chosen modules are in their places again, with the weights that they had.

    Of other weights only those are there that had no memory before, see ``emptied_after_an_error``.
    """
    weights = {name: linear.weight for name, linear in chosen.items()}
    tensors = {*(name for name, _ in model.named_parameters()), *(name for name, _ in model.named_buffers())}
    others = sorted(tensors.intersection(sources).difference(f"{name}.weight" for name in chosen))
    with emptied_after_an_error(model, others):
        try:
            yield
        except BaseException:
            for name, linear in chosen.items():
                linear.weight = weights[name]
                _replaced(model, name, linear)
            raise


def _quantizer(config: QuantizationConfig) -> Quantizer:
    return BnbQuantizer(config) if isinstance(config, BnbQuantizationConfig) else TorchAOQuantizer(config)


def _places(
    model: nn.Module,
    config: QuantizationConfig,
    device_map: str | DeviceMap | None,
    max_memory: Mapping[DeviceName, int | str] | None,
    unsplittable: str | Sequence[str] | None,
) -> DeviceMap | None:
    """The map with which the model is loaded: the one given, or one that an automatic word means."""
    if not isinstance(device_map, str):
        return device_map
    if device_map not in AUTOMATIC:
        raise ValueError(
            "If passing a string for `device_map`, please choose 'auto', 'balanced', 'balanced_low_0' or 'sequential'; "
            f"got {device_map!r}"
        )
    target: Any = config.target_dtype
    whole = {
        name: config.torch_dtype or torch.float16
        for name, _ in model.named_parameters()
        if name.rpartition(".")[0] not in quantized_modules(model, config, None)
    }
    if device_map != "sequential":
        low = device_map == "balanced_low_0"
        max_memory = get_balanced_memory(model, max_memory, unsplittable, target, whole, low_zero=low)
    found: Any = infer_auto_device_map(model, max_memory, unsplittable, target, whole)
    on_accelerators = {str(device) for device in found.values()}.difference(HOST_DEVICES)
    if "disk" in found.values() or (on_accelerators and "cpu" in found.values()):
        places = ", ".join(name for name, device in found.items() if device in HOST_DEVICES)
        raise ValueError(
            f"Some modules are dispatched on the CPU or the disk: {places}. Make sure you have enough memory for the "
            "quantized model, or pass a custom `device_map`, whose offloaded modules keep their precision"
        )
    return {name: device for name, device in found.items()}


def _refuse_empty(model: nn.Module) -> None:
    empty = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if empty is not None:
        raise RuntimeError(
            f"{empty} is on the meta device: the model weights are not loaded, so `weights_location` is needed"
        )


def _quantize_loaded(
    model: nn.Module,
    quantizer: Quantizer,
    chosen: Mapping[str, nn.Linear],
    config: QuantizationConfig,
    places: DeviceMap | None,
) -> None:
    _LOG.warning("the model is loaded in full precision already; an empty model and `weights_location` take less")
    in_fp32 = config.keep_in_fp32_modules or ()
    for name, linear in chosen.items():
        value, device = linear.weight.detach(), _device(name, places, linear.weight)
        layer = _replaced(model, name, quantizer.layer(linear))
        layer.weight = quantizer.weight(layer, value, device)
    for name, parameter in model.named_parameters():
        if name.removesuffix(".weight") not in chosen and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if is_below(name, in_fp32) else config.torch_dtype)


def _load(
    model: nn.Module,
    quantizer: Quantizer,
    layers: Mapping[str, nn.Module],
    sources: Mapping[str, Weight],
    config: QuantizationConfig,
    places: DeviceMap | None,
    offload_folder: PathLike | None,
) -> dict[str, Any]:
    """Loads the weights of quantized layers after the others; returns the entries of what is on disk."""
    beside = {name: quantizer.saved_names(name, sources) for name in layers}
    own = {f"{name}.weight": sources[f"{name}.weight"] for name in layers if f"{name}.weight" in sources}
    taken = {*own, *(one for names in beside.values() for one in names)}
    rest = {name: source for name, source in sources.items() if name not in taken}
    _check_shapes(layers, own, beside)
    offloaded = load_weights(
        model,
        rest,
        device_map=places,
        offload_folder=offload_folder,
        dtype=config.torch_dtype,
        keep_in_fp32_modules=config.keep_in_fp32_modules,
        besides=own,
    )
    full = {name: source for name, source in own.items() if not beside[name.removesuffix(".weight")]}
    kept = {name: source for name, source in own.items() if name not in full}
    done = 0
    for (name, source), value in zip(full.items(), read_in_turn(full.values()), strict=True):
        layer, device = _layer_of(name, layers, places, value)
        plain = type(value) is Tensor  # otherwise a tensor of torchao, from a state dict
        layer.weight = quantizer.weight(layer, value, device) if plain else quantizer.restored(layer, value, {}, device)
        if (done := done + source.nbytes) >= _BETWEEN_TRIMS:
            done = 0
            trim_host_memory()
    trim_host_memory()
    for name, value in zip(kept, read_in_order(kept.values()), strict=True):
        module = name.removesuffix(".weight")
        layer, device = _layer_of(name, layers, places, value)
        saved = {one.removeprefix(f"{module}."): sources[one].read() for one in beside[module]}
        layer.weight = quantizer.restored(layer, value, saved, device)
    return offloaded


def _layer_of(
    weight: str, layers: Mapping[str, nn.Module], places: DeviceMap | None, value: Tensor
) -> tuple[nn.Module, torch.device]:
    module = weight.removesuffix(".weight")
    return layers[module], _device(module, places, value)


def _check_shapes(
    layers: Mapping[str, nn.Module], own: Mapping[str, Weight], beside: Mapping[str, Sequence[str]]
) -> None:
    for name, source in own.items():
        module = name.removesuffix(".weight")
        expected: Any = layers[module].weight.shape
        if not beside[module] and tuple(source.shape) != tuple(expected):
            raise CheckpointMismatchError(
                f"shapes do not match, nothing was loaded: {name} is {list(source.shape)} in the checkpoint and "
                f"{list(expected)} in the model"
            )


def _device(module: str, places: DeviceMap | None, value: Tensor) -> torch.device:
    found = None if places is None else device_of(module, places)
    if found is not None:
        return torch.device(found)
    return torch.device("cpu") if value.is_meta else value.device


def _replaced(model: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)
    return layer
