"""State of modules whose weights are offloaded."""

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from accel_inference.hooks.align import AlignDevicesHook, DeviceLike, hooks_of
from accel_inference.module_tensors.access import owner_of, set_module_tensor_to_device


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a module's own hook offloads its weights."""
    return any(hook.offload for hook in hooks_of(module))


@contextmanager
def align_module_device(module: nn.Module, execution_device: DeviceLike | None = None) -> Iterator[None]:
    """A module's own parameters are on ``execution_device`` inside, onloaded if they are offloaded.

    Changes that are made inside to offloaded weights in host memory stay; those to weights on disk do not. Without a
    device, offloaded weights go where the module computes, and others stay where they are.
    """
    offloading = next((hook for hook in hooks_of(module) if hook.offload), None)
    if offloading is not None:
        before = offloading.execution_device
        if execution_device is not None:
            offloading.execution_device = execution_device
        try:
            offloading.pre_forward(module)
            yield
            offloading.post_forward(module, None)
        except BaseException:
            offloading.failed_forward(module)
            raise
        finally:
            offloading.execution_device = before
    elif execution_device is not None:
        devices = {name: parameter.device for name, parameter in module.named_parameters(recurse=False)}
        for name in devices:
            set_module_tensor_to_device(module, name, execution_device)
        try:
            yield
        finally:
            for name, device in devices.items():
                set_module_tensor_to_device(module, name, device)
    else:
        yield


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model in host memory, its offloaded weights included; tied names share their tensor.

    Raises:
        MemoryError: the weights of a module do not fit into host memory.
    """
    found: dict[str, Tensor] = {}
    read: dict[int, Tensor] = {}
    kept = set(model.state_dict())
    for name, module in model.named_modules(remove_duplicate=False):
        offloading = [hook for hook in hooks_of(module) if hook.offload and hook.weights_map is not None]
        for hook in offloading:
            found.update(_offloaded(hook, module, name, kept, read))
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for leaf, tensor in own:
            full = f"{name}.{leaf}" if name else leaf
            if full in kept and full not in found and not tensor.is_meta:
                found[full] = tensor.detach().cpu()
    if missing := [name for name in kept if name not in found and model.state_dict()[name].is_meta]:
        raise RuntimeError(f"these tensors are on the meta device and not offloaded: {', '.join(sorted(missing)[:8])}")
    return found


def _offloaded(
    hook: AlignDevicesHook, module: nn.Module, module_name: str, kept: set[str], read: dict[int, Tensor]
) -> dict[str, Tensor]:
    """The offloaded weights of a module among the names ``kept``; ``read`` has those of placeholders read before."""
    weights: Mapping[str, Tensor] = {} if hook.weights_map is None else hook.weights_map
    found = {}
    for leaf in hook.original_devices:
        full = f"{module_name}.{leaf}" if module_name else leaf
        owner, own = owner_of(module, leaf)
        placeholder = owner._parameters[own] if own in owner._parameters else owner._buffers[own]
        if full in kept and leaf in weights and placeholder is not None and placeholder.is_meta:
            try:
                if id(placeholder) not in read:
                    read[id(placeholder)] = weights[leaf].cpu()
                found[full] = read[id(placeholder)]
            except (MemoryError, torch.OutOfMemoryError) as error:
                raise MemoryError(f"{full} does not fit into host memory: {error}") from error
    return found


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: MutableMapping[str, str | Tensor],
    device_to_put_offload: DeviceLike = "cpu",
) -> MutableMapping[str, str | Tensor]:
    """Puts the offloaded weights of the module that holds the tensor ``module_name`` into ``state_dict``."""
    prefix = module_name.rpartition(".")[0]
    names = [name for name in state_dict if name.rpartition(".")[0] == prefix]
    if not has_offloaded_params(module):
        raise ValueError(f"the weights of {prefix or 'the model'} are not offloaded")
    with align_module_device(module, device_to_put_offload), torch.no_grad():
        own = module.state_dict()
        for name in names:
            state_dict[name] = own[name.rpartition(".")[2]].detach().clone().to(device_to_put_offload)
    return state_dict
