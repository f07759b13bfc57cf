"""Offload of all weights of a model: to host memory, to a folder, or in turns with other models."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from accel_inference.dispatch.moves import guard_moves
from accel_inference.hooks.align import AlignDevicesHook, DeviceLike
from accel_inference.hooks.attach import attach_align_device_hook
from accel_inference.hooks.hook import add_hook_to_module
from accel_inference.hooks.turns import CpuOffload, UserCpuOffloadHook
from accel_inference.module_tensors.access import persistent_buffers, saved_tensors
from accel_inference.module_tensors.devices import check_devices
from accel_inference.module_tensors.ties import find_tied_parameters, retie_parameters
from accel_inference.prefetch.weights_map import OffloadedWeightsLoader
from accel_inference.weights.checkpoint_files import PathLike
from accel_inference.weights.offload_folder import offload_state_dict, read_offload_index


def cpu_offload(
    model: nn.Module,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    *,
    resident_bytes: int | None = None,
) -> nn.Module:
    """Keeps all weights in host memory, and each on ``execution_device`` only while its module computes.

    ``execution_device`` defaults to that of the first parameter, ``state_dict`` (weights in host memory) to the
    model's own, ``resident_bytes`` to what ``Prefetcher`` says.

    Raises:
        CheckpointMismatchError: a weight is neither in the state dict nor in memory, or has another shape.
    """
    if state_dict is None:
        held = {name: tensor for name, tensor in saved_tensors(model).items() if not tensor.is_meta}
        state_dict = {name: tensor.detach().cpu() for name, tensor in held.items()}
    weights = OffloadedWeightsLoader(state_dict=state_dict, resident_bytes=resident_bytes)
    return _offload_all(model, weights, execution_device, offload_buffers, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: PathLike,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
    *,
    resident_bytes: int | None = None,
) -> nn.Module:
    """Keeps all weights in a folder, and each on ``execution_device`` only while its module computes.

    The weights that the model has are written to ``offload_dir`` unless they are there already; those of tensors on the
    meta device must be there. ``execution_device`` defaults to that of the first parameter, ``resident_bytes`` to what
    ``Prefetcher`` says.

    Raises:
        CheckpointMismatchError: the folder has weights of another model, or lacks some.
        CheckpointError: a file cannot be written.
    """
    resident = {} if offload_buffers else dict(model.named_buffers(remove_duplicate=False))
    held = {name: one for name, one in saved_tensors(model).items() if not one.is_meta and name not in resident}
    index = {**read_offload_index(offload_dir), **offload_state_dict(offload_dir, held)}
    weights = OffloadedWeightsLoader(save_folder=offload_dir, index=index, resident_bytes=resident_bytes)
    return _offload_all(model, weights, execution_device, offload_buffers, preload_module_classes)


def _offload_all(
    model: nn.Module,
    weights: OffloadedWeightsLoader,
    execution_device: DeviceLike | None,
    offload_buffers: bool,
    preload_module_classes: Sequence[str] | None,
) -> nn.Module:
    first = next(model.parameters(), None)
    if execution_device is None:
        execution_device = torch.device("cpu") if first is None or first.is_meta else first.device
    check_devices({"": execution_device})
    ties = find_tied_parameters(model)
    weights.tie(ties)
    buffers = {name: one for name, one in persistent_buffers(model) if offload_buffers or one.is_meta}
    weights.check({**dict(model.named_parameters(remove_duplicate=False)), **buffers})
    root = AlignDevicesHook(io_same_device=True)
    root.checks_weights = True
    add_hook_to_module(model, root, append=True)
    attach_align_device_hook(
        model,
        execution_device=execution_device,
        offload=True,
        weights_map=weights,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )
    retie_parameters(model, ties)
    guard_moves(model)
    return model


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: DeviceLike | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Moves a model to ``execution_device`` for its forward and leaves it there until the next model's.

    For pipelines of models that compute one after the other: each gets the hook of the one before as
    ``prev_module_hook``. The hook that is returned moves the model away (``offload()``) or is removed (``remove()``).
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
