"""The prepared models of a backend, and their optimizers."""

from collections.abc import Iterable, Iterator
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.ops.fqn import innermost
from accel_megatron.training.engine import MegatronEngine
from accel_megatron.training.optimizer import EngineOptimizer
from accel_state.errors import BackendError


@final
class MegatronEngines:
    """Engines of a backend, and the optimizer of each that has one."""

    def __init__(self) -> None:
        self._engines: list[MegatronEngine] = []
        self._optimizers: dict[int, EngineOptimizer] = {}

    def __iter__(self) -> Iterator[MegatronEngine]:
        return iter(self._engines)

    def add(self, engine: MegatronEngine, optimizer: EngineOptimizer | None) -> None:
        """Adds an engine."""
        self._engines.append(engine)
        if optimizer is not None:
            self._optimizers[id(optimizer.optimizer)] = optimizer

    def find(self, model: nn.Module) -> MegatronEngine:
        """Returns the engine that a prepared model is.

        Raises:
            BackendError: the model is not prepared.
        """
        inner = innermost(model)
        for engine in self._engines:
            if engine is inner:
                return engine
        raise BackendError(f"{type(inner).__name__} was not prepared with Megatron-LM; use what prepare returned")

    def of_optimizer(self, optimizer: Optimizer) -> EngineOptimizer:
        """Returns the engine's optimizer that a prepared optimizer is part of.

        Raises:
            BackendError: the optimizer was not prepared.
        """
        inner = getattr(optimizer, "optimizer", optimizer)
        for one in (optimizer, inner):
            if id(one) in self._optimizers:
                return self._optimizers[id(one)]
        raise BackendError(f"{type(optimizer).__name__} was not prepared; prepare it in one call with its model")

    def weights(self, engine: MegatronEngine) -> dict[str, torch.Tensor]:
        """Returns this rank's weights by megatron-core's names, in fp32 also if the model computes in 16 bits.

        Collective: every data-parallel rank must call this.
        """
        return engine.weights() | ({} if engine.optimizer is None else engine.optimizer.masters())

    def optimizer_of_all(self, parameters: Iterable[torch.Tensor]) -> EngineOptimizer:
        """Returns the optimizer of the engine whose trained parameters are all among ``parameters``.

        Raises:
            BackendError: there is none.
        """
        given = {id(one) for one in parameters}
        for one in self._optimizers.values():
            if given >= {id(p) for p in one.engine.parameters() if p.requires_grad}:
                return one
        raise BackendError(
            f"{len(given)} parameters are not all of a model's; Megatron-LM clips the gradients of a model together: "
            "pass model.parameters()"
        )

    def drop(self, models: Iterable[nn.Module]) -> None:
        """Removes engines and their optimizers."""
        gone = {id(innermost(model)) for model in models}
        self._engines = [one for one in self._engines if id(one) not in gone]
        self._optimizers = {key: one for key, one in self._optimizers.items() if id(one.engine) not in gone}
