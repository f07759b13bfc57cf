"""Linear layers whose weights torchao quantizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, final

import torch
from torch import Tensor, nn

from accel_inference.quantization.config import TorchAOQuantizationConfig


def _torchao() -> Any:
    try:
        return import_module("torchao.quantization")
    except ImportError as error:
        raise ImportError(f"TorchAOQuantizationConfig needs torchao (pip install torchao): {error}") from error


@final
@dataclass(frozen=True)
class TorchAOQuantizer:
    """Quantization of weights by torchao; the layer is a Linear with a weight of another class."""

    config: TorchAOQuantizationConfig

    def takes(self, linear: nn.Linear) -> bool:
        return self.config.weights != "int4" or linear.in_features % self.config.group_size == 0

    def layer(self, linear: nn.Linear) -> nn.Module:
        return linear

    def weight(self, layer: nn.Module, value: Tensor, device: torch.device) -> nn.Parameter:
        with torch.device("meta"):
            holder = nn.Linear(value.shape[1], value.shape[0], bias=False)
        holder.weight = nn.Parameter(value.to(device, self.config.torch_dtype), requires_grad=False)
        _torchao().quantize_(holder, self._rule())
        holder.weight.requires_grad_(False)
        return holder.weight

    def saved_names(self, name: str, names: Mapping[str, object]) -> list[str]:
        return []

    def restored(
        self, layer: nn.Module, value: Tensor, saved: Mapping[str, Tensor], device: torch.device
    ) -> nn.Parameter:
        return nn.Parameter(value.to(device), requires_grad=False)

    def _rule(self) -> Any:
        library = _torchao()
        if self.config.weights == "int8":
            return library.Int8WeightOnlyConfig(set_inductor_config=False)
        if self.config.weights == "fp8":
            return library.Float8WeightOnlyConfig(set_inductor_config=False)
        group = library.PerGroup(self.config.group_size)
        dtypes: Any = torch  # its stubs lack int4
        return library.IntxWeightOnlyConfig(weight_dtype=dtypes.int4, granularity=group)
