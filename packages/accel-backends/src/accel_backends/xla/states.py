"""States of models on XLA devices."""

from collections.abc import Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.ops.fqn import innermost
from accel_backends.ops.state_dicts import load_model_state, load_optimizer_state, model_state, optimizer_state
from accel_backends.roles.states import ReplicatedStates
from accel_backends.xla.config import XLAConfig
from accel_backends.xla.mesh import shard
from accel_backends.xla.recording import on_host, run_recorded


@final
class XLAStates(ReplicatedStates):
    """States in host memory, because the next step replaces device tensors."""

    def model(self, model: nn.Module) -> dict[str, Any]:
        """Returns full tensors in host memory, because the next step replaces device tensors."""
        return cast("dict[str, Any]", on_host(model_state(model)))

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Loads a state of any backend; tensors are sharded as the parameters were."""
        load_model_state(model, state, strict=strict)
        shard_parameters(model, cast(XLAConfig, self.config))
        run_recorded()

    def optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
        """Returns full tensors in host memory, by FQN."""
        return cast("dict[str, Any]", on_host(optimizer_state(optimizer, models)))

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Loads a state of any backend; each tensor is sharded like its parameter."""
        load_optimizer_state(optimizer, models, state)
        config = cast(XLAConfig, self.config)
        if config.shard_parameters:
            for parameter, values in optimizer.state.items():
                for value in values.values():
                    if _is_alike(value, parameter) and parameter.numel() >= config.min_shard_size:
                        shard(value)
        run_recorded()


def shard_parameters(model: nn.Module, config: XLAConfig) -> None:
    """Shards the parameters of a model over the devices, if the options say so."""
    if config.shard_parameters:
        for parameter in innermost(model).parameters():
            if parameter.dim() and parameter.numel() >= config.min_shard_size:
                shard(parameter)


def _is_alike(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.device == parameter.device and value.shape == parameter.shape
