"""Loss scale against underflow of fp16 gradients; skips steps whose gradients overflowed."""

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
from accel_precision.private import unscale

MAX_SCALE, MIN_SCALE = 2.0**120, 2.0**-64

#: For each parameter of an optimizer, id and version of its gradient; None if the parameter has no gradient.
GradientMarks = tuple[tuple[int, int] | None, ...]


@final
class LossScaler:
    """One loss scale for all optimizers of a run, equal on every rank.

    Order of calls in a step: ``scale`` the loss and call backward; ``unscale`` (optional, before clipping); ``step``
    each optimizer; ``update`` once. All ranks decide together whether gradients overflowed, so that either every rank
    steps or none. This class does not wrap ``torch.amp.GradScaler``, which keeps the overflow flags in private
    attributes, so that ranks could not agree on them before the step, and which keeps the scale on the device, so that
    each read of the scale is one more device synchronisation.

    Args:
        options: initial value, growth and backoff of the scale.
        reduce: sums a float32 tensor of shape ``(1,)`` over all ranks in place, whatever its device; None: one rank.

    Attributes:
        reduce: as given; may be replaced between steps.
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
        self._cleared: WeakSet[Optimizer] = WeakSet()  # subset of _stepped whose gradients were cleared since
        self._had_gradients: WeakSet[Optimizer] = WeakSet()
        self._dropped = False  # gradients that overflowed were cleared without a step
        self._skipped = False
        self._scaled = 0  # number of losses scaled so far
        self._losses: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # value of _scaled at the last unscale
        self._held = False  # an overflow that has not lowered the scale yet
        self._known: set[type[Optimizer]] = set()

    @property
    def current(self) -> float:
        """Scale by which the next loss is multiplied."""
        return self._scale

    def get_scale(self) -> float:
        """Returns ``current``; torch's name for it."""
        return self._scale

    def is_enabled(self) -> bool:
        """Returns True: without scaling there is no ``LossScaler``."""
        return True

    @property
    def step_was_skipped(self) -> bool:
        """Whether any optimizer skipped the step that the last ``update`` closed."""
        return self._skipped

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss times the scale; widens a half-precision loss first, because the product would overflow."""
        return (loss.float() if loss.dtype.itemsize < 4 else loss) * self.for_loss()

    def for_loss(self) -> float:
        """Counts a scaled loss and returns the scale, for callers that multiply the loss themselves."""
        self._scaled += 1
        return self._scale

    def lacks_scale(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has gradients although no loss was scaled since they were last unscaled."""
        return (
            self._losses.get(optimizer, 0) == self._scaled
            and (optimizer not in self._overflowed or optimizer in self._cleared)
            and any(parameter.grad is not None for parameter in _parameters(optimizer))
        )

    def unscale(self, optimizer: Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, in place; later calls before ``update`` do nothing.

        With ``reduce`` every rank has to unscale its optimizers in the same order.

        Collective: every rank of the group must call this.

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
            unscale(gradients, here, inverse)
            found = here if found is None else found + here.to(found.device)
        if found is not None:
            self._had_gradients.add(optimizer)
        self._losses[optimizer] = self._scaled
        self._overflowed[optimizer] = self._agreed(found, optimizer)

    def unscale_(self, optimizer: Optimizer) -> None:
        """``unscale`` by torch's name; accepts a prepared optimizer in place of the user's own."""
        own = getattr(optimizer, "unprepared", None)
        self.unscale(own if isinstance(own, Optimizer) else optimizer)

    def forget(self, optimizer: Optimizer) -> None:
        """Records that the optimizer's gradients were cleared.

        If they had been unscaled without a step, the next gradients are unscaled again; an overflow that was found in
        the cleared ones still lowers the scale at the next ``update``.
        """
        if optimizer in self._stepped:
            self._cleared.add(optimizer)
        elif optimizer in self._overflowed:
            self._dropped |= self._overflowed.pop(optimizer)

    def overflow_dropped(self) -> bool:
        """Whether gradients that overflowed were cleared without a step since ``update``, which is then due.

        Calls ``forget`` for optimizers whose unscaled gradients are all gone.
        """
        if self._overflowed:
            for optimizer in [one for one in self._unscaled() if one in self._had_gradients]:
                if all(parameter.grad is None for parameter in _parameters(optimizer)):
                    self.forget(optimizer)
        return self._dropped

    def unscaled_gradients(self) -> Mapping[Optimizer, GradientMarks]:
        """Marks of the gradients that are unscaled and not stepped yet, for ``check_unscaled``."""
        if not self._overflowed:
            return {}
        return {optimizer: gradient_marks(_parameters(optimizer)) for optimizer in self._unscaled()}

    def check_unscaled(self, before: Mapping[Optimizer, GradientMarks]) -> None:
        """Verifies that a backward did not add scaled gradients to unscaled ones.

        Raises:
            PrecisionError: scaled gradients were added, so that the sum is neither scaled nor unscaled.
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
        """Optimizers whose gradients were unscaled and that have not stepped since."""
        return [optimizer for optimizer in self._overflowed if optimizer not in self._stepped]

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Steps the optimizer unless its gradients overflowed on any rank; returns whether the optimizer stepped.

        A closure is called once, before the check of the gradients; an optimizer that calls its closure several times
        (LBFGS) cannot work with scaled gradients.

        Raises:
            PrecisionError: an optimizer that requires a closure; a second step before ``update``.
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
        """Adapts the scale once per step, for all optimizers; does nothing if no gradients were unscaled or dropped.

        Args:
            hold: the step is over, but gradients that carry the scale still wait for their own step: the scale changes
                at the next ``update`` without ``hold``.

        Raises:
            PrecisionError: the scale has fallen so far that it cannot be the reason why gradients overflow.
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
        """Returns plain numbers; to be called between ``update`` and the next ``unscale``."""
        factors = {name: getattr(self._options, name) for name in self.FACTORS}
        return {self.SCALE: self._scale, self.TRACKER: self._tracker, **factors}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Loads the scale and the growth count; the factors stay as configured.

        Raises:
            PrecisionError: a value is missing or is not a valid scale.
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
        self._scaled += 1  # gradients of an open accumulation window may carry the scale

    def _begin(self) -> None:
        """Starts a step: no optimizer is unscaled yet."""
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
    """Returns the scaler of a policy; None if the policy has no scaling or the options turn scaling off."""
    options = options or GradScalerKwargs()
    if policy.scaling == "none" or not options.enabled:
        return None
    if policy.scaling == "static":
        options = replace(options, growth_factor=1.0, backoff_factor=1.0)
    return LossScaler(options, reduce=reduce)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradients(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    """Yields this rank's gradients: the local shard of a DTensor, the coalesced values of a sparse tensor.

    Complex ones as pairs of real numbers, which share their memory.
    """
    for parameter in _parameters(optimizer):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
            yield _real(gradient.values())
        elif hasattr(gradient, "to_local"):
            yield _real(gradient.to_local())
        else:
            if gradient.is_conj():
                parameter.grad = gradient = gradient.resolve_conj()
            yield _real(gradient)


def _real(gradient: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def gradient_marks(parameters: Iterable[torch.Tensor]) -> GradientMarks:
    """Returns id and version of each gradient, which change when a backward adds to it; None without gradient."""
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
    """Device of the first parameter; the CPU without one, as on a rank whose stages have none of them."""
    return next((parameter.device for parameter in _parameters(optimizer)), torch.device("cpu"))
