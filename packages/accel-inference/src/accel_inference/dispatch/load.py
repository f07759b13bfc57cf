"""Checkpoints loaded and dispatched in one call."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from accel_inference.dispatch.dispatch import dispatch_model
from accel_inference.hooks.align import DeviceLike, hooks_of
from accel_inference.hooks.hook import REPLACED, remove_hook_from_module
from accel_inference.module_tensors.ties import forget_ties
from accel_inference.placement.auto_map import infer_auto_device_map
from accel_inference.placement.budgets import DeviceName, get_balanced_memory
from accel_inference.weights.checkpoint_files import PathLike, checkpoint_weights
from accel_inference.weights.loading import load_weights, missing_weights, refuse_sharded
from accel_state.errors import CheckpointMismatchError

AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def load_checkpoint_and_dispatch(  # noqa: PLR0913  (the signature that users know)
    model: nn.Module,
    checkpoint: PathLike,
    device_map: str | Mapping[str, DeviceLike] | None = None,
    max_memory: Mapping[DeviceName, int | str] | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    offload_folder: PathLike | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    resident_bytes: int | None = None,
    mapped: bool = False,
    activations: Mapping[str, int] | None = None,
) -> nn.Module:
    """Loads a checkpoint into a model (built under ``init_empty_weights``, say) and dispatches it by a map.

    ``device_map`` is a map or the way to infer one: "auto" and "balanced" use all accelerators evenly,
    "balanced_low_0" leaves device 0 as empty as it can, "sequential" fills them in turn. Without a map the model is
    loaded and returned without hooks. The hooks of an earlier dispatch end. For the other arguments see
    ``load_checkpoint_in_model``, ``infer_auto_device_map`` and ``dispatch_model``.

    ``activations`` is for an inferred map only.

    Raises:
        ValueError: ``device_map`` is another word, or lacks a module, or ``activations`` is given with a map.
        CheckpointMismatchError: the checkpoint lacks weights of the model.
    """
    if isinstance(device_map, str):
        device_map = automatic_map(
            model,
            device_map,
            max_memory=max_memory,
            no_split_module_classes=no_split_module_classes,
            dtype=dtype,
            offload_buffers=offload_buffers,
            activations=activations,
        )
    elif activations is not None:
        raise ValueError(
            f"activations are of use where a map is inferred, and device_map is {device_map!r}; give one of "
            f"{', '.join(AUTOMATIC)}"
        )
    refuse_sharded(broadcast_from_rank0 or not full_state_dict)
    offloaded = load_weights(
        model,
        checkpoint_weights(checkpoint),
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_buffers=offload_buffers,
        strict=strict,
        mapped=mapped,
    )
    if missing := missing_weights(model, offloaded):
        raise CheckpointMismatchError(f"{checkpoint} lacks weights of the model: {', '.join(missing[:8])}")
    _discard_dispatch(model)
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_index=offloaded,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        resident_bytes=resident_bytes,
    )


def _discard_dispatch(model: nn.Module) -> None:
    """Removes the hooks of an earlier dispatch without reading its weights, which others have replaced."""
    if not hasattr(model, "hf_device_map") and not any(hooks_of(module) for module in model.modules()):
        return
    for module in model.modules():
        remove_hook_from_module(module, detach=False)
        forget_ties(module)
        for name in REPLACED:
            module.__dict__.pop(name, None)
    model.__dict__.pop("hf_device_map", None)


def automatic_map(
    model: nn.Module,
    way: str,
    *,
    max_memory: Mapping[DeviceName, int | str] | None,
    no_split_module_classes: str | Sequence[str] | None,
    dtype: str | torch.dtype | None,
    offload_buffers: bool = False,
    activations: Mapping[str, int] | None = None,
) -> Mapping[str, DeviceName]:
    """The map that one of the words of ``AUTOMATIC`` means for a model."""
    if way not in AUTOMATIC:
        raise ValueError(
            "If passing a string for `device_map`, please choose 'auto', 'balanced', 'balanced_low_0' or 'sequential'; "
            f"got {way!r}"
        )
    if way != "sequential":
        max_memory = get_balanced_memory(
            model,
            max_memory,
            no_split_module_classes,
            dtype,
            low_zero=way == "balanced_low_0",
            activations=max((activations or {}).values(), default=0),
        )
    return infer_auto_device_map(
        model, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers, activations=activations
    )
