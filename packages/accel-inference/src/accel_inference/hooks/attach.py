"""Hooks on the modules of a model, by a device for the model or for each block."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from accel_inference.hooks.align import AlignDevicesHook, DeviceLike, hooks_of
from accel_inference.hooks.hook import add_hook_to_module
from accel_inference.hooks.layerwise_casting import LayerwiseCastingHook
from accel_inference.module_tensors.access import TiedParams, set_module_tensor_to_device, uses_children_uncalled
from accel_inference.prefetch.weights_map import PrefixedDataset

Devices = DeviceLike | Mapping[str, DeviceLike] | None
SkipKeys = str | Sequence[str] | None


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: DeviceLike,
    skip_keys: SkipKeys = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Adds hooks that bring inputs to ``execution_device`` to the modules below that hold tensors and have no hook."""
    if not hasattr(module, "_hf_hook") and module.state_dict():
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if _is_preloaded(module, preload_module_classes):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(  # noqa: PLR0913  (the signature that users know)
    module: nn.Module,
    execution_device: DeviceLike | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: SkipKeys = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Adds an ``AlignDevicesHook`` to each module below that holds tensors of its own.

    A module of ``preload_module_classes`` gets one for all tensors below it, because it uses weights of its children
    without calling them. So does torch's ``MultiheadAttention``.
    """
    rest = {
        "weights_map": weights_map,
        "offload_buffers": offload_buffers,
        "skip_keys": skip_keys,
        "preload_module_classes": preload_module_classes,
        "tied_params_map": tied_params_map,
    }
    _align_below(module, module_name, execution_device, rest, offload=offload)


def _align_below(
    module: nn.Module,
    name: str,
    device: DeviceLike | None,
    rest: Mapping[str, Any],
    *,
    offload: bool,
    elsewhere: Collection[str] = (),
) -> None:
    """Does what ``attach_align_device_hook`` says, without the modules whose names are in ``elsewhere``."""
    preloaded = offload and _is_preloaded(module, rest["preload_module_classes"])
    own = any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    if own or preloaded:
        weights = rest["weights_map"]
        hook = AlignDevicesHook(
            device,
            offload=offload,
            weights_map=None if weights is None else PrefixedDataset(weights, f"{name}." if name else ""),
            offload_buffers=rest["offload_buffers"],
            place_submodules=preloaded,
            skip_keys=rest["skip_keys"],
            tied_params_map=rest["tied_params_map"],
        )
        _append(module, hook)
    if preloaded:
        return
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if full not in elsewhere:
            _align_below(child, full, device, rest, offload=offload, elsewhere=elsewhere)


def attach_align_device_hook_on_blocks(  # noqa: PLR0913  (the signature that users know)
    module: nn.Module,
    execution_device: Devices = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: SkipKeys = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Adds hooks to the blocks that the mappings ``execution_device`` and ``offload`` name.

    The model itself gets a hook that returns outputs to the device of its inputs. Single values stand for the model.
    """
    devices: Mapping[str, DeviceLike]
    if isinstance(execution_device, Mapping):
        devices = execution_device
    else:
        devices = {} if execution_device is None else {module_name: execution_device}
    offloads = offload if isinstance(offload, Mapping) else dict.fromkeys([*devices, module_name], offload)
    rest: dict[str, Any] = {
        "weights_map": weights_map,
        "offload_buffers": offload_buffers,
        "skip_keys": skip_keys,
        "preload_module_classes": preload_module_classes,
        "tied_params_map": tied_params_map,
    }
    _attach_below(module, module_name, devices, offloads, rest, root=module_name)
    if any(offloads.values()):
        for hook in hooks_of(module):
            hook.checks_weights = hook.io_same_device


def _attach_below(
    module: nn.Module,
    name: str,
    devices: Mapping[str, DeviceLike],
    offloads: Mapping[str, bool],
    rest: Mapping[str, Any],
    *,
    root: str,
) -> None:
    common = {key: rest[key] for key in ("skip_keys", "tied_params_map")}
    device = devices.get(name)
    is_root = name == root
    if device is not None and not offloads.get(name, False):
        hook = AlignDevicesHook(device, io_same_device=is_root, place_submodules=True, **common)
        _replace(module, hook)
        attach_execution_device_hook(module, device, preload_module_classes=rest["preload_module_classes"], **common)
    elif device is not None:
        _align_below(module, name, device, rest, offload=True, elsewhere=devices)
        if not hasattr(module, "_hf_hook"):
            add_hook_to_module(module, AlignDevicesHook(device, io_same_device=is_root, skip_keys=rest["skip_keys"]))
        elif is_root:
            add_hook_to_module(module, AlignDevicesHook(io_same_device=True, skip_keys=rest["skip_keys"]), append=True)
        attach_execution_device_hook(module, device, preload_module_classes=rest["preload_module_classes"], **common)
    elif is_root:
        _replace(module, AlignDevicesHook(io_same_device=True, skip_keys=rest["skip_keys"]))
    if device is None:
        _place_tensors(module, name, devices, rest)
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        _attach_below(child, full, devices, offloads, rest, root=root)


def _replace(module: nn.Module, hook: AlignDevicesHook) -> None:
    """Adds a hook in the place of one that an earlier dispatch added, or after one of the user's."""
    present = getattr(module, "_hf_hook", None)
    add_hook_to_module(module, hook, append=present is not None and not isinstance(present, AlignDevicesHook))


def _append(module: nn.Module, hook: AlignDevicesHook) -> None:
    """Adds a hook after the present one, or before it if that casts the weights, which must be there then."""
    present: Any = getattr(module, "_hf_hook", None)
    if not isinstance(present, LayerwiseCastingHook):
        add_hook_to_module(module, hook, append=True)
        return
    add_hook_to_module(module, hook)
    add_hook_to_module(module, present, append=True)


def _place_tensors(module: nn.Module, name: str, devices: Mapping[str, DeviceLike], rest: Mapping[str, Any]) -> None:
    """Places a module's own tensors that the map names; they stay there, offloaded or not."""
    for leaf, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        full = f"{name}.{leaf}" if name else leaf
        if full in devices:
            value = rest["weights_map"][full] if tensor.is_meta and rest["weights_map"] is not None else None
            ties = rest["tied_params_map"]
            set_module_tensor_to_device(module, leaf, devices[full], value=value, tied_params_map=ties)


def _is_preloaded(module: nn.Module, classes: Sequence[str] | None) -> bool:
    return uses_children_uncalled(module) or (classes is not None and type(module).__name__ in classes)
