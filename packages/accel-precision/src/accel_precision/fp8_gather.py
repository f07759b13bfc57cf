"""Scales of weights that FSDP all-gathers in 8 bits, computed for all weights together after an optimizer step."""

from importlib import import_module
from typing import Any, final
from weakref import ref

from torch import nn

from accel_precision.private import shard_of


@final
class GatheredScales:
    """Float8 scales of all sharded weights, computed in one all-reduce per step, not in one per weight and forward.

    A scale is valid only for the values from which it was computed. Weights that were changed in another way since (a
    loaded state, an edit by the user) get a scale at each all-gather, until the next ``renew``. The model is held
    weakly.
    """

    def __init__(self, model: nn.Module) -> None:
        linear = import_module("torchao.float8.float8_linear").Float8Linear
        kind = import_module("torchao.float8.fsdp_utils").WeightWithDynamicFloat8CastTensor
        self._model = ref(model)
        self._weights: list[Any] = [
            module.weight
            for module in model.modules()
            if isinstance(module, linear) and isinstance(shard_of(module.weight), kind)
        ]
        self._stamps = self._now()

    def __bool__(self) -> bool:
        return bool(self._weights)

    def renew(self) -> None:
        """Computes the scales of weights that have changed. Full parameters must have been resharded.

        Collective: every rank of the group must call this.
        """
        stamps, model = self._now(), self._model()
        if stamps != self._stamps and model is not None:
            import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(model)
            self._stamps = stamps

    def check(self) -> None:
        """Drops the scales if weights have changed since the scales were computed; to be called before a forward."""
        if self._stamps != self._now():
            for weight in self._weights:
                shard_of(weight)._precomputed_scale = None

    def _now(self) -> list[int]:
        """Returns for each weight how often the DTensor and its local shard were changed in place."""
        return [weight._version + shard_of(weight)._version for weight in self._weights]
