"""Training step: micro-batches, backward, and the gradients until the optimizer's step."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, final
from weakref import WeakMethod

import torch
from torch import nn

from accel.loop.accumulation import Weight, correct_short_window, forget_dropped, normalise, weight_on, weighted_scale
from accel_backends.ops.clip import check_limit, listed
from accel_state.errors import BackendError, ConfigError, PrepareError
from accel_state.watchdog.decorator import Recording, recorded

if TYPE_CHECKING:
    from accel.loop.accumulator import Key, StepClock
    from accel.loop.loaders import Loaders
    from accel.loop.window import AccumulationWindow
    from accel.prepared import PreparedObjects
    from accel.resilience.guard import PreemptionGuard
    from accel.setup.run_strategy import RunStrategy

_LOG = logging.getLogger(__name__)
_SEVERAL_DROPPED = (
    "zero_grad() of {optimizer} has dropped gradients of this accumulation window of {count} micro-batches, and its "
    "last micro-batch goes backward again, so that a step would be that of this backward alone; nearest: zero_grad() "
    "after optimizer.step(), or accumulate(model) around each loss of optimizers that step in turn"
)
_NOT_ACCUMULATED = (
    "the checkpoint was saved inside an accumulation window, and this backward is outside of accumulate(model): no "
    "optimizer steps before a micro-batch ends that window; nearest: accelerator.accumulate(model) around each of them"
)


@final
class MicroBatch:
    """Context manager of ``accumulate``: a plain class, because a generator takes three times as long per step."""

    __slots__ = ("_models", "_quiet", "_step")

    def __init__(self, step: "TrainingStep", models: tuple[nn.Module, ...]) -> None:
        self._step = step
        self._models = models
        self._quiet: ExitStack | None = None

    def __enter__(self) -> None:
        step, models = self._step, self._models
        if step.clock.postponed:
            step.clock.clear_postponed()
        if step.guard.listening is not None:
            step.guard.listening.before_micro_batch()
        if step.clock.tick(step.key(models)) or step.clock.plugin.sync_each_batch:
            return
        self._quiet, known = ExitStack(), step.prepared
        for model in models:
            self._quiet.enter_context(step.strategy.backend.no_sync(known.models[known.position(model)]))

    def __exit__(self, *exc: object) -> None:
        if self._quiet is not None:
            self._quiet.close()
        if self._step.clock.postponed:
            self._step.clock.clear_postponed()


@final
class TrainingStep:
    """Scales and reduces gradients so that micro-batches of all ranks add up to the gradient of one global batch."""

    __slots__ = ("__weakref__", "_joining", "_loaders", "_recording", "clock", "guard", "prepared", "strategy")

    def __init__(
        self,
        strategy: "RunStrategy",
        prepared: "PreparedObjects",
        clock: "StepClock",
        loaders: "Loaders",
        guard: "PreemptionGuard",
    ) -> None:
        self.strategy = strategy
        self.prepared = prepared
        self.clock = clock
        self._loaders = loaders
        self.guard = guard
        self._joining = False
        self._recording = Recording("backward", shared=False, counted=True)
        clock.complete = WeakMethod(self._complete)

    def backward(self, loss: torch.Tensor, weight: Weight | None, kwargs: dict[str, Any]) -> None:
        """See ``Accelerator.backward``."""
        with self._recording:
            if not self.prepared.models:
                raise PrepareError("backward was called before a model was prepared; call prepare(model, ...) first")
            clock, backend, listening = self.clock, self.strategy.backend, self.guard.listening
            if clock.unclaimed:
                clock.claim_passes()
            if listening is not None:
                listening.before_backward()
            if clock.postponed:  # zero_grad before the backward, and not in place of the step
                clock.postponed.clear()
            clock.unstepped = clock.due or clock.unstepped
            window = clock.window
            if clock.resumed or window.dropped is not None:
                self._check_window(window)
            window.several = window.several or (clock.due and window.unreduced)
            window.unreduced = not clock.due
            if backend.loss_scale is not None:
                clock.settle_scale(backend.loss_scale)
            if weight is not None:
                self._weighted_backward(loss, weight, kwargs)
                return
            if clock.key:
                self._backward(loss, clock.scale, kwargs)
            else:
                backend.backward(loss, scale=clock.scale, **kwargs)
            if clock.due and clock.correction != 1.0:
                correct_short_window(clock, self._accumulated(), backend.gradients)

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[nn.Module], even_batches: bool | None) -> Iterator[None]:
        """See ``Accelerator.join_uneven_inputs``."""
        even = self._loaders.options.even_batches if even_batches is None else even_batches
        with ExitStack() as stack:
            if even_batches is not None:
                for loader in self.prepared.loaders:
                    stack.enter_context(loader.override_even_batches(even_batches))
            if not even:
                backend = self.strategy.backend
                stack.enter_context(backend.gradients.join(list(joinables)))
                self._joining = backend.gradients.ranks > 1
                stack.callback(self._stop_joining)
            yield

    def clip_norm(
        self, parameters: Any, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """See ``Accelerator.clip_grad_norm_``."""
        check_limit("max_norm", max_norm)
        norm_type = float(norm_type)  # torch takes "inf" too
        backend = self.strategy.backend
        if not self.clock.due:
            return backend.gradients.norm_so_far(parameters, self.prepared.models, norm_type)
        self.clock.finish()
        if backend.loss_scale is not None:
            parameters = listed(parameters)
            backend.gradients.unscale(self.prepared.holding(parameters))
        return backend.gradients.clip_norm(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def clip_value(self, parameters: Any, clip_value: float) -> None:
        """See ``Accelerator.clip_grad_value_``."""
        check_limit("clip_value", clip_value)
        if self.clock.due:
            self.clock.finish()
            backend = self.strategy.backend
            parameters = listed(parameters)
            backend.gradients.unscale(self.prepared.holding(parameters))
            backend.gradients.clip_value(parameters, clip_value)

    def unscale(self, optimizer: Any) -> None:
        """See ``Accelerator.unscale_gradients``."""
        prepared = self.prepared
        if self.clock.due:
            self.clock.finish()
        if optimizer is not None:
            chosen: Sequence[Any] = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        elif self.clock.key:
            chosen = prepared.holding(p for model in self._accumulated() for p in model.parameters())
        else:
            chosen = prepared.optimizers
        self.strategy.backend.gradients.unscale([getattr(one, "optimizer", one) for one in chosen])

    def full_gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """See ``Accelerator.full_gradients``."""
        if not self.clock.due:
            raise BackendError(
                "full_gradients was called inside an accumulation window, when every process has gradients of its own; "
                "call it where accelerator.sync_gradients is True"
            )
        self.clock.finish()
        backend = self.strategy.backend
        if backend.loss_scale is not None:
            backend.gradients.unscale(self.prepared.holding(model.parameters()))
        read = backend.gradients.full
        return recorded("full_gradients")(read)(model) if backend.capabilities.sharded else read(model)

    def find_micro_batch_size(self, compute: Any, batch: Any, *, smallest: int) -> int:
        """See ``Accelerator.find_micro_batch_size``."""
        from accel_backends.roles.micro_batch_size import find_micro_batch_size

        if self.clock.open:
            raise ConfigError("find_micro_batch_size was called inside an accumulation window; call it between steps")
        strategy, models = self.strategy, self.prepared.models
        return find_micro_batch_size(strategy.backend, strategy.session, models, compute, batch, smallest=smallest)

    def _complete(self) -> None:
        """Reduces and divides the gradients of a window whose last micro-batch had no backward.

        Models that are trained apart on each rank (local SGD) keep their own gradients.

        Raises:
            BackendError: the backend cannot reduce them, or ranks may have left the loop.

        Collective: every rank of the group must call this.
        """
        if self._joining:
            raise BackendError(
                "the last micro-batch of an accumulation window had no backward, and within join_uneven_inputs the "
                "ranks that ran out of batches cannot reduce its gradients; nearest: even_batches=True"
            )
        clock, gradients, models = self.clock, self.strategy.backend.gradients, self._accumulated()
        with self._recording:
            for model in models:
                if model not in self.prepared.trained_apart:
                    gradients.reduce(model)
            if clock.window.weight is not None:  # a number, if no backward has added to it since it was loaded
                clock.window.weight = weight_on(self.strategy.session.device.torch, clock.window.weight)
                normalise(clock.window, models, gradients)
            elif clock.correction != 1.0:
                correct_short_window(clock, models, gradients)

    def _stop_joining(self) -> None:
        self._joining = False

    def _accumulated(self) -> list[nn.Module]:
        """Models of the current window, and models without a window of their own that its losses have reached."""
        clock, models = self.clock, self.prepared.models
        if not clock.key:
            return models
        return [models[position] for position in (*clock.key, *sorted(clock.window.reached))]

    def _check_window(self, window: "AccumulationWindow") -> None:
        """Refuses a backward after gradients of its window were dropped; warns of one outside of an open window."""
        if window.dropped is not None:
            raise BackendError(_SEVERAL_DROPPED.format(optimizer=window.dropped, count=window.position))
        self.clock.resumed = False
        _LOG.warning(_NOT_ACCUMULATED)

    def _forget_dropped(self, window: "AccumulationWindow") -> None:
        """Calls ``accumulation.forget_dropped`` for the models of the current window."""
        if window.weight is not None:
            parameters = [parameter for model in self._accumulated() for parameter in model.parameters()]
            forget_dropped(window, parameters, self.prepared.holding(parameters))

    def _backward(self, loss: torch.Tensor, scale: float, kwargs: dict[str, Any]) -> None:
        """Runs the backward, and records the models without a window of their own that the loss has reached."""
        clock, backend, models = self.clock, self.strategy.backend, self.prepared.models
        alone = [n for n in range(len(models)) if n not in clock.claimed] if clock.key else ()
        before = [backend.gradients.marks(models[n]) for n in alone]
        backend.backward(loss, scale=scale, **kwargs)
        for position, marks in zip(alone, before, strict=True):
            if backend.gradients.marks(models[position]) != marks:
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
        clock, backend = self.clock, self.strategy.backend
        if clock.due:
            self._forget_dropped(clock.window)
        scale = weighted_scale(clock.window, weight, backend.gradients, loss.device)
        self._backward(loss * scale, 1.0, kwargs)
        if clock.due:
            normalise(clock.window, self._accumulated(), backend.gradients)

    def key(self, models: tuple[nn.Module, ...]) -> "Key":
        """Positions of these models among the prepared ones; () for all of them or no specific ones."""
        known = self.prepared.models
        if len(models) == len(known) == 1 and models[0] is known[0]:
            self.clock.num_models = 1
            return ()
        positions = tuple(map(self.prepared.position, models))
        if len(positions) < len(known):
            return positions
        self.clock.num_models = len(positions)
        return ()
