"""Converters of modules, found by the entry-point group ``accel.fp8``."""

from typing import Protocol, cast, runtime_checkable

from torch import nn

from accel_precision.errors import PrecisionError, did_you_mean
from accel_precision.facts import DeviceFacts
from accel_precision.recipes import Fp8Recipe

GROUP = "accel.fp8"


class ModuleConverter(Protocol):
    """Replaces modules of a model before wrapping; constructed as ``Converter(recipe, facts, sharded=...)``."""

    def convert(self, model: nn.Module) -> nn.Module:
        """Returns the model with modules replaced, in place if possible; parameters stay the same objects."""
        ...


class Follower(Protocol):
    """State beside sharded weights that depends on their values (for example fp8 scales)."""

    def renew(self) -> None:
        """Recomputes the state after an optimizer step. Collective: every rank of the group must call this."""
        ...

    def check(self) -> None:
        """Drops state that no longer fits the weights; called before a forward."""
        ...


@runtime_checkable
class FollowingConverter(ModuleConverter, Protocol):
    """A converter that needs a ``Follower`` once the converted model is sharded."""

    def follow(self, model: nn.Module) -> Follower | None:
        """Returns the follower of a converted and sharded model; None if the model needs none."""
        ...


class ConverterFactory(Protocol):
    """Type of an entry point of the group: a class that makes a converter for a recipe on a device."""

    def __call__(self, recipe: Fp8Recipe, facts: DeviceFacts, *, sharded: bool) -> ModuleConverter: ...


def installed_converters() -> tuple[str, ...]:
    """Returns the names in the entry-point group: the fp8 libraries that have a converter in this environment."""
    from importlib.metadata import entry_points

    return tuple(sorted(point.name for point in entry_points(group=GROUP)))


def load_converter(recipe: Fp8Recipe, facts: DeviceFacts, *, sharded: bool = False) -> ModuleConverter:
    """Returns the converter of the recipe's library. ``sharded``: FSDP will shard and all-gather the weights.

    Raises:
        PrecisionError: no installed package has an entry point for the library, or two have different ones; or the
            library itself is missing.
    """
    from importlib.metadata import entry_points

    found = {point.value: point for point in entry_points(group=GROUP, name=recipe.library)}
    if len(found) > 1:
        owners = " and ".join(
            f"{point.dist.name if point.dist else 'a package'} ({value})" for value, point in found.items()
        )
        raise PrecisionError(f"the fp8 converter {recipe.library!r} is claimed by {owners}; uninstall all but one")
    if not found:
        known = installed_converters()
        hint = did_you_mean(recipe.library, known)
        raise PrecisionError(f"no fp8 converter {recipe.library!r}; installed: {', '.join(known) or 'none'}{hint}")
    (point,) = found.values()
    return cast(ConverterFactory, point.load())(recipe, facts, sharded=sharded)
