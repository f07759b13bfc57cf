"""Options of autocast and of loss scaling, as passed in ``kwargs_handlers``."""

import copy
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from accel_precision.errors import PrecisionError


class KwargsHandler:
    """Base of the option dataclasses: conversion of their fields to keyword arguments."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns every field with a deep copy of its value."""
        return {f.name: copy.deepcopy(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]

    def to_kwargs(self) -> dict[str, Any]:
        """Returns the fields whose values differ from the defaults of the class."""
        given = self.to_dict()
        return {f.name: given[f.name] for f in fields(self) if given[f.name] != _default(f)}  # type: ignore[arg-type]


def _default(given: Field[Any]) -> Any:
    return given.default_factory() if given.default_factory is not MISSING else given.default


@dataclass(frozen=True, slots=True)
class AutocastKwargs(KwargsHandler):
    """Options of ``torch.autocast``: whether autocast is enabled, and whether it caches the weights that it casts.

    ``cache_enabled=None`` leaves torch's own default (on).
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass(frozen=True, slots=True)
class GradScalerKwargs(KwargsHandler):
    """Options of the fp16 loss scale.

    The scale starts at ``init_scale``. It is multiplied by ``backoff_factor`` after a step whose gradients overflowed,
    and by ``growth_factor`` after ``growth_interval`` consecutive steps without overflow. ``growth_factor=1.0``
    together with ``backoff_factor=1.0`` is a static scale. ``enabled=False`` turns scaling off.

    Raises:
        PrecisionError: a scale that is not positive, factors on the wrong side of one, an interval below one.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.init_scale < float("inf"):
            raise PrecisionError(f"init_scale is {self.init_scale}; a loss scale is a positive finite number")
        if self.growth_factor < 1.0:
            raise PrecisionError(
                f"growth_factor is {self.growth_factor}; it has to be at least 1 (1 is a static scale)"
            )
        if not 0.0 < self.backoff_factor <= 1.0:
            raise PrecisionError(
                f"backoff_factor is {self.backoff_factor}; it has to lie in (0, 1] (1 is a static scale)"
            )
        if self.growth_interval < 1:
            raise PrecisionError(f"growth_interval is {self.growth_interval}; it counts optimizer steps, at least 1")

    @property
    def static(self) -> bool:
        """Whether the scale never changes."""
        return self.growth_factor == 1.0 and self.backoff_factor == 1.0
