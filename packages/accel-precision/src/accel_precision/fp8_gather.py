"""Scales of weights that FSDP gathers in 8 bits, found for all of them at once when an optimizer has stepped."""

from importlib import import_module
from typing import Any, final
from weakref import ref

from torch import nn


@final
class GatheredScales:
    """One all-reduce after a step instead of one for each weight in each forward.

    A scale belongs to the values that it was computed from. Weights that were changed since by something else (a loaded
    state, a hand) get theirs when they are gathered, until the next ``renew``. It does not keep the model alive.
    """

    def __init__(self, model: nn.Module) -> None:
        linear = import_module("torchao.float8.float8_linear").Float8Linear
        kind = import_module("torchao.float8.fsdp_utils").WeightWithDynamicFloat8CastTensor
        self._model = ref(model)
        self._weights: list[Any] = [
            module.weight
            for module in model.modules()
            if isinstance(module, linear) and isinstance(getattr(module.weight, "_local_tensor", None), kind)
        ]
        self._stamps = self._now()

    def __bool__(self) -> bool:
        return bool(self._weights)

    def renew(self) -> None:
        """Computes the scales of weights that have changed; collective. Full parameters must be back in shards."""
        stamps, model = self._now(), self._model()
        if stamps != self._stamps and model is not None:
            import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(model)
            self._stamps = stamps

    def check(self) -> None:
        """Drops scales of other values than the weights have now; to be called before a forward."""
        if self._stamps != self._now():
            for weight in self._weights:
                weight._local_tensor._precomputed_scale = None

    def _now(self) -> list[int]:
        """How often each weight was changed, as itself and as the part of it that is here."""
        return [weight._version + weight._local_tensor._version for weight in self._weights]
