"""Hook that brings a module's weights and inputs to the device where it computes."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_inference.hooks.hook import ModelHook, SequentialHook
from accel_inference.module_tensors.access import (
    TiedParams,
    get_non_persistent_buffers,
    owner_of,
    place,
    set_module_tensor_to_device,
)
from accel_inference.prefetch.prefetcher import THREADS, Prefetcher
from accel_inference.prefetch.weights_map import OffloadedWeightsLoader, PrefixedDataset
from accel_state.errors import CheckpointMismatchError
from accel_state.private import untraced
from accel_state.pytree.operations import find_device, send_to_device

DeviceLike = int | str | torch.device


class AlignDevicesHook(ModelHook):
    """Brings a module's inputs to its execution device, and its weights there while it computes.

    Attributes:
        execution_device: where the module computes; None leaves inputs where they are.
        offload: whether the weights are on the meta device between forwards.
        io_same_device: whether outputs go to the device of the inputs.
        weights_map: offloaded weights by their name in the module; by default those that the module has now.
        offload_buffers: whether buffers are offloaded as well; others stay on the execution device.
        place_submodules: whether the hook is responsible for the tensors of submodules, too.
        skip_keys: keyword arguments that stay where they are.
        tied_params_map: copies of tied tensors by device, so that a device has one.
        checks_weights: whether each forward refuses parameters without values that no hook fills.
    """

    def __init__(
        self,
        execution_device: DeviceLike | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Sequence[str] | None = None,
        tied_params_map: TiedParams | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.checks_weights = False
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._placed: list[tuple[nn.Module, str, Tensor]] = []
        """Tensors that the weights replaced: module, name there, tensor on the meta device."""
        self._buffers: dict[tuple[int, str], Tensor] = {}
        """Offloaded buffers as they were read, by module and name; the forward has copies, which it may change."""
        self._block: tuple[Prefetcher, int] | None = None
        self._depth = 0
        """Forwards of the module that run now, one inside the other, and the thread that runs them."""
        self._thread: int | None = None

    def init_hook(self, module: nn.Module) -> nn.Module:
        if not self.offload:
            if self.execution_device is not None:
                for name, tensor in self._tensors(module, buffers=True):
                    if not tensor.is_meta:
                        self._move(module, name)
            return module
        offloaded = dict(self._tensors(module, buffers=self.offload_buffers))
        kept = get_non_persistent_buffers(module, recurse=self.place_submodules, fqns=True)
        self.original_devices = {name: tensor.device for name, tensor in self._tensors(module, buffers=True)}
        if self.weights_map is None:
            here = {name: tensor.detach().cpu() for name, tensor in offloaded.items() if name not in kept}
            self.weights_map = OffloadedWeightsLoader(state_dict=here)
        for name, tensor in self._tensors(module, buffers=True):
            if name in offloaded and name not in kept:
                set_module_tensor_to_device(module, name, "meta")
            elif not tensor.is_meta and self.execution_device is not None:
                self._move(module, name)
        self._register(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.checks_weights:
            _check_weights(module)
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload:
            self._onload(module)
        if self.execution_device is None:
            return args, kwargs
        moved: tuple[Any, ...] = send_to_device(args, self.execution_device)
        return moved, send_to_device(kwargs, self.execution_device, skip_keys=self.skip_keys)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self.offload:
            self._offload()
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def failed_forward(self, module: nn.Module) -> None:
        if self.offload:
            self._offload()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if self.offload and self.weights_map is not None:
            self._offload()
            here = dict(self._tensors(module, buffers=True))
            for name, device in self.original_devices.items():
                if device.type == "meta" or name not in here:
                    continue
                if not here[name].is_meta:  # a buffer that stayed, with the value that it has now
                    set_module_tensor_to_device(module, name, device)
                elif name in self.weights_map:
                    value = self.weights_map[name]
                    set_module_tensor_to_device(module, name, device, value=value, dtype=value.dtype)
        return module

    def _tensors(self, module: nn.Module, *, buffers: bool) -> Iterator[tuple[str, Tensor]]:
        """The tensors that the hook is responsible for, tied ones under each name."""
        yield from module.named_parameters(recurse=self.place_submodules, remove_duplicate=False)
        if buffers:
            yield from module.named_buffers(recurse=self.place_submodules, remove_duplicate=False)

    def _move(self, module: nn.Module, name: str) -> None:
        assert self.execution_device is not None
        set_module_tensor_to_device(module, name, self.execution_device, tied_params_map=self.tied_params_map)

    def _register(self, module: nn.Module) -> tuple[Prefetcher, int] | None:
        """Makes the module's weights a block of the prefetcher; None for a mapping of another kind, which has none."""
        dataset, prefix = _origin(self.weights_map)
        if not isinstance(dataset, OffloadedWeightsLoader):
            return None
        prefetcher = dataset.prefetcher(_device(self.execution_device))
        if self._block is None or self._block[0] is not prefetcher:
            names = self._offloaded_names(module)
            if lacking := [name for name in names if prefix + name not in dataset]:
                raise CheckpointMismatchError(
                    f"the offloaded weights lack {', '.join(prefix + name for name in lacking)} of a "
                    f"{type(module).__name__}; they have {', '.join(sorted(dataset)[:8])}, ..."
                )
            shapes = {name: tensor.shape for name, tensor in self._tensors(module, buffers=True)}
            sources = {name: dataset.source(prefix + name, shape=shapes[name]) for name in names}
            self._block = prefetcher, prefetcher.add(sources)
        return self._block

    def _offloaded_names(self, module: nn.Module) -> list[str]:
        kept = get_non_persistent_buffers(module, recurse=self.place_submodules, fqns=True)
        return [name for name, tensor in self._tensors(module, buffers=True) if tensor.is_meta and name not in kept]

    @untraced
    def _onload(self, module: nn.Module) -> None:
        here = threading.get_ident()
        if self._depth:
            if self._thread != here:
                raise RuntimeError(THREADS)
            self._depth += 1  # the module computes inside its own forward
            return
        if (block := self._register(module)) is not None:
            tensors = block[0].acquire(block[1])
        else:
            weights: Mapping[str, Tensor] = {} if self.weights_map is None else self.weights_map
            device = _device(self.execution_device)
            tensors = {name: weights[name].to(device) for name in self._offloaded_names(module)}
        self._depth, self._thread = 1, here
        for name, tensor in tensors.items():
            owner, leaf = owner_of(module, name)
            empty = owner._parameters.get(leaf) if leaf in owner._parameters else owner._buffers[leaf]
            assert empty is not None
            if not empty.is_meta:
                continue  # an earlier forward changed the buffer, or the user has put a value there
            self._placed.append((owner, leaf, empty))
            if leaf in owner._buffers:
                self._buffers[id(owner), leaf] = tensor
                with torch.inference_mode(False):
                    tensor = tensor.clone()
            place(owner, leaf, tensor.detach(), like=empty)
        if module._forward_pre_hooks and (early := _computed_early(module)):
            self._offload()
            raise RuntimeError(early)

    @untraced
    def _offload(self) -> None:
        """Puts the tensors without memory back, and ends the use of the weights.

        A buffer that the forward has changed stays in the module from now on: its value is in no file.
        """
        self._depth = max(self._depth - 1, 0)
        if self._depth or self._thread is None:
            return
        for owner, leaf, empty in self._placed:
            if leaf in owner._parameters:
                owner._parameters[leaf] = empty  # type: ignore[assignment]
            elif _same(owner._buffers.get(leaf), self._buffers[id(owner), leaf]):
                owner._buffers[leaf] = empty
        self._placed, self._thread = [], None
        self._buffers.clear()
        if self._block is not None:
            self._block[0].release(self._block[1])

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the block, which a copy registers with its own prefetcher."""
        return {**self.__dict__, "_block": None, "_placed": [], "_buffers": {}, "_depth": 0, "_thread": None}


def hooks_of(module: nn.Module) -> list[AlignDevicesHook]:
    """The hooks of a module that place its weights."""
    hook: Any = getattr(module, "_hf_hook", None)
    every = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return [each for each in every if isinstance(each, AlignDevicesHook)]


@untraced
def _check_weights(model: nn.Module) -> None:
    """Refuses parameters without values that no hook fills: torch computes with them from memory that nobody wrote.

    Raises:
        RuntimeError: names them.
    """
    if empty := _without_values(model):
        names = [name for name, one in model.named_parameters(remove_duplicate=False) if id(one) in empty]
        raise RuntimeError(
            f"{', '.join(names[:8])} have no values: their modules were added after the model was offloaded, on the "
            "meta device, where its weights are between forwards; nearest: add them, for example adapters of peft, "
            "before dispatch_model, cpu_offload or disk_offload"
        )


def _without_values(model: nn.Module) -> set[int]:
    """Ids of such parameters; in the fewest operations for each module, because each forward looks at all of them."""
    found: set[int] = set()
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None:
            continue
        if "_hf_hook" in module.__dict__:
            filled = [one for one in hooks_of(module) if one.offload or str(one.execution_device) == "meta"]
            if any([one.place_submodules for one in filled]):
                continue
        else:
            filled = []
        if not filled:
            found.update([id(one) for one in module._parameters.values() if one is not None and one.is_meta])
        if module._modules:
            waiting.extend(module._modules.values())
    return found


def _computed_early(module: nn.Module) -> str:
    """Returns an error text if a forward pre-hook has computed tensors from placeholders; otherwise ""."""
    names = [name for name, one in vars(module).items() if isinstance(one, Tensor) and one.is_meta]
    if not names:
        return ""
    hooks = ", ".join(getattr(one, "__name__", type(one).__name__) for one in module._forward_pre_hooks.values())
    return (
        f"{', '.join(names)} of a {type(module).__name__} has no values: a forward pre-hook ({hooks}) computes it from "
        "weights that are offloaded until then; nearest: torch.nn.utils.parametrizations.weight_norm in place of "
        "torch.nn.utils.weight_norm, or removal of the hook (remove_weight_norm) before the model is offloaded"
    )


def _same(now: Tensor | None, before: Tensor) -> bool:
    return now is not None and now.dtype == before.dtype and torch.equal(now, before)


def _device(given: DeviceLike | None) -> torch.device:
    return torch.device("cpu") if given is None else torch.device(given)


def _origin(weights: Mapping[str, Tensor] | None) -> tuple[Mapping[str, Tensor] | None, str]:
    return weights.origin() if isinstance(weights, PrefixedDataset) else (weights, "")
