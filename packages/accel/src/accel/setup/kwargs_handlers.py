"""Options of the process group, and of the parts of a run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_backends import BackendConfig
    from accel_observe.profiling.profiler import ProfileKwargs
    from accel_precision import AutocastKwargs, GradScalerKwargs


@dataclass(frozen=True, slots=True)
class InitProcessGroupKwargs:
    """Options of the process group: backend, rendezvous, and timeout of collectives."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Handlers:
    """The ``kwargs_handlers`` of an Accelerator, a field for each kind."""

    process_group: InitProcessGroupKwargs = field(default_factory=InitProcessGroupKwargs)
    backend: "BackendConfig | None" = None
    scaler: "GradScalerKwargs | None" = None
    autocast: "AutocastKwargs | None" = None
    fp8: object | None = None
    profile: "ProfileKwargs | None" = None


def sort_handlers(handlers: Sequence[object] | None) -> Handlers:
    """Sorts handlers into their fields.

    Raises:
        ConfigError: an object that is not a handler, or two of one kind.
    """
    if not handlers:
        return Handlers()
    from accel_backends import BackendConfig
    from accel_observe.profiling.profiler import ProfileKwargs
    from accel_precision import (
        AORecipeKwargs,
        AutocastKwargs,
        FP8RecipeKwargs,
        GradScalerKwargs,
        TERecipeKwargs,
    )

    places: tuple[tuple[str, tuple[type, ...]], ...] = (
        ("process_group", (InitProcessGroupKwargs,)),
        ("backend", (BackendConfig,)),
        ("scaler", (GradScalerKwargs,)),
        ("autocast", (AutocastKwargs,)),
        ("fp8", (AORecipeKwargs, TERecipeKwargs, FP8RecipeKwargs)),
        ("profile", (ProfileKwargs,)),
    )
    found: dict[str, object] = {}
    for handler in handlers:
        name = next((name for name, kinds in places if isinstance(handler, kinds)), None)
        if name is None:
            raise ConfigError(
                f"kwargs_handlers holds a {type(handler).__name__}; it takes {_listed(places)}, one of each at most"
            )
        if name in found:
            raise ConfigError(f"You can only pass one {type(handler).__name__} in kwargs_handlers; got two")
        found[name] = handler
    return Handlers(**found)  # type: ignore[arg-type]


def _listed(places: Iterable[tuple[str, tuple[type, ...]]]) -> str:
    return ", ".join(kind.__name__ for _, kinds in places for kind in kinds)
