"""State of modules whose weights are offloaded."""

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from accel_inference.hooks.align import DeviceLike, hooks_of
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
        MemoryError: a weight does not fit into host memory.
        RuntimeError: tensors are on the meta device and not offloaded.
    """
    sources = _offloaded(model)
    read: dict[int, Tensor] = {}
    found: dict[str, Tensor] = {}
    missing = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):  # what a module returns as its extra state
            found[name] = tensor
        elif tensor.is_meta and id(tensor) not in sources:
            missing.append(name)
        else:
            if id(tensor) not in read:
                read[id(tensor)] = _in_host_memory(name, tensor, sources)
            found[name] = read[id(tensor)]
    if missing:
        raise RuntimeError(f"these tensors are on the meta device and not offloaded: {', '.join(sorted(missing)[:8])}")
    return found


def _offloaded(model: nn.Module) -> dict[int, tuple[Mapping[str, Tensor], str]]:
    """Of each placeholder on the meta device, by ``id``: the weights map that has its value, and the name there."""
    found = {}
    for module in model.modules():
        for hook in hooks_of(module):
            weights: Mapping[str, Tensor] = {} if hook.weights_map is None or not hook.offload else hook.weights_map
            for leaf in hook.original_devices:
                owner, own = owner_of(module, leaf)
                placeholder = owner._parameters[own] if own in owner._parameters else owner._buffers[own]
                if placeholder is not None and placeholder.is_meta and leaf in weights:
                    found[id(placeholder)] = weights, leaf
    return found


def _in_host_memory(name: str, tensor: Tensor, sources: Mapping[int, tuple[Mapping[str, Tensor], str]]) -> Tensor:
    try:
        if tensor.is_meta:
            weights, leaf = sources[id(tensor)]
            return weights[leaf].cpu()
        return tensor.detach().cpu()
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise MemoryError(f"{name} does not fit into host memory: {error}") from error


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
