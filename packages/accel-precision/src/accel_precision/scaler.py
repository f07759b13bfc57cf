"""Scales the loss so that fp16 gradients do not underflow, and leaves out steps whose gradients overflowed."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch.optim import Optimizer

from accel_precision.errors import PrecisionError
from accel_precision.options import GradScalerKwargs
from accel_precision.policy import PrecisionPolicy

MAX_SCALE, MIN_SCALE = 2.0**120, 2.0**-64


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
        # Whether the gradients of an optimizer overflowed, by its id, from unscale() to update().
        self._overflowed: dict[int, bool] = {}
        self._stepped: set[int] = set()
        self._skipped = False
        self._held = False  # an overflow that the scale has not followed yet
        self._known: set[type[Optimizer]] = set()

    @property
    def current(self) -> float:
        """The scale that the next loss is multiplied by."""
        return self._scale

    @property
    def step_was_skipped(self) -> bool:
        """Whether the step that the last ``update`` closed was left out by any optimizer."""
        return self._skipped

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale; a loss in half precision is widened first, for the product would overflow."""
        return (loss.float() if loss.dtype.itemsize < 4 else loss) * self._scale

    def unscale(self, optimizer: Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, in place; once, however often it is called before ``update``.

        Collective where a ``reduce`` was given: every rank has to call it for its optimizers in the same order.

        Raises:
            PrecisionError: gradients in half precision, in which the quotient would underflow again.
        """
        if id(optimizer) in self._overflowed:
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
        self._overflowed[id(optimizer)] = self._agreed(found, optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Steps the optimizer unless its gradients overflowed on any rank; whether it did step.

        A closure is called once, before the gradients are looked at; an optimizer that calls it several times itself
        (LBFGS) cannot work with scaled gradients.

        Raises:
            PrecisionError: an optimizer that needs its closure; a second step before ``update``.
        """
        if id(optimizer) in self._stepped:
            raise PrecisionError(
                f"{type(optimizer).__name__} was stepped twice with one loss scale; call update() after each step"
            )
        if type(optimizer) not in self._known:
            self._admit(type(optimizer))
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.unscale(optimizer)
        self._stepped.add(id(optimizer))
        if self._overflowed[id(optimizer)]:
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
        if not self._overflowed:
            return
        self._skipped = any(self._overflowed.values())
        self._overflowed.clear()
        self._stepped.clear()
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
        self._scale, self._tracker, self._held = scale, int(state[self.TRACKER]), False
        self._overflowed.clear()
        self._stepped.clear()

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


def _gradients(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    """The gradients in memory here: of a DTensor its local part, of a sparse one its values, each index once."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
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


def _first_device(optimizer: Optimizer) -> torch.device:
    parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    return parameters[0].device
