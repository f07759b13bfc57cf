"""Builds the parts of an Accelerator, in the order of their dependencies."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from accel.loop.accumulator import GradientAccumulationPlugin
from accel.setup.kwargs_handlers import Handlers, sort_handlers
from accel.setup.plugins_from_config import compilation_of, degrees_and_open_axes, fp8_recipe
from accel.setup.resolve_strategy import requested, resolve, with_implied
from accel_backends import ActivationCheckpointing, Choice, Run, load_backend
from accel_backends.core.config import Resolution, Stated, StrategyFacts
from accel_backends.ops.activation_checkpointing import as_checkpointing
from accel_ckpt.series.project import ProjectConfiguration
from accel_data.options import LoaderOptions
from accel_launch.config import AccelConfig, resolve_config, settings
from accel_planner.auto import Undecided
from accel_precision import AutocastKwargs, PrecisionPolicy
from accel_state import Device, ParallelismConfig, Session, Topology
from accel_state.environment import usable_cpus
from accel_state.errors import ConfigError
from accel_state.session import locate

if TYPE_CHECKING:
    from accel_backends import Backend, BackendConfig, TorchDynamoPlugin


@final
@dataclass(frozen=True, slots=True)
class Components:
    """The parts of an Accelerator."""

    config: AccelConfig
    handlers: Handlers
    session: Session
    policy: PrecisionPolicy
    parallelism: ParallelismConfig
    choice: Choice
    backend: "Backend"
    accumulation: GradientAccumulationPlugin
    loading: LoaderOptions
    project: ProjectConfiguration
    undecided: Undecided | None = None


def open_parts(
    call: Mapping[str, object],
    *,
    accumulation: GradientAccumulationPlugin | None,
    handlers: Sequence[object] | None,
    loading: tuple[LoaderOptions | None, bool | None],
    parallelism: ParallelismConfig | None,
    project: ProjectConfiguration | None,
    strategy: "str | BackendConfig | None" = None,
    plugins: Mapping[str, object] | None = None,
) -> Components:
    """Resolves the configuration and the strategy, then opens the session and the backend.

    Nothing is opened if a setting cannot work. ``call``: arguments of the Accelerator that have a setting of the same
    name; ``plugins``: options of backends, by the names of their arguments.

    Raises:
        ConfigError: a setting cannot work, alone or with the others.
        SessionError: the other processes cannot be reached.
    """
    sorted_handlers = sort_handlers(handlers)
    config = resolve_config({name: value for name, value in call.items() if isinstance(value, str | int)}, os.environ)
    request = requested(strategy, plugins or {}, config, sorted_handlers.backend)
    facts = facts_of(config, parallelism)
    resolved = resolve(request, facts)
    implied = resolved.resolution.implied
    config = with_implied(config, implied)
    steps = call["gradient_accumulation_steps"]
    if steps is None and "gradient_accumulation_steps" in implied:
        steps = implied["gradient_accumulation_steps"].value
    accumulating = accumulation_of(steps, accumulation, config)
    asked = call.get("activation_checkpointing")
    is_setting = asked is None or isinstance(asked, str | int)
    checkpointing = as_checkpointing(config.activation_checkpointing if is_setting else asked)
    if checkpointing is not None and resolved.auto is not None:
        among = resolved.auto.among
        raise ConfigError(
            "strategy 'auto' chooses activation checkpointing itself, by memory; drop activation_checkpointing, or "
            "name a strategy"
            if among is None
            else f"the planner completes {type(among).__name__} and does not see activation_checkpointing of the "
            "Accelerator; drop it (FSDP has an option of that name), or give all values instead of 'auto'"
        )
    process_group = sorted_handlers.process_group
    is_first = Session.current() is None  # a further Accelerator would bind the process to a share of its share
    with ExitStack() as on_failure:
        session = on_failure.enter_context(
            Session.open(
                topology=facts.topology,
                device=facts.device,
                backend=process_group.backend,
                timeout=process_group.timeout or config.timeout,
                init_method=process_group.init_method,
                debug=config.debug,
            )
        )
        policy = policy_of(call["mixed_precision"], config, sorted_handlers, device_type=session.device.type)

        def open_backend(name: str, resolution: Resolution) -> "Backend":
            run = run_of(session, policy, resolution.parallelism, sorted_handlers, checkpointing)
            return load_backend(name)(run, resolution.config)

        parts = Components(
            config=config,
            handlers=sorted_handlers,
            session=session,
            policy=policy,
            parallelism=resolved.resolution.parallelism,
            choice=resolved.choice,
            backend=open_backend(resolved.choice.name, resolved.resolution),
            undecided=None
            if resolved.auto is None
            else Undecided(resolved.auto, facts, open_backend, sorted_handlers.backend),
            accumulation=accumulating,
            loading=loading_of(*loading, num_nodes=session.topology.num_nodes),
            project=project_of(project, config.project_dir),
        )
        on_failure.pop_all()
    if config.enable_cpu_affinity and is_first:
        keep_to_cores(session.topology, session.device)
    if config.seed is not None:
        from accel_state.rng import set_seed

        set_seed(config.seed)
    return parts


def run_of(
    session: Session,
    policy: PrecisionPolicy,
    parallelism: ParallelismConfig,
    handlers: Handlers,
    activation_checkpointing: ActivationCheckpointing | None = None,
) -> Run:
    """Run that a backend is opened for."""
    autocast = handlers.autocast or AutocastKwargs()
    return Run(
        session,
        policy,
        parallelism,
        autocast=autocast,
        scaler=handlers.scaler,
        activation_checkpointing=activation_checkpointing,
    )


def facts_of(config: AccelConfig, parallelism: ParallelismConfig | None) -> StrategyFacts:
    """Facts that a strategy is resolved from; degrees of a call override those of the configuration."""
    topology, device = locate(cpu=config.cpu, device=config.device)
    degrees = (parallelism, frozenset[str]()) if parallelism is not None else degrees_and_open_axes(config)
    given = {
        name: Stated(getattr(config, name), str(config.origin(name))) for name in settings() if config.is_given(name)
    }
    return StrategyFacts(topology, device, *degrees, given)


def policy_of(asked: object, config: AccelConfig, handlers: Handlers, *, device_type: str) -> PrecisionPolicy:
    """Precision policy: the given one, or that of the configuration, with the fp8 recipe if there is one."""
    return PrecisionPolicy.parse(
        asked if isinstance(asked, PrecisionPolicy) else config.mixed_precision,
        device_type=device_type,
        fp8=handlers.fp8 or fp8_recipe(config, os.environ),  # type: ignore[arg-type]
    )


def keep_to_cores(topology: Topology, device: Device) -> None:
    """Binds this process to the cores next to its device; if no core is nearer, to its share of the available cores."""
    if not device.keep_to_near_cores() and hasattr(os, "sched_setaffinity"):
        mine = cores_of(usable_cpus(), topology.local_rank, topology.local_world_size)
        os.sched_setaffinity(0, mine)


def cores_of(cores: Sequence[int], local_rank: int, count: int) -> list[int]:
    """Share of neighbouring ``cores`` for one of ``count`` processes; at least one core, shared if too few."""
    if len(cores) < count:
        return [cores[local_rank % len(cores)]]
    return list(cores[local_rank * len(cores) // count : (local_rank + 1) * len(cores) // count])


def accumulation_of(
    steps: object, plugin: GradientAccumulationPlugin | None, config: AccelConfig
) -> GradientAccumulationPlugin:
    """The plugin, or one made from the number of steps; both at once are refused unless they agree."""
    if plugin is None:
        return GradientAccumulationPlugin(num_steps=config.gradient_accumulation_steps)
    if steps is not None and steps != plugin.num_steps:
        raise ConfigError(
            f"You can only pass one of gradient_accumulation_steps ({steps}) and gradient_accumulation_plugin "
            f"(num_steps={plugin.num_steps})"
        )
    return plugin


def loading_of(options: LoaderOptions | None, split_batches: bool | None, *, num_nodes: int) -> LoaderOptions:
    """Loader options, with ``split_batches`` if it was given separately, and the number of nodes of this run."""
    options = options or LoaderOptions()
    if options.sharding == "node" and options.num_nodes == 1:
        options = dataclasses.replace(options, num_nodes=num_nodes)
    return options if split_batches is None else dataclasses.replace(options, split_batches=split_batches)


def project_of(project: ProjectConfiguration | None, folder: str | None) -> ProjectConfiguration:
    """The project, with ``folder`` filled in if it has none."""
    if project is None:
        return ProjectConfiguration(folder)
    if project.project_dir is None and folder is not None:
        project.set_directories(folder)
    return project


def dynamo_of(backend: object, plugin: "TorchDynamoPlugin | None", config: AccelConfig) -> "TorchDynamoPlugin | None":
    """Requested compilation, by name or as a plugin; the call overrides the configuration. None without one."""
    if backend is None or plugin is not None:
        if backend is not None:
            raise ConfigError("You can only pass one of dynamo_backend and dynamo_plugin")
        return plugin or compilation_of(config)
    from accel_backends import TorchDynamoPlugin

    return TorchDynamoPlugin(backend=str(backend))
