"""Options, degrees, recipes and compilation from the configuration, for calls that pass none."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, final

from accel_launch.config import AccelConfig, settings
from accel_launch.launch.parallelism_degrees import degrees
from accel_state import ParallelismConfig
from accel_state.parallelism.config import AXIS_OPTIONS, MESH_AXES

if TYPE_CHECKING:
    from accel_backends import TorchDynamoPlugin
    from accel_precision import AORecipeKwargs, TERecipeKwargs


@final
@dataclass(frozen=True, slots=True)
class GivenOptions:
    """Options of a backend that a switch of the configuration requests, by field, and the origin of each."""

    backend: str
    origin: str
    values: Mapping[str, object]
    sources: Mapping[str, str]


def options_from_settings(config: AccelConfig) -> Iterator[GivenOptions]:
    """Yields the given options of each backend whose switch (``use_<name>``) is on."""
    for switch in settings().values():
        if not switch.facts.strategy or not getattr(config, switch.name):
            continue
        given = [
            row
            for row in settings().values()
            if row.facts.needs == switch.name and not row.facts.launch_only and config.is_given(row.name)
        ]
        yield GivenOptions(
            backend=switch.facts.strategy,
            origin=f"{switch.name} ({config.origin(switch.name)})",
            values={row.option: getattr(config, row.name) for row in given},
            sources={row.option: f"{config.origin(row.name)} ({row.name})" for row in given},
        )


def degrees_and_open_axes(config: AccelConfig) -> tuple[ParallelismConfig, frozenset[str]]:
    """Degrees of the configuration, and the axes whose degree is not given there."""
    found = degrees_of(config)
    given = {axis for axis in MESH_AXES if config.is_given(f"parallelism_config_{axis}_size")}
    return found or ParallelismConfig(), frozenset(MESH_AXES) - (given if found is not None else set())


def degrees_of(config: AccelConfig) -> ParallelismConfig | None:
    """Given degrees of parallelism, with the options of their axes; None without any."""
    given: dict[str, Any] = degrees(config)
    if not given:
        return None
    for axis, kind in AXIS_OPTIONS.items():
        options = {field.name: given.pop(field.name) for field in fields(kind) if field.name in given}
        if options:
            given[f"{axis}_handler"] = kind(**options)
    return ParallelismConfig(**given)


def fp8_recipe(config: AccelConfig, env: Mapping[str, str]) -> "AORecipeKwargs | TERecipeKwargs | None":
    """Recipe of ``mixed_precision=fp8`` from settings and variables; None at another precision."""
    if config.mixed_precision != "fp8":
        return None
    from accel_precision.recipes import recipe_from_env

    default = {settings()["fp8_backend"].facts.env[0]: config.fp8_backend}
    return recipe_from_env({**default, **env, **config.variables()})  # type: ignore[return-value]


def compilation_of(config: AccelConfig) -> "TorchDynamoPlugin | None":
    """Options of compilation; None if nothing is compiled."""
    if config.dynamo_backend == "no":
        return None
    from accel_backends import TorchDynamoPlugin

    return TorchDynamoPlugin(
        backend=config.dynamo_backend,
        mode=config.dynamo_mode if config.is_given("dynamo_mode") else None,
        fullgraph=config.dynamo_use_fullgraph,
        dynamic=config.dynamo_use_dynamic,
        use_regional_compilation=config.dynamo_use_regional_compilation,
    )
