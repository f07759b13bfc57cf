"""Memory for inference by dtype: weights, KV cache, and where a device map would place them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from accel_inference.placement.auto_map import infer_auto_device_map
from accel_inference.placement.budgets import HOST_DEVICES, DeviceName, get_max_memory
from accel_inference.placement.sizes import compute_module_sizes
from accel_state.enums import CustomDtype
from accel_state.errors import ConfigError

_CACHE = "_kv_cache_of_the_estimate"
_CACHE_BYTES: Mapping[str, int] = {"float32": 4}
"""Bytes of a cached number by dtype of the weights: 2 unless they are float32, also if the weights are quantized."""
_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


@final
@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of a transformer's KV cache: what one layer keeps for one token is ``2 * num_heads * head_dim`` numbers."""

    num_layers: int
    num_heads: int
    head_dim: int

    def layer_bytes(self, batch_size: int, length: int, dtype: str) -> int:
        """Bytes of one layer's keys and values for that many sequences of that many tokens."""
        return 2 * self.num_heads * self.head_dim * batch_size * length * _CACHE_BYTES.get(dtype, 2)


@final
@dataclass(frozen=True, slots=True)
class InferenceOptions:
    """What is estimated: KV cache for a batch (none if ``length`` is 0), and placement in budgets if they are given."""

    batch_size: int = 1
    length: int = 0
    max_memory: Mapping[DeviceName, int | str] | None = None


def cache_shape(config: Any, model: str) -> CacheShape:
    """Sizes of the KV cache of a model with this configuration. Layers with a window count as layers without one.

    Raises:
        ConfigError: the configuration lacks a size, or describes layers with another kind of cache.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    other = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION)
    if getattr(text, "is_encoder_decoder", False):
        other = ["cross attention"]
    elif getattr(text, "kv_lora_rank", None):
        other = ["latent attention"]
    if other:
        raise ConfigError(f"{model} has layers with {other[0]}, whose cache cannot be estimated; leave out --length")
    heads = getattr(text, "num_attention_heads", None)
    hidden = getattr(text, "hidden_size", None)
    head_dim = getattr(text, "head_dim", None)
    if head_dim is None and isinstance(heads, int) and isinstance(hidden, int):
        head_dim = hidden // heads
    sizes = {
        "num_hidden_layers": getattr(text, "num_hidden_layers", None),
        "num_attention_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
    }
    for name, size in sizes.items():
        if not isinstance(size, int):
            raise ConfigError(
                f"the KV cache of {model} needs a configuration (model.config) with {name}, and it has {size!r} there; "
                "leave out --length for the weights alone"
            )
    return CacheShape(*(int(size) for size in sizes.values() if size is not None))


def estimate_inference(
    model: nn.Module, name: str, dtypes: Iterable[str], options: InferenceOptions
) -> list[dict[str, Any]]:
    """One row for each dtype: bytes of the weights and the KV cache, and with budgets the device map and its memory.

    The model may be on the meta device. Its floating-point parameters become float32, so that each dtype is exact.
    """
    shape = cache_shape(getattr(model, "config", None), name) if options.length else None
    model = model.to(torch.float32)
    rows: list[dict[str, Any]] = []
    for dtype in dtypes:
        layer = shape.layer_bytes(options.batch_size, options.length, dtype) if shape else 0
        cache = layer * shape.num_layers if shape else 0
        weights = compute_module_sizes(model, _loaded_as(dtype))[""]
        row: dict[str, Any] = {"dtype": dtype, "weights": weights, "kv_cache": cache, "total": weights + cache}
        if options.max_memory is not None:
            layers = _layer_names(model, shape.num_layers, name) if shape else []
            row |= place(model, dtype, options.max_memory, layers, layer)
        rows.append(row)
    return rows


def place(
    model: nn.Module, dtype: str, max_memory: Mapping[DeviceName, int | str], layers: Iterable[str], layer_cache: int
) -> dict[str, Any]:
    """Device map with each layer's KV cache beside its weights, and the bytes on each device.

    The layers of the host and the disk compute on the first accelerator, so their cache is there. ``fits`` says that
    no device needs more than its budget. A layer is not divided, because its cache belongs to its attention.

    Raises:
        ConfigError: a budget cannot be read.
    """
    try:
        budgets = get_max_memory(max_memory)
    except ValueError as error:
        raise ConfigError(f"--max-memory: {error}") from error
    sizes = compute_module_sizes(model, _loaded_as(dtype))
    names = list(layers)
    unsplittable = sorted({*(getattr(model, "_no_split_modules", None) or ()), *_classes(model, names)})
    first = next((device for device in budgets if device not in HOST_DEVICES), None)
    reserved = 0  # on the first accelerator, for the cache of offloaded layers; it only grows, so the search ends
    with _cache_buffers(model, names, layer_cache):
        while True:
            left = {device: max(size - reserved, 0) if device == first else size for device, size in budgets.items()}
            found = infer_auto_device_map(model, left, unsplittable, _loaded_as(dtype), offload_buffers=True)
            where = [_device_of(layer, found) for layer in names]
            offloaded = layer_cache * sum(device in HOST_DEVICES for device in where)
            if first is None or offloaded <= reserved:
                break
            reserved = offloaded
    cache = Counter(first if first is not None and device in HOST_DEVICES else device for device in where)
    weights: Counter[DeviceName] = Counter()
    for part, device in found.items():
        weights[device] += sizes[part]
    memory = {
        device: {"weights": weights[device], "kv_cache": cache[device] * layer_cache, "budget": budgets.get(device)}
        for device in dict.fromkeys([*budgets, *weights])
    }
    fits = all(
        int(held["weights"] or 0) + int(held["kv_cache"] or 0) <= budgets[device]
        for device, held in memory.items()
        if device in budgets and device != "disk"
    )
    return {"device_map": dict(found), "devices": memory, "fits": fits}


@contextmanager
def _cache_buffers(model: nn.Module, layers: Iterable[str], size: int) -> Iterator[None]:
    """Gives each layer a meta buffer of its cache's bytes, which the search for a map counts like a weight."""
    modules = [model.get_submodule(layer) for layer in layers] if size else []
    for module in modules:
        module.register_buffer(_CACHE, torch.empty(size, dtype=torch.uint8, device="meta"), persistent=False)
    try:
        yield
    finally:
        for module in modules:
            delattr(module, _CACHE)


def _classes(model: nn.Module, layers: Iterable[str]) -> set[str]:
    return {type(model.get_submodule(layer)).__name__ for layer in layers}


def _device_of(layer: str, device_map: Mapping[str, DeviceName]) -> DeviceName:
    return next(device for part, device in device_map.items() if not part or f"{layer}.".startswith(f"{part}."))


def _layer_names(model: nn.Module, num_layers: int, name: str) -> list[str]:
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return [f"{path}.{index}" if path else str(index) for index in range(num_layers)]
    raise ConfigError(f"{name} has no ModuleList of {num_layers} layers, so its KV cache cannot be placed")


def _loaded_as(dtype: str) -> str | CustomDtype:
    return CustomDtype.INT4 if dtype == "int4" else dtype
