"""Layers whose weights are stored in a small dtype and cast to another while they compute."""

import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accel_inference.hooks.hook import ModelHook, add_hook_to_module
from accel_inference.prefetch.prefetcher import THREADS
from accel_state.private import untraced

CAST_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
"""Layers of which the weights are cast."""


class LayerwiseCastingHook(ModelHook):
    """Casts a module's weights to ``compute_dtype`` for its forward, and back to ``storage_dtype`` after it.

    A module whose hook is removed has them in ``compute_dtype``. One thread at a time may compute with the module: it
    has one place for each weight.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking
        self._threads: list[int] = []
        """The thread that computes, once for each forward inside the other."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        return nn.Module.to(module, dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._cast(module)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self._store(module)
        return output

    def failed_forward(self, module: nn.Module) -> None:
        self._store(module)

    @untraced
    def _cast(self, module: nn.Module) -> None:
        here = threading.get_ident()
        self._threads.append(here)  # before the comparison, so that of two threads one at least sees the other
        if len({*self._threads}) > 1:
            self._threads.remove(here)
            raise RuntimeError(THREADS)
        nn.Module.to(module, dtype=self.compute_dtype, non_blocking=self.non_blocking)

    @untraced
    def _store(self, module: nn.Module) -> None:
        here = threading.get_ident()
        if self._threads.count(here) == 1:
            nn.Module.to(module, dtype=self.storage_dtype, non_blocking=self.non_blocking)
        self._threads.remove(here)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the threads, which do not compute with a copy."""
        return {**self.__dict__, "_threads": []}

    def detach_hook(self, module: nn.Module) -> nn.Module:
        return nn.Module.to(module, dtype=self.compute_dtype, non_blocking=self.non_blocking)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: type[nn.Module] | Sequence[type[nn.Module]] | None = None,
    non_blocking: bool = False,
) -> None:
    """Stores the weights of linear layers and convolutions in ``storage_dtype``.

    Modules whose name matches one of the patterns, or that are of one of the classes, are left out with all below them.
    So are layers that share a weight with a module that is not cast, such as a head tied to an embedding, which would
    compute in the dtype of the storage. A model that asks for the dtype of a layer's weight before it calls the layer,
    as T5 does for ``wo``, needs that layer among the patterns.

    Raises:
        ValueError: the weights of a layer are offloaded already, and keep the dtype that they have there.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())
    classes = (skip_modules_classes,) if isinstance(skip_modules_classes, type) else tuple(skip_modules_classes or ())
    found = list(_layers(module, "", patterns, classes))
    chosen = {id(layer) for layer in found}
    uncast = {id(one) for part in module.modules() if id(part) not in chosen for one in part.parameters(recurse=False)}
    layers = [layer for layer in found if not any(id(one) in uncast for one in layer.parameters(recurse=False))]
    offloaded = sum(getattr(getattr(layer, "_hf_hook", None), "offload", False) for layer in layers)
    if offloaded:
        raise ValueError(
            f"the weights of {offloaded} of {len(layers)} layers are offloaded already, in the dtype that they had; "
            "attach layerwise casting first and offload the model then"
        )
    for layer in layers:
        add_hook_to_module(layer, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)


def _layers(
    module: nn.Module, name: str, patterns: Sequence[str], skipped: tuple[type[nn.Module], ...]
) -> Iterator[nn.Module]:
    if isinstance(module, skipped) or any(re.search(pattern, name) for pattern in patterns):
        return
    if isinstance(module, CAST_LAYERS):
        yield module
        return
    for child_name, child in module.named_children():
        yield from _layers(child, f"{name}.{child_name}" if name else child_name, patterns, skipped)
