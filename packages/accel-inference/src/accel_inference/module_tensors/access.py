"""Reading and replacing the tensors of a module by name."""

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from accel_inference.module_tensors.dtypes import proper_dtype
from accel_state.device.memory import clear_device_cache
from accel_state.pytree.composite import is_composite

TiedParams = MutableMapping[int, MutableMapping[torch.device, Tensor]]
"""For the memory address of a tied tensor: its copies by device."""


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a module by name, then its buffers; a tied parameter comes once, under its first name."""
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    dropped = get_non_persistent_buffers(module, recurse=recurse, fqns=True) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in dropped:
            yield name, buffer


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of the model's state dict; extra state of a module may be anything else."""
    return {name: one for name, one in model.state_dict().items() if isinstance(one, Tensor)}


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Names of buffers that are not in the state dict; with ``fqns``, full names."""
    found = set()
    for prefix, part in module.named_modules(remove_duplicate=False) if recurse else (("", module),):
        for name in part._non_persistent_buffers_set:
            found.add(f"{prefix}.{name}" if fqns and prefix else name)
    return found


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers of a module and those below that are in its state dict, by full name."""
    dropped = get_non_persistent_buffers(module, recurse=True, fqns=True)
    yield from ((name, one) for name, one in module.named_buffers(remove_duplicate=False) if name not in dropped)


def owner_of(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """The submodule that holds a tensor, and the tensor's name in it.

    Raises:
        ValueError: there is no such submodule, or no such tensor in it.
    """
    path, _, leaf = tensor_name.rpartition(".")
    owner = module
    for part in path.split(".") if path else ():
        child = getattr(owner, part, None)
        if not isinstance(child, nn.Module):
            raise ValueError(f"{owner.__class__.__name__} has no attribute {part}; looked for {tensor_name!r}")
        owner = child
    if leaf not in owner._parameters and leaf not in owner._buffers:
        known = [*owner._parameters, *owner._buffers]
        raise ValueError(
            f"{owner.__class__.__name__} does not have a parameter or a buffer named {leaf}; it has: "
            f"{', '.join(known) or 'none'}"
        )
    return owner, leaf


def uses_children_uncalled(module: nn.Module) -> bool:
    """Whether a module of torch's own computes with weights of its children without calling these."""
    return isinstance(module, nn.MultiheadAttention)  # with ``out_proj.weight``


def is_below(name: str, modules: Iterable[str]) -> bool:
    """Whether one of ``modules`` is a part of a dotted name."""
    return any(f".{module}." in f".{name}." for module in modules)


def place(owner: nn.Module, leaf: str, tensor: Tensor, *, like: Tensor | None = None) -> None:
    """Puts ``tensor`` where a module has its parameter or buffer ``leaf``.

    A parameter becomes one again: of the class, with the attributes and the ``requires_grad`` of ``like``, which is the
    present one unless given.
    """
    if leaf in owner._buffers:
        owner._buffers[leaf] = tensor
        return
    owner._parameters[leaf] = as_parameter(tensor, like if like is not None else owner._parameters[leaf])


def as_parameter(tensor: Tensor, like: Tensor | None) -> nn.Parameter:
    """``tensor`` as a parameter of the class, with the attributes and the ``requires_grad`` of ``like``."""
    if isinstance(tensor, nn.Parameter) or like is None:
        return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
    requires_grad = like.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
    kind: Any = type(like)
    # A parameter made of a subclass of tensors is of that class, and of no class of parameters.
    if kind is nn.Parameter or not issubclass(kind, nn.Parameter) or is_composite(tensor):
        if type(tensor) is Tensor and not issubclass(kind, nn.Parameter):
            tensor = tensor.as_subclass(kind)
        made = nn.Parameter(tensor, requires_grad=requires_grad)
        # A composite tensor has its inner tensors there, too, which stay its own.
        made.__dict__.update({name: one for name, one in like.__dict__.items() if name not in made.__dict__})
        return made
    made = kind(tensor, requires_grad=requires_grad, **like.__dict__)
    return made  # type: ignore[no-any-return]


def set_module_tensor_to_device(  # noqa: PLR0913  (the signature that users know)
    module: nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: TiedParams | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Moves the tensor ``tensor_name`` ("layer.weight") of ``module`` to ``device``, or puts ``value`` there.

    ``value`` takes the dtype of the tensor that it replaces, or ``dtype``; integers keep theirs. With
    ``tied_params_map`` a tensor that was moved to the device before is not copied again.

    Raises:
        ValueError: there is no such tensor, it is on the meta device and no value is given, or the value has another
            shape.
    """
    if fp16_statistics is not None:
        raise ValueError("fp16_statistics belong to 8-bit weights of bitsandbytes, which are not loaded here")
    owner, leaf = owner_of(module, tensor_name)
    old = owner._parameters.get(leaf) if leaf in owner._parameters else owner._buffers[leaf]
    if old is None and value is None:
        return
    target = torch.device(device)
    if value is None and old is not None and old.is_meta and target.type != "meta":
        raise ValueError(f"{tensor_name} is on the meta device, we need a `value` to put in on {device}.")
    if value is not None and old is not None:
        if old.shape != value.shape and not hasattr(old, "quant_state"):
            raise ValueError(
                f'Trying to set a tensor of shape {value.shape} in "{leaf}" (which has shape {old.shape}), this looks '
                "incorrect."
            )
        if value.is_floating_point() or value.is_complex():
            value = value.to(proper_dtype(dtype) if dtype is not None else old.dtype)
    source = value if value is not None else old
    assert source is not None
    with torch.no_grad():
        new = _moved(source, target, tied_params_map, non_blocking)
    if new is old:
        return
    place(owner, leaf, new if new is not value or isinstance(new, nn.Parameter) else new.detach(), like=old)
    if clear_cache and target.type not in ("cpu", "meta"):
        clear_device_cache()


def _moved(source: Tensor, target: torch.device, ties: TiedParams | None, non_blocking: bool) -> Tensor:
    """``source`` on a device; the copy that is there already if the tensor is tied."""
    has_address = not source.is_meta and source.numel() > 0
    copies = ties.get(source.data_ptr()) if ties is not None and has_address else None
    if copies is not None and (there := copies.get(target)) is not None and there.shape == source.shape:
        return there
    moved = source if _on(source, target) else source.to(target, non_blocking=non_blocking)
    if copies is not None and target.type != "meta":
        copies[target] = moved
    return moved


def _on(tensor: Tensor, target: torch.device) -> bool:
    return tensor.device.type == target.type and (target.index is None or tensor.device.index == target.index)


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether two devices are one; "cuda" without an index is "cuda:0"."""
    return first_device.type == second_device.type and (first_device.index or 0) == (second_device.index or 0)


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Identity of the memory behind a tensor: device, address, bytes; equal for tensors that share it."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()
