"""Resolution of the strategy that an Accelerator's arguments request together, and checks that the rest fits it."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from accel_backends.core.config import BackendConfig, Implied
from accel_launch.config import AccelConfig, Origin
from accel_planner.auto import AutoStrategy, as_auto
from accel_state import ParallelismConfig, Topology
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_backends import Backend, FSDPConfig
    from accel_deepspeed import DeepSpeedConfig

USE_FSDP = "ACCELERATE_USE_FSDP"
_SHARDS = ("fsdp", "fsdp1")
_NEAREST: Mapping[tuple[str, ...], str] = {
    ("dp_shard",): "strategy='fsdp'",
    ("sp",): "strategy='deepspeed'",
    ("tp",): "strategy='deepspeed'",
}


def requested_strategy(
    strategy: "BackendConfig | str | None",
    plugin: "FSDPConfig | Mapping[str, object] | None",
    parallelism: ParallelismConfig | None,
    env: Mapping[str, str],
) -> "BackendConfig | str | None":
    """The strategy that ``strategy``, a sharding plugin, degrees and ``ACCELERATE_USE_FSDP`` request, or None.

    Degrees are added to the plugin, so that a backend has all its options in one object.

    Raises:
        ConfigError: they contradict each other.
    """
    if plugin is None and strategy is None and env.get(USE_FSDP, "").lower() in ("1", "true", "yes", "on"):
        plugin = {}
    degrees = _degrees(parallelism)
    if plugin is None and not ((degrees.get("shard_size", 1) > 1 and strategy is None) or _is_sharding(strategy)):
        return strategy
    from accel_backends import FSDPConfig, build_options, load_backend

    if plugin is not None:
        config = FSDPConfig.build(plugin)
        if strategy is not None and strategy != config.backend:
            name = strategy if isinstance(strategy, str) else type(strategy).__name__
            raise ConfigError(
                f"strategy={name!r} and fsdp_plugin, whose strategy is {config.backend!r}, were both given; leave "
                "one of them out"
            )
    elif isinstance(strategy, FSDPConfig):
        config = strategy
    else:
        config = cast(FSDPConfig, build_options(load_backend(strategy if isinstance(strategy, str) else "fsdp"), {}))
    return _with_degrees(config, degrees)


def requested_deepspeed(
    strategy: "BackendConfig | str | None", plugin: "DeepSpeedConfig | Mapping[str, Any] | None", others: object
) -> "DeepSpeedConfig | None":
    """DeepSpeed's options, if ``strategy`` or ``deepspeed_plugin`` requests DeepSpeed; ``others`` is another plugin.

    Raises:
        ConfigError: another strategy is requested too.
    """
    name = strategy if isinstance(strategy, str) else getattr(strategy, "backend", None)
    if plugin is None and name != "deepspeed":
        return None
    from accel_deepspeed import DeepSpeedConfig

    if others is not None:
        raise ConfigError("deepspeed_plugin and fsdp_plugin were both given; leave one of them out")
    if plugin is None:
        return strategy if isinstance(strategy, DeepSpeedConfig) else DeepSpeedConfig()
    if strategy is not None and (name != "deepspeed" or isinstance(strategy, DeepSpeedConfig)):
        raise ConfigError(
            f"strategy={name!r} and deepspeed_plugin, whose strategy is 'deepspeed', were both given; leave one of "
            "them out"
        )
    return DeepSpeedConfig.build(plugin)


def several_deepspeed(
    plugin: "DeepSpeedConfig | Mapping[str, Any] | None",
    plugins: "Mapping[str, DeepSpeedConfig | Mapping[str, Any]] | None",
) -> "DeepSpeedConfig | Mapping[str, Any] | None":
    """The plugin, or the first of several.

    Raises:
        ConfigError: both are given.
    """
    if plugins is None:
        return plugin
    if plugin is not None:
        raise ConfigError("deepspeed_plugin and deepspeed_plugins were both given; leave one of them out")
    from accel_deepspeed import DeepSpeedConfig

    return DeepSpeedConfig.several(plugins)


def agreed(config: AccelConfig, implied: Mapping[str, Implied]) -> AccelConfig:
    """Adds the settings that a backend's options imply to the configuration, if they are not given.

    Raises:
        ConfigError: a given setting contradicts an implied one; names both origins.
    """
    for name, said in implied.items():
        own = getattr(config, name)
        if config.is_given(name) and own != said.value:
            raise ConfigError(
                f"{name} is {own!r} ({config.origin(name)}), and {said.origin} says {said.value!r}; make them agree"
            )
    missing = {name: said for name, said in implied.items() if not config.is_given(name)}
    origins = {**config.origins, **{name: Origin("call", said.origin) for name, said in missing.items()}}
    values: dict[str, Any] = {name: said.value for name, said in missing.items()}
    return dataclasses.replace(config, origins=origins, **values) if values else config


def requested_auto(strategy: "BackendConfig | str | None", *others: object) -> AutoStrategy | None:
    """Options of ``strategy="auto"``, if it is requested.

    Raises:
        ConfigError: an option that the planner is to choose was given too.
    """
    auto = as_auto(strategy)
    given = [type(other).__name__ for other in others if other is not None]
    if auto is not None and given:
        raise ConfigError(
            f"strategy 'auto' chooses how a model is spread over processes, and {given[0]} says it already; leave one "
            "of them out"
        )
    return auto


def apply_degrees(options: "DeepSpeedConfig | None", parallelism: ParallelismConfig | None) -> None:
    """Sets the sequence-parallel and tensor-parallel degrees in DeepSpeed's options, if DeepSpeed trains.

    Raises:
        ConfigError: the options have other degrees.
    """
    if options is not None:
        wanted = parallelism or ParallelismConfig()
        handler = wanted.sp_handler
        attention = None if handler is None else handler.sp_attn_implementation
        options.share(sequences=wanted.size("sp"), layers=wanted.size("tp"), attention=attention)


def fitting(parallelism: ParallelismConfig | None, topology: Topology, backend: "Backend") -> ParallelismConfig:
    """Degrees of parallelism as the backend applies them; the remaining ranks are data-parallel.

    Raises:
        TopologyError: their product is not the number of processes.
        ConfigError: a degree needs another backend.
    """
    replicas, shards = backend.layout.degrees
    given = parallelism or ParallelismConfig()
    if given.data_parallel_size == 1 and given.size("tp") == backend.layout.shared_degrees.get("tp", 1) > 1:
        # the backend shards within its own groups; ranks of different groups read different data
        given = dataclasses.replace(given, dp_shard_size=shards)
    fitted = given.fitted(topology.world_size)
    able = ("dp_replicate", "dp_shard") if backend.capabilities.sharded else ("dp_replicate",)
    other = [axis for axis in fitted.active_mesh_dims if axis not in (*able, *backend.layout.shared_degrees)]
    if other:
        nearest = _NEAREST.get(tuple(other), f"dp_replicate_size={topology.world_size}")
        raise ConfigError(
            f"{', '.join(f'{axis}_size={fitted.size(axis)}' for axis in other)}: backend {backend.name!r} cannot do "
            f"that; nearest: {nearest}"
        )
    return dataclasses.replace(fitted, dp_replicate_size=replicas, dp_shard_size=shards)


def _is_sharding(strategy: "BackendConfig | str | None") -> bool:
    return (strategy if isinstance(strategy, str) else getattr(strategy, "backend", None)) in _SHARDS


def _degrees(parallelism: ParallelismConfig | None) -> dict[str, int]:
    """Given data-parallel degrees, by the names of the sharding options."""
    if parallelism is None or parallelism.total_size == 1:
        return {}
    return {"shard_size": parallelism.size("dp_shard"), "replicate_size": parallelism.size("dp_replicate")}


def _with_degrees(config: "FSDPConfig", degrees: Mapping[str, Any]) -> "FSDPConfig":
    for name, size in degrees.items():
        mine = getattr(config, name)
        if mine not in (None, size):
            raise ConfigError(
                f"parallelism_config has dp_{name}={size}, and the sharding options {name}={mine}; give one of them"
            )
    return dataclasses.replace(config, **degrees) if degrees else config
