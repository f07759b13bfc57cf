"""One strategy from all that requests it: ``requested`` finds the request, ``resolve`` says what it means for a run."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

from accel.setup.plugins_from_config import options_from_settings
from accel_backends import BackendConfig, Choice, build_options, load_backend, select_backend
from accel_backends.core.config import Resolution, Stated, StrategyFacts
from accel_backends.core.select import check_axes
from accel_launch.config import AccelConfig, Origin
from accel_planner.auto import AutoStrategy, as_auto, waiting
from accel_state.errors import ConfigError
from accel_state.parallelism.axis_options import TorchTensorParallelPlugin

_TENSOR_PARALLEL: Final = "torch_tp_plugin"


@final
@dataclass(frozen=True, slots=True)
class StrategyRequest:
    """The strategy that a run requests.

    Attributes:
        asked: options, or only the name of a backend; None: nothing names a strategy.
        preferred: options that apply if their backend trains (from ``kwargs_handlers``).
        degrees: degrees by axis that plugins of single axes give.
    """

    asked: BackendConfig | str | None = None
    preferred: BackendConfig | None = None
    degrees: Mapping[str, Stated] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class ResolvedStrategy:
    """How a run trains.

    Attributes:
        choice: name of the backend, with reasons.
        resolution: options of the backend, degrees, and the settings that the options imply.
        auto: the planner's options, if it replaces the backend when the first model is prepared.
    """

    choice: Choice
    resolution: Resolution
    auto: AutoStrategy | None = None


@final
@dataclass(frozen=True, slots=True)
class _Claim:
    """One place that requests a strategy: its name in messages, and what it requests."""

    origin: str
    asked: BackendConfig | str

    @property
    def backend(self) -> str:
        return self.asked if isinstance(self.asked, str) else self.asked.backend

    def __str__(self) -> str:
        return self.origin if isinstance(self.asked, str) else f"{self.origin}, whose strategy is {self.backend!r},"


def requested(
    strategy: BackendConfig | str | None,
    plugins: Mapping[str, object],
    config: AccelConfig,
    preferred: BackendConfig | None = None,
) -> StrategyRequest:
    """The one strategy that a call and the configuration request.

    Options in the configuration count if the call has neither a strategy nor a plugin. A plugin's argument is named
    after its backend: ``<backend>_plugin``, or ``<backend>_plugins`` for several by name; ``torch_tp_plugin`` has a
    degree.

    Raises:
        ConfigError: two places request different strategies, or both give options; names both.
        BackendError: the backend of a plugin is not installed.
    """
    degrees = _degrees(plugins.get(_TENSOR_PARALLEL))
    plugins = {name: value for name, value in plugins.items() if name != _TENSOR_PARALLEL}
    claims = [*_claimed_by_strategy(strategy, config)]
    claims += [_of_plugin(name, value) for name, value in plugins.items() if value is not None]
    if strategy is None and not any(value is not None for value in plugins.values()):
        claims += [
            _Claim(one.origin, load_backend(one.backend).Config.build(one.values, sources=one.sources))
            for one in options_from_settings(config)
        ]
    with_options = [claim for claim in claims if isinstance(claim.asked, BackendConfig)]
    clash = with_options[:2] if len(with_options) > 1 else [one for one in claims if one.backend != claims[0].backend]
    if clash:
        first, second = clash if len(clash) > 1 else (claims[0], clash[0])
        raise ConfigError(f"{first} and {second} were both given; leave one of them out")
    chosen = next(iter(with_options or claims), None)
    return StrategyRequest(None if chosen is None else chosen.asked, preferred, degrees)


def resolve(request: StrategyRequest, facts: StrategyFacts) -> ResolvedStrategy:
    """What a request means for a run; pure, so all ranks find the same.

    Raises:
        ConfigError: an option, a setting and a degree contradict each other, or the backend does not serve an axis.
        BackendError: there is no such backend.
        TopologyError: the product of the degrees is not the number of processes.
    """
    facts, implied = _with_degrees(facts, request.degrees)
    auto = as_auto(request.asked)
    asked = request.asked if auto is None else auto
    if isinstance(asked, BackendConfig) and asked.planned:
        return _until_planned(asked, request, facts)
    parallelism = facts.parallelism
    if facts.topology.world_size % parallelism.total_size:
        parallelism.fitted(facts.topology.world_size)
    choice = select_backend(facts.topology, facts.device, asked, axes=parallelism.active_mesh_dims)
    config = _preferred(request.preferred, choice, facts)
    if isinstance(asked, BackendConfig) and choice.name == asked.backend:
        config = asked
    elif config is None:
        config = build_options(load_backend(choice.name), {})
    check_axes(choice.name, config, parallelism)
    resolution = config.resolve(facts)
    facts.agree(resolution.implied)
    name = resolution.config.backend or choice.name
    served = resolution.parallelism.served_by(name)
    implied = {**implied, **resolution.implied}
    return ResolvedStrategy(
        Choice(name, (*choice.reasons, *resolution.reasons)),
        dataclasses.replace(resolution, parallelism=served, implied=implied),
    )


def with_implied(config: AccelConfig, implied: Mapping[str, Stated]) -> AccelConfig:
    """Adds the settings that a strategy's options imply to the configuration, where they are not given."""
    missing = {name: said for name, said in implied.items() if not config.is_given(name)}
    origins = {**config.origins, **{name: Origin("call", said.origin) for name, said in missing.items()}}
    values: dict[str, Any] = {name: said.value for name, said in missing.items()}
    return dataclasses.replace(config, origins=origins, **values) if values else config


def _claimed_by_strategy(strategy: BackendConfig | str | None, config: AccelConfig) -> Iterator[_Claim]:
    if strategy is not None:
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        yield _Claim(f"strategy={name!r}", strategy)
    elif config.backend is not None:
        yield _Claim(f"backend={config.backend!r} ({config.origin('backend')})", config.backend)


def _of_plugin(argument: str, value: Any) -> _Claim:
    if isinstance(value, BackendConfig):
        return _Claim(argument, value)
    backend, _, several = argument.partition("_plugin")
    options = load_backend(backend).Config
    return _Claim(argument, options.several(value) if several else options.build(value))


def _degrees(plugin: object) -> dict[str, Stated]:
    if plugin is None:
        return {}
    if not isinstance(plugin, TorchTensorParallelPlugin):
        raise ConfigError(
            f"{_TENSOR_PARALLEL} is {plugin!r}; expected a TorchTensorParallelPlugin, or None; nearest: "
            "TorchTensorParallelPlugin(tp_size=2)"
        )
    return {"tp": Stated(plugin.tp_size, f"{_TENSOR_PARALLEL} (call)")}


def _with_degrees(facts: StrategyFacts, degrees: Mapping[str, Stated]) -> tuple[StrategyFacts, Mapping[str, Stated]]:
    """Facts with the degrees that plugins give, and these as settings, where they were not given otherwise.

    Raises:
        ConfigError: a degree differs from that of ``parallelism_config`` or of the configuration; names both origins.
    """
    implied: dict[str, Stated] = {}
    for axis, said in degrees.items():
        setting, held = f"parallelism_config_{axis}_size", facts.parallelism.size(axis)
        if axis in facts.open_axes:
            sizes: dict[str, Any] = {f"{axis}_size": said.value}
            implied[setting] = said
            facts = dataclasses.replace(
                facts,
                parallelism=dataclasses.replace(facts.parallelism, **sizes),
                open_axes=facts.open_axes - {axis},
            )
        elif held != said.value:
            where = f"{axis}_size={held} (parallelism_config)"
            if facts.open_axes and setting in facts.given:
                where = f"{setting}={held} ({facts.given[setting].origin})"
            raise ConfigError(f"{where}, and {said.origin} says {said.value}; make them agree, or leave one out")
    return facts, implied


def _preferred(options: BackendConfig | None, choice: Choice, facts: StrategyFacts) -> BackendConfig | None:
    """Options from ``kwargs_handlers``; a single process ignores those of a backend that needs several ranks."""
    if options is None or options.backend == choice.name:
        return options
    if options.needs_ranks and facts.topology.world_size == 1:
        return None
    raise ConfigError(
        f"kwargs_handlers has {type(options).__name__}, but the strategy is {choice.name!r}; leave it out, or use "
        f"strategy={options.backend!r}"
    )


def _until_planned(asked: BackendConfig, request: StrategyRequest, facts: StrategyFacts) -> ResolvedStrategy:
    """The backend of a run without a model, until the planner completes the options."""
    if not isinstance(asked, AutoStrategy):
        check_axes(asked.backend, asked, facts.parallelism)
    implied = asked.resolve(facts).implied
    facts.agree(implied)
    start = resolve(StrategyRequest(preferred=request.preferred), facts)
    auto = asked if isinstance(asked, AutoStrategy) else AutoStrategy(among=asked)
    return ResolvedStrategy(waiting(start.choice), dataclasses.replace(start.resolution, implied=implied), auto)
