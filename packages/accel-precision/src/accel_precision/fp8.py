"""Converters of modules, found by the entry-point group ``accel.fp8``."""

from difflib import get_close_matches
from typing import Protocol, cast, runtime_checkable

from torch import nn

from accel_precision.errors import PrecisionError
from accel_precision.facts import DeviceFacts
from accel_precision.recipes import Fp8Recipe

GROUP = "accel.fp8"


class ModuleConverter(Protocol):
    """Replaces modules of a model before it is wrapped; made as ``Converter(recipe, facts, sharded=...)``."""

    def convert(self, model: nn.Module) -> nn.Module:
        """The model with modules replaced, in place where it can; parameters stay the same objects."""
        ...


class Follower(Protocol):
    """Keeps something beside sharded weights that depends on their values."""

    def renew(self) -> None:
        """The weights were stepped: what depends on them is computed anew; collective."""
        ...

    def check(self) -> None:
        """A forward begins: what no longer fits the weights is dropped."""
        ...


@runtime_checkable
class FollowingConverter(ModuleConverter, Protocol):
    """A converter whose modules, once sharded, are to be followed from step to step."""

    def follow(self, model: nn.Module) -> Follower | None:
        """What follows a model that it has converted and a backend has sharded; None: there is nothing to follow."""
        ...


class ConverterFactory(Protocol):
    """What an entry point of the group names: a class that makes a converter for a recipe on a device."""

    def __call__(self, recipe: Fp8Recipe, facts: DeviceFacts, *, sharded: bool) -> ModuleConverter: ...


def installed_converters() -> tuple[str, ...]:
    """The names in the group: what can carry out a recipe in this environment."""
    from importlib.metadata import entry_points

    return tuple(sorted(point.name for point in entry_points(group=GROUP)))


def load_converter(recipe: Fp8Recipe, facts: DeviceFacts, *, sharded: bool = False) -> ModuleConverter:
    """The converter for the recipe's library; ``sharded`` says that weights will be sharded and gathered (FSDP).

    Raises:
        PrecisionError: no package here offers the library, or the library itself is missing.
    """
    from importlib.metadata import entry_points

    points = {point.name: point for point in entry_points(group=GROUP)}
    point = points.get(recipe.library)
    if point is None:
        near = get_close_matches(recipe.library, points, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PrecisionError(
            f"no fp8 converter {recipe.library!r}; installed: {', '.join(sorted(points)) or 'none'}{hint}"
        )
    return cast(ConverterFactory, point.load())(recipe, facts, sharded=sharded)
