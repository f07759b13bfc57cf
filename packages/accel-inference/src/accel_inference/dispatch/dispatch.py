"""Dispatch of a model's modules to the devices of a map."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_inference.dispatch.moves import guard_moves
from accel_inference.hooks.align import AlignDevicesHook, DeviceLike
from accel_inference.hooks.attach import attach_align_device_hook_on_blocks
from accel_inference.hooks.hook import add_hook_to_module
from accel_inference.module_tensors.access import TiedParams, saved_tensors
from accel_inference.module_tensors.devices import check_devices
from accel_inference.module_tensors.ties import (
    check_tied_parameters_on_same_device,
    device_of,
    find_tied_parameters,
    record_ties,
    retie_parameters,
)
from accel_inference.placement.budgets import HOST_DEVICES
from accel_inference.placement.device_map import check_device_map
from accel_inference.prefetch.weights_map import OffloadedWeightsLoader
from accel_inference.weights.checkpoint_files import PathLike
from accel_inference.weights.loading import missing_weights
from accel_inference.weights.offload_folder import offload_state_dict, read_offload_index
from accel_state.errors import CheckpointMismatchError

DeviceMap = Mapping[str, DeviceLike]


def dispatch_model(  # noqa: PLR0913  (the signature that users know)
    model: nn.Module,
    device_map: DeviceMap,
    main_device: DeviceLike | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: PathLike | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    *,
    resident_bytes: int | None = None,
) -> nn.Module:
    """Places the modules of a model by a map, so that calls to the model work as before.

    Modules on "cpu" (if the map has an accelerator) and "disk" compute on ``main_device``, the first accelerator of the
    map or else the CPU; their weights are there only while they do, and the next ones are read meanwhile. Offloaded
    weights come from ``state_dict`` or ``offload_index``, or else from the model, and what is on disk is written to
    ``offload_dir``; what has no memory in the model is read from there. ``resident_bytes`` bounds the offloaded weights
    that are in memory at a time (default: see ``Prefetcher``).

    A map with one device moves the model there, without hooks unless ``force_hooks``. The map becomes
    ``model.hf_device_map``.

    Raises:
        ValueError: the map lacks a module, has "disk" without a place for weights, or a device that this machine lacks.
        CheckpointMismatchError: a tensor without memory has no offloaded weight, or one of another shape; or
            ``offload_dir`` has weights of another model.
    """
    check_device_map(model, device_map)
    check_devices(device_map if main_device is None else {**device_map, "main_device": main_device})
    places = {str(device) for device in device_map.values()}
    if len(places) <= 1 and "disk" not in places and not force_hooks:
        model.to(next(iter(device_map.values())))
        _align_encoder(model)
    else:
        main = main_device if main_device is not None else main_device_of(device_map)
        offloaded = ("disk",) if torch.device(main).type in ("cpu", "mps") else HOST_DEVICES
        weights = _offloaded_weights(
            model,
            device_map,
            offloaded,
            state_dict,
            offload_dir,
            offload_index,
            offload_buffers=offload_buffers,
            resident_bytes=resident_bytes,
        )
        _attach(model, device_map, main, offloaded, weights, offload_buffers, skip_keys, preload_module_classes)
        if len(places) > 1 or "disk" in places:
            guard_moves(model)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _align_encoder(model: nn.Module) -> None:
    """Attaches a device hook to the encoder of an encoder-decoder model that has none.

    Otherwise ``generate`` of transformers imports Accelerate for such a hook, if the model has a ``hf_device_map``.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        encoder = model.get_encoder()  # type: ignore[operator]
        if not hasattr(encoder, "_hf_hook"):
            add_hook_to_module(encoder, AlignDevicesHook(io_same_device=True))


def main_device_of(device_map: DeviceMap) -> DeviceLike:
    """Where offloaded modules compute: the first accelerator of the map, or else the CPU."""
    return next((device for device in device_map.values() if str(device) not in HOST_DEVICES), "cpu")


def _attach(
    model: nn.Module,
    device_map: DeviceMap,
    main: DeviceLike,
    offloaded: Sequence[str],
    weights: OffloadedWeightsLoader | None,
    offload_buffers: bool,
    skip_keys: str | Sequence[str] | None,
    preload_module_classes: Sequence[str] | None,
) -> None:
    ties = find_tied_parameters(model)
    check_tied_parameters_on_same_device(ties, device_map)
    copies: TiedParams = {
        model.get_parameter(name).data_ptr(): {}
        for group in ties
        for name in group
        if not model.get_parameter(name).is_meta
    }
    is_offloaded = {name: str(device) in offloaded for name, device in device_map.items()}
    attach_align_device_hook_on_blocks(
        model,
        execution_device={name: main if is_offloaded[name] else device for name, device in device_map.items()},
        offload=is_offloaded,
        weights_map=weights,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        tied_params_map=copies,
    )
    apart = []
    for group in ties:
        by_device: dict[str, list[str]] = {}
        for name in group:
            by_device.setdefault(str(device_of(name, device_map)), []).append(name)
        retie_parameters(model, by_device.values())
        apart += [group] if len(by_device) > 1 else []
    record_ties(model, apart)


def _offloaded_weights(
    model: nn.Module,
    device_map: DeviceMap,
    offloaded: Sequence[str],
    state_dict: Mapping[str, Tensor] | None,
    offload_dir: PathLike | None,
    offload_index: Mapping[str, Any] | None,
    *,
    offload_buffers: bool,
    resident_bytes: int | None,
) -> OffloadedWeightsLoader | None:
    """The weights of the modules that are offloaded; None if no module is.

    A buffer that is not offloaded stays in the model, where it changes; one on the meta device has to be loaded.
    """
    resident = {} if offload_buffers else dict(model.named_buffers(remove_duplicate=False))
    wanted = {
        name: (tensor, str(device))
        for name, tensor in saved_tensors(model).items()
        if (tensor.is_meta or name not in resident)
        and (device := device_of(name, device_map)) is not None
        and str(device) in offloaded
    }
    if not any(str(device) in offloaded for device in device_map.values()):
        return None
    on_disk = {name: tensor for name, (tensor, device) in wanted.items() if device == "disk"}
    if on_disk and offload_dir is None and offload_index is None and not set(on_disk) <= set(state_dict or ()):
        raise ValueError(
            "We need an `offload_dir` to dispatch this model according to this `device_map`, the following submodules "
            f"need to be offloaded: {', '.join(name for name, device in device_map.items() if str(device) == 'disk')}."
        )
    index = dict(offload_index) if offload_index is not None else read_offload_index(offload_dir) if offload_dir else {}
    host = dict(state_dict or {})
    given = {*host, *(offload_index or ())}
    held = {name: tensor for name, (tensor, _) in wanted.items() if name not in given and not tensor.is_meta}
    if offload_dir is not None and (written := {name: held[name] for name in held if name in on_disk}):
        index |= offload_state_dict(offload_dir, written)
    host |= {name: tensor.detach().cpu() for name, tensor in held.items() if name not in on_disk}
    if missing := [name for name in missing_weights(model, {**host, **index}) if name in wanted]:
        raise CheckpointMismatchError(
            f"{', '.join(missing[:8])} have no memory and no offloaded weight; load the checkpoint into the model "
            "first, or, if it is offloaded already, call remove_hook_from_submodules, which brings its weights back"
        )
    weights = OffloadedWeightsLoader(host, offload_dir, index, resident_bytes=resident_bytes)
    weights.tie(find_tied_parameters(model))
    weights.check({name: tensor for name, (tensor, _) in wanted.items()})
    return weights
