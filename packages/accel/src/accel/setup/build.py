"""Builds the parts of an Accelerator, in the order of their dependencies."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from accel.loop.accumulator import GradientAccumulationPlugin
from accel.setup.kwargs_handlers import Handlers, ProjectConfiguration, sort_handlers
from accel.setup.plugins_from_config import (
    compilation_of,
    deepspeed_options,
    degrees_of,
    fp8_recipe,
    fsdp_options,
    named_backend,
)
from accel.setup.resolve_strategy import (
    agreed,
    apply_degrees,
    fitting,
    requested_auto,
    requested_deepspeed,
    requested_strategy,
)
from accel_backends import BackendConfig, Choice, Run, load_backend, select_backend
from accel_data.options import LoaderOptions
from accel_launch.config import AccelConfig, resolve_config
from accel_planner.auto import AutoStrategy, Undecided, waiting
from accel_precision import AutocastKwargs, PrecisionPolicy
from accel_state import ParallelismConfig, Session, Topology
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_backends import Backend, FSDPConfig, TorchDynamoPlugin
    from accel_deepspeed import DeepSpeedConfig


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
    fsdp: "FSDPConfig | Mapping[str, Any] | None" = None,
    deepspeed: "DeepSpeedConfig | Mapping[str, Any] | None" = None,
) -> Components:
    """Resolves the configuration, opens the session and the backend; nothing is opened if a setting cannot work.

    Raises:
        ConfigError: a setting cannot work, alone or with the others.
        SessionError: the other processes cannot be reached.
    """
    sorted_handlers = sort_handlers(handlers)
    config = resolve_config({name: value for name, value in call.items() if isinstance(value, str | int)}, os.environ)
    engine = requested_deepspeed(
        call["backend"] if isinstance(call["backend"], BackendConfig) else named_backend(config),
        deepspeed_options(config) if deepspeed is None and fsdp is None and call["backend"] is None else deepspeed,
        fsdp,
    )
    implied = engine.implied() if engine is not None else {}
    config = agreed(config, implied)
    steps = call["gradient_accumulation_steps"]
    if steps is None and "gradient_accumulation_steps" in implied:
        steps = implied["gradient_accumulation_steps"].value
    accumulating = accumulation_of(steps, accumulation, config)
    process_group = sorted_handlers.process_group
    with ExitStack() as on_failure:
        session = on_failure.enter_context(
            Session.open(
                cpu=config.cpu,
                device=config.device,
                backend=process_group.backend,
                timeout=process_group.timeout or config.timeout,
                init_method=process_group.init_method,
                debug=config.debug,
            )
        )
        given = call["backend"] if isinstance(call["backend"], BackendConfig) else named_backend(config)
        open_engine = engine if engine is not None and engine.chooses_stage else None
        auto = AutoStrategy(among=open_engine) if open_engine else requested_auto(given, fsdp, deepspeed, parallelism)
        given = given if auto is None else None
        if fsdp is None and call["backend"] is None:
            fsdp = fsdp_options(config)
        parallelism = parallelism or degrees_of(config)
        apply_degrees(engine, parallelism)
        variables = {**os.environ, **config.variables()}
        asked = (
            (None if open_engine else engine)
            or requested_strategy(given, fsdp, parallelism, variables)
            or sorted_handlers.ddp
        )
        asked = asked.on(session.device.type) if isinstance(asked, BackendConfig) else asked
        choice = select_backend(session.topology, session.device, asked)
        policy = policy_of(call["mixed_precision"], config, sorted_handlers, device_type=session.device.type)

        backend_type = load_backend(choice.name)

        def open_backend(name: str, options: BackendConfig | None) -> "Backend":
            return load_backend(name)(run_of(session, policy, parallelism, sorted_handlers), options)

        alone = session.world_size == 1
        backend = open_backend(choice.name, options_of(asked, sorted_handlers.ddp, backend_type, alone=alone))
        parts = Components(
            config=config,
            handlers=sorted_handlers,
            session=session,
            policy=policy,
            parallelism=fitting(parallelism, session.topology, backend),
            choice=choice if auto is None else waiting(choice),
            backend=backend,
            undecided=None if auto is None else Undecided(auto, open_backend, sorted_handlers.ddp),
            accumulation=accumulating,
            loading=loading_of(*loading, num_nodes=session.topology.num_nodes),
            project=project_of(project, config.project_dir),
        )
        on_failure.pop_all()
    if config.enable_cpu_affinity:
        keep_to_cores(session.topology, session.device.type)
    if config.seed is not None:
        from accel_state.rng import set_seed

        set_seed(config.seed)
    return parts


def run_of(session: Session, policy: PrecisionPolicy, parallelism: ParallelismConfig | None, handlers: Handlers) -> Run:
    """Run that backends are opened for."""
    autocast = handlers.autocast or AutocastKwargs()
    return Run(session, policy, parallelism or ParallelismConfig(), autocast, handlers.scaler)


def policy_of(asked: object, config: AccelConfig, handlers: Handlers, *, device_type: str) -> PrecisionPolicy:
    """Precision policy: the given one, or that of the configuration, with the fp8 recipe if there is one."""
    return PrecisionPolicy.parse(
        asked if isinstance(asked, PrecisionPolicy) else config.mixed_precision,
        device_type=device_type,
        fp8=handlers.fp8 or fp8_recipe(config, os.environ),  # type: ignore[arg-type]
    )


def keep_to_cores(topology: Topology, device_type: str) -> None:
    """Binds this process to the cores next to its GPU; without one, to its share of the available cores."""
    from accel_state.device.gpus import set_numa_affinity

    if device_type == "cuda":
        set_numa_affinity(topology.local_rank)
    elif hasattr(os, "sched_setaffinity"):
        mine = cores_of(sorted(os.sched_getaffinity(0)), topology.local_rank, topology.local_world_size)
        os.sched_setaffinity(0, mine)


def cores_of(cores: Sequence[int], local_rank: int, count: int) -> list[int]:
    """Share of neighbouring ``cores`` for one of ``count`` processes; at least one core, shared if too few."""
    if len(cores) < count:
        return [cores[local_rank % len(cores)]]
    return list(cores[local_rank * len(cores) // count : (local_rank + 1) * len(cores) // count])


def options_of(
    asked: BackendConfig | str | None, ddp: BackendConfig | None, backend: "type[Backend]", *, alone: bool
) -> BackendConfig | None:
    """The given options that a backend takes; None: its defaults.

    A single process ignores options of DDP, so that a script which passes them also runs on one process.

    Raises:
        ConfigError: ``DistributedDataParallelKwargs`` with a strategy that cannot apply them.
    """
    if ddp is not None and not alone and not isinstance(ddp, backend.Config):
        raise ConfigError(
            f"DistributedDataParallelKwargs were given, but the strategy is {backend.name!r}; leave them out, or use "
            "strategy='ddp'"
        )
    return next((options for options in (asked, ddp) if isinstance(options, backend.Config)), None)


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
