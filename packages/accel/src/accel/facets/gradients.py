"""Gradients of an Accelerator: reduction, clipping, and the loss scale."""

from abc import ABC
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel.loop.accumulation import Weight, forget_dropped, normalise, weighted_scale
from accel.loop.accumulator import AccumulationWindow, StepClock
from accel.optimizer import PreparedOptimizer
from accel_state.errors import BackendError, PrepareError
from accel_state.watchdog.decorator import recorded

if TYPE_CHECKING:
    from accel_backends import Backend
    from accel_precision import AutocastKwargs


class GradientFacet(ABC):
    """Methods about gradients between the backward and the optimizer's step."""

    clock: StepClock
    backend: "Backend"
    _models: list[nn.Module]
    _optimizers: list[PreparedOptimizer]
    _joining: bool

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within the block, the backward does not reduce the gradients of ``model`` over ranks."""
        return self.backend.no_sync(model)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within the block, the next backward reduces the gradients even if the forward ran under ``no_sync``."""
        return self.backend.trigger_sync(model)

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales the gradients to a global norm of at most ``max_norm``; returns the norm before clipping.

        Has an effect only when a step is due. Otherwise it returns the norm of the gradients that this process has
        accumulated so far, which are not reduced over ranks yet, with the loss scale divided out.
        """
        if not self.clock.due:
            return self.backend.gradients.norm_so_far(parameters, self._models, norm_type)
        if self.backend.loss_scale is not None:
            parameters = _listed(parameters)
            self.backend.gradients.unscale(self._holding(parameters))
        return self.backend.gradients.clip_norm(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamps every gradient element to ``[-clip_value, clip_value]``, when a step is due."""
        if self.clock.due:
            parameters = _listed(parameters)
            self.backend.gradients.unscale(self._holding(parameters))
            self.backend.gradients.clip_value(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divides the gradients by the loss scale, once, for the given optimizer or all prepared ones.

        In the block of ``accumulate(model)``, "all" means those that step for its models: the gradients that others
        have accumulated must stay scaled.
        """
        if optimizer is None:
            chosen: Sequence[Any] = (
                self._holding(p for model in self._accumulated() for p in model.parameters())
                if self.clock.key
                else self._optimizers
            )
        else:
            chosen = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        self.backend.gradients.unscale([getattr(one, "optimizer", one) for one in chosen])

    def full_gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Full gradients of the next step by parameter name: averaged over ranks, with the loss scale divided out.

        They are copies, on every process, however the backend shards gradients; parameters without a gradient are left
        out. Call it after the last backward of a window. Clipping by the step itself (DeepSpeed's) is not included.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: no step is due, so the gradients have not been reduced yet.
        """
        if not self.clock.due:
            raise BackendError(
                "full_gradients was called inside an accumulation window, when every process has gradients of its own; "
                "call it where accelerator.sync_gradients is True"
            )
        if self.backend.loss_scale is not None:
            self.backend.gradients.unscale(self._holding(model.parameters()))
        read = self.backend.gradients.full
        return recorded("full_gradients")(read)(model) if self.backend.capabilities.sharded else read(model)

    def autocast(self, autocast_handler: "AutocastKwargs | None" = None) -> AbstractContextManager[Any]:
        """Computes in the policy's dtype within the block, for computation outside of a prepared model's forward."""
        return self.backend.run.autocast_context(autocast_handler)

    def _accumulated(self) -> list[nn.Module]:
        """Models of the current window, and models without a window of their own that its losses have reached."""
        clock = self.clock
        if not clock.key:
            return self._models
        return [self._models[position] for position in (*clock.key, *sorted(clock.window.reached))]

    def _forget_dropped(self, window: AccumulationWindow) -> None:
        """Calls ``accumulation.forget_dropped`` for the models of the current window."""
        if window.weight is not None:
            parameters = [parameter for model in self._accumulated() for parameter in model.parameters()]
            forget_dropped(window, parameters, self._holding(parameters))

    def _backward(self, loss: torch.Tensor, scale: float, kwargs: dict[str, Any]) -> None:
        """Runs the backward, and records the models without a window of their own that the loss has reached."""
        clock = self.clock
        alone = [n for n in range(len(self._models)) if n not in clock.claimed] if clock.key else ()
        if not alone:
            self.backend.backward(loss, scale=scale, **kwargs)
            return
        before = [self.backend.gradients.marks(self._models[n]) for n in alone]
        self.backend.backward(loss, scale=scale, **kwargs)
        for position, marks in zip(alone, before, strict=True):
            if self.backend.gradients.marks(self._models[position]) != marks:
                clock.window.reached.add(position)

    def _weighted_backward(self, loss: torch.Tensor, weight: Weight, kwargs: dict[str, Any]) -> None:
        """Runs the backward of a sum. At the end of the window, divides its gradients by the weights of all ranks.

        Collective: every rank of the group must call this.
        """
        if self._joining:
            raise BackendError(
                "backward(loss, weight=...) adds up the weights of all ranks, and within join_uneven_inputs ranks "
                "that ran out of batches have none to add; nearest: even_batches=True, or mean losses"
            )
        window = self.clock.window
        if self.clock.due:
            self._forget_dropped(window)
        scale = weighted_scale(window, weight, self.backend.gradients, loss.device)
        self._backward(loss * scale, 1.0, kwargs)
        if self.clock.due:
            normalise(window, self._accumulated(), self.backend.gradients)

    def _key(self, models: tuple[nn.Module, ...]) -> tuple[int, ...]:
        """Positions of these models among the prepared ones; () for all of them or no specific ones."""
        if len(models) == len(self._models) == 1 and models[0] is self._models[0]:
            self.clock.num_models = 1
            return ()
        positions = tuple(map(self._position, models))
        if len(positions) < len(self._models):
            return positions
        self.clock.num_models = len(positions)
        return ()

    def _position(self, model: nn.Module) -> int:
        for position, prepared in enumerate(self._models):
            if prepared is model:
                return position
        compiled = model._modules.get("_orig_mod")
        if compiled is not None:
            return self._position(compiled)
        raise PrepareError(
            f"accumulate was given a {type(model).__name__} that prepare did not return; give it the model that "
            "prepare returned"
        )

    def _holding(self, parameters: Iterable[torch.Tensor]) -> list[torch.optim.Optimizer]:
        """The inner optimizers of the prepared ones that update some of these parameters."""
        inner = [one.optimizer for one in self._optimizers]
        if len(inner) < 2:
            return inner
        ids = {id(parameter) for parameter in parameters}
        return [one for one in inner if any(id(p) in ids for group in one.param_groups for p in group["params"])]


def _listed(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
