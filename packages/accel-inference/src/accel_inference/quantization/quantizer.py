"""Quantizers: what a library does with the weight of one Linear module."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn


class Quantizer(Protocol):
    """Quantization of one Linear module by a library."""

    def layer(self, linear: nn.Linear) -> nn.Module:
        """The module that computes with quantized weights in the place of ``linear``, without memory for the weight."""
        ...

    def takes(self, linear: nn.Linear) -> bool:
        """Whether the library can quantize a module with this shape."""
        ...

    def weight(self, layer: nn.Module, value: Tensor, device: torch.device) -> nn.Parameter:
        """The weight of a layer, quantized on a device."""
        ...

    def saved_names(self, name: str, names: Mapping[str, object]) -> list[str]:
        """Names in a checkpoint of the tensors that a quantized weight of module ``name`` has beside it."""
        ...

    def restored(
        self, layer: nn.Module, value: Tensor, saved: Mapping[str, Tensor], device: torch.device
    ) -> nn.Parameter:
        """The weight of a layer from a checkpoint of the quantized model; ``saved`` has names relative to the layer."""
        ...
