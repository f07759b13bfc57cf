"""Scales the loss so that fp16 gradients do not underflow, and leaves out steps whose gradients overflowed."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer

from accel_precision.errors import PrecisionError
from accel_precision.options import GradScalerKwargs
from accel_precision.policy import PrecisionPolicy

MAX_SCALE, MIN_SCALE = 2.0**120, 2.0**-64

#: For each parameter of an optimizer, the identity and the version of its gradient; None without one.
GradientMarks = tuple[tuple[int, int] | None, ...]


@final
class LossScaler:
    """One loss scale for all optimizers of a run, the same on every rank.

    The order in a step: ``scale`` the loss and go backward; ``unscale`` (optional: before clipping); ``step`` each
    optimizer; ``update`` once. Whether gradients overflowed is decided by all ranks together, so that no rank steps
    alone. It is written out instead of wrapping ``torch.amp.GradScaler``, which keeps what it found where only
    private names reach it, so that ranks cannot agree on it before the step, and which holds the scale on the device,
    where each read of it waits for the device once more.

    Args:
        options: start, growth and backoff of the scale.
        reduce: sums the tensor it is given, shape ``(1,)`` and float32, over all ranks in place; None: one rank.

    Attributes:
        reduce: as given; may be exchanged between steps.
    """

    SCALE, TRACKER, FACTORS = "scale", "growth_tracker", ("growth_factor", "backoff_factor", "growth_interval")

    def __init__(
        self, options: GradScalerKwargs | None = None, *, reduce: Callable[[torch.Tensor], object] | None = None
    ) -> None:
        self._options = options or GradScalerKwargs()
        self.reduce = reduce
        self._scale = float(self._options.init_scale)
        self._tracker = 0
        # Whether the gradients of an optimizer overflowed, from unscale() to update().
        self._overflowed: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self._cleared: WeakSet[Optimizer] = WeakSet()  # of those that stepped
        self._had_gradients: WeakSet[Optimizer] = WeakSet()
        self._dropped = False  # gradients that overflowed were cleared without a step
        self._skipped = False
        self._scaled = 0  # losses so far
        self._losses: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # until an optimizer was unscaled last
        self._held = False  # an overflow that the scale has not followed yet
        self._known: set[type[Optimizer]] = set()

    @property
    def current(self) -> float:
        """The scale that the next loss is multiplied by."""
        return self._scale

    def get_scale(self) -> float:
        """The same, by the name that torch has for it."""
        return self._scale

    def is_enabled(self) -> bool:
        """Always, as where nothing is scaled there is no scaler."""
        return True

    @property
    def step_was_skipped(self) -> bool:
        """Whether the step that the last ``update`` closed was left out by any optimizer."""
        return self._skipped

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale; a loss in half precision is widened first, for the product would overflow."""
        return (loss.float() if loss.dtype.itemsize < 4 else loss) * self.for_loss()

    def for_loss(self) -> float:
        """The scale, for a loss that is multiplied by it elsewhere."""
        self._scaled += 1
        return self._scale

    def lacks_scale(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has gradients, but no loss was scaled since they were last unscaled."""
        return (
            self._losses.get(optimizer, 0) == self._scaled
            and (optimizer not in self._overflowed or optimizer in self._cleared)
            and any(parameter.grad is not None for parameter in _parameters(optimizer))
        )

    def unscale(self, optimizer: Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, in place; once, however often it is called before ``update``.

        Collective where a ``reduce`` was given: every rank has to call it for its optimizers in the same order.

        Raises:
            PrecisionError: gradients in half precision, in which the quotient would underflow again.
        """
        if optimizer in self._overflowed:
            return
        by_place: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for gradient in _gradients(optimizer):
            if gradient.dtype.itemsize < 4:
                raise PrecisionError(
                    f"a gradient of shape {tuple(gradient.shape)} is {gradient.dtype}: scaled gradients have to be "
                    "fp32 or wider; keep parameters in fp32 (precision 'fp16' instead of 'fp16-true')"
                )
            by_place.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        found: torch.Tensor | None = None
        for (device, _), gradients in by_place.items():
            here = torch.zeros(1, device=device)
            inverse = torch.full((1,), 1.0 / self._scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, here, inverse)
            found = here if found is None else found + here.to(found.device)
        if found is not None:
            self._had_gradients.add(optimizer)
        self._losses[optimizer] = self._scaled
        self._overflowed[optimizer] = self._agreed(found, optimizer)

    def unscale_(self, optimizer: Optimizer) -> None:
        """``unscale``, by the name that torch has for it; an optimizer that was prepared stands for its own."""
        own = getattr(optimizer, "unprepared", None)
        self.unscale(own if isinstance(own, Optimizer) else optimizer)

    def forget(self, optimizer: Optimizer) -> None:
        """Notes that its gradients were cleared: if they were unscaled without a step, the next ones are scaled again.

        An overflow that was found in them still lowers the scale at the next ``update``.
        """
        if optimizer in self._stepped:
            self._cleared.add(optimizer)
        elif optimizer in self._overflowed:
            self._dropped |= self._overflowed.pop(optimizer)

    def overflow_dropped(self) -> bool:
        """Whether gradients that overflowed were cleared without a step since ``update``, which is due then.

        Optimizers whose parameters hold no unscaled gradients any more are forgotten.
        """
        if self._overflowed:
            for optimizer in [one for one in self._unscaled() if one in self._had_gradients]:
                if all(parameter.grad is None for parameter in _parameters(optimizer)):
                    self.forget(optimizer)
        return self._dropped

    def unscaled_gradients(self) -> Mapping[Optimizer, GradientMarks]:
        """Marks of the gradients that were unscaled and wait for their step, for ``check_unscaled``."""
        if not self._overflowed:
            return {}
        return {optimizer: gradient_marks(_parameters(optimizer)) for optimizer in self._unscaled()}

    def check_unscaled(self, before: Mapping[Optimizer, GradientMarks]) -> None:
        """Makes sure that a backward has added no scaled gradients to ones that were unscaled.

        Raises:
            PrecisionError: it has, so that the sum is neither.
        """
        for optimizer, marks in before.items():
            if gradient_marks(_parameters(optimizer)) == marks:
                continue
            if any(marks):
                raise PrecisionError(
                    f"backward added gradients that carry the loss scale to those of {type(optimizer).__name__}, whose "
                    "scale was taken out by clipping or unscale_gradients: clip after the last backward of a step, or "
                    "call the prepared optimizer's zero_grad before the backward of another one"
                )
            self.forget(optimizer)

    def _unscaled(self) -> list[Optimizer]:
        """The optimizers whose gradients were unscaled and that have not stepped since."""
        return [optimizer for optimizer in self._overflowed if optimizer not in self._stepped]

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Steps the optimizer unless its gradients overflowed on any rank; whether it did step.

        A closure is called once, before the gradients are looked at; an optimizer that calls it several times itself
        (LBFGS) cannot work with scaled gradients.

        Raises:
            PrecisionError: an optimizer that needs its closure; a second step before ``update``.
        """
        if optimizer in self._stepped:
            raise PrecisionError(
                f"{type(optimizer).__name__} was stepped twice with one loss scale; call update() after each step"
            )
        if type(optimizer) not in self._known:
            self._admit(type(optimizer))
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.unscale(optimizer)
        self._stepped.add(optimizer)
        if self._overflowed[optimizer]:
            return False
        optimizer.step()
        return True

    def update(self, *, hold: bool = False) -> None:
        """Adapts the scale to what the step found, once for all optimizers; does nothing if none was unscaled.

        Args:
            hold: the step is over, but gradients that carry the scale are still waiting for one of their own: it
                changes at the next update that does not hold it.

        Raises:
            PrecisionError: the scale has fallen so far that it cannot be what makes gradients overflow.
        """
        if not self._overflowed and not self._dropped:
            return
        self._skipped = self._dropped or any(self._overflowed.values())
        self._dropped = False
        self._begin()
        self._held = self._held or self._skipped
        if hold:
            return
        if self._held:
            self._held = False
            self._scale *= self._options.backoff_factor
            self._tracker = 0
            self._check_floor()
        else:
            self._tracker += 1
            if self._tracker >= self._options.growth_interval:
                self._scale = min(self._scale * self._options.growth_factor, MAX_SCALE)
                self._tracker = 0

    def _check_floor(self) -> None:
        if self._scale < MIN_SCALE:
            raise PrecisionError(
                f"gradients overflowed in every step until the loss scale fell to {self._scale:g}, far below what "
                "their size can explain: the model or the loss itself gives nan or inf. Look at "
                "clip_grad_norm_(..., error_if_nonfinite=True), or train with precision 'bf16'"
            )

    def state_dict(self) -> dict[str, float | int]:
        """Plain numbers; to be taken between ``update`` and the next ``unscale``."""
        factors = {name: getattr(self._options, name) for name in self.FACTORS}
        return {self.SCALE: self._scale, self.TRACKER: self._tracker, **factors}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Takes over the scale and the growth count; the factors stay as configured.

        Raises:
            PrecisionError: a value is missing or is no usable scale.
        """
        missing = {self.SCALE, self.TRACKER} - set(state)
        if missing:
            raise PrecisionError(
                f"the state of the loss scale lacks {', '.join(sorted(missing))}; it holds {sorted(state)}"
            )
        scale = float(state[self.SCALE])
        if not (math.isfinite(scale) and scale > 0.0):
            raise PrecisionError(f"the state of the loss scale holds scale={scale}; expected a positive finite number")
        self._scale, self._tracker, self._held, self._dropped = scale, int(state[self.TRACKER]), False, False
        self._begin()
        self._scaled += 1  # gradients of an open window may carry the scale

    def _begin(self) -> None:
        """Begins a step in which no optimizer has been unscaled yet."""
        self._overflowed.clear()
        self._stepped.clear()
        self._cleared.clear()
        self._had_gradients.clear()

    def _admit(self, kind: type[Optimizer]) -> None:
        closure = inspect.signature(kind.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise PrecisionError(
                f"{kind.__name__} evaluates a closure several times in a step, which does not go together with a loss "
                "scale; use precision 'bf16' or 'no'"
            )
        self._known.add(kind)

    def _agreed(self, found: torch.Tensor | None, optimizer: Optimizer) -> bool:
        if self.reduce is None:
            return found is not None and bool(found.item())
        if found is None:
            found = torch.zeros(1, device=_first_device(optimizer))
        self.reduce(found)
        return bool(found.item())


def make_scaler(
    policy: PrecisionPolicy,
    options: GradScalerKwargs | None = None,
    *,
    reduce: Callable[[torch.Tensor], object] | None = None,
) -> LossScaler | None:
    """The scaler that a policy asks for; None if it asks for none or the options turn scaling off."""
    options = options or GradScalerKwargs()
    if policy.scaling == "none" or not options.enabled:
        return None
    if policy.scaling == "static":
        options = replace(options, growth_factor=1.0, backoff_factor=1.0)
    return LossScaler(options, reduce=reduce)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradients(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    """The gradients in memory here: of a DTensor its local part, of a sparse one its values, each index once."""
    for parameter in _parameters(optimizer):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
            yield gradient._values()
        elif hasattr(gradient, "to_local"):
            yield gradient.to_local()
        else:
            yield gradient


def gradient_marks(parameters: Iterable[torch.Tensor]) -> GradientMarks:
    """What changes for each parameter when something is added to its gradient; None where it has none."""
    found: list[tuple[int, int] | None] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            found.append(None)
        else:
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            found.append((id(gradient), local._version))
    return tuple(found)


def _first_device(optimizer: Optimizer) -> torch.device:
    return _parameters(optimizer)[0].device
