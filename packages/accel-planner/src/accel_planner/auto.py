"""``strategy="auto"``: the planner chooses a strategy when the first model is prepared, the same on all ranks.

Strategies are backends with their options; degrees of model-parallel axes are proposed by ``select_axes`` alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, final

from accel_backends.core.config import BackendConfig, Resolution, StrategyFacts
from accel_state.errors import AccelError, ConfigError
from accel_state.parallelism.config import MESH_AXES

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_backends import Backend, Choice
    from accel_planner.candidate import Candidate
    from accel_planner.cost.hardware import Hardware
    from accel_precision import PrecisionPolicy
    from accel_state import Session


@final
@dataclass(slots=True)
class AutoStrategy(BackendConfig):
    """Options of ``strategy="auto"``.

    Attributes:
        sample: a batch as the loader yields it, with one process's batch size, or a function of ``batch_size`` and
            ``seq_length`` that makes one. None: the first samples of a loader that is prepared in the same call.
        batch_size: samples of a micro-batch, passed to a sample function or used to make up token ids.
        seq_length: tokens of a sample; token ids are made up if there is neither ``sample`` nor a loader.
        loss: function of the model and a batch; None guesses one.
        optimizer: kind of the optimizer, used if no optimizer is prepared in the same call.
        hardware: a description such as "8x80GB" with as many devices as processes; None: detected.
        margin: fraction of each device's memory that is to stay free.
        candidates: names of the strategies to choose from; None: all that are installed.
        among: options of one backend that are partly "auto"; only candidates that set those values are considered.
    """

    backend: ClassVar[str] = "auto"

    sample: Any = None
    batch_size: int | None = None
    seq_length: int | None = None
    loss: Callable[..., Any] | None = None
    optimizer: str = "adamw"
    hardware: "Hardware | str | None" = None
    margin: float = 0.1
    candidates: Sequence[str] | None = None
    among: BackendConfig | None = None

    @property
    def planned(self) -> bool:
        """Whether the planner completes the options: always."""
        return True

    def resolve(self, facts: StrategyFacts) -> Resolution:
        """Refuses given degrees, because the planner chooses them.

        Raises:
            ConfigError: a degree was given.
        """
        if facts.open_axes != frozenset(MESH_AXES):
            given = facts.parallelism
            sizes = ", ".join(f"{axis}_size={given.size(axis)}" for axis in given.active_mesh_dims)
            raise ConfigError(
                "strategy 'auto' chooses how a model is spread over processes, and ParallelismConfig says it already"
                f" ({sizes or 'all degrees 1'}); leave one of them out ('auto' chooses backends, `accel plan CONFIG` "
                "proposes degrees)"
            )
        return BackendConfig.resolve(self, facts)


@final
@dataclass(frozen=True, slots=True)
class Chosen:
    """A decision in the form that the main process broadcasts: the candidate, and the reasons for it."""

    candidate: "Candidate"
    reasons: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Undecided:
    """Deferred strategy: the choice is made when a model is prepared.

    Attributes:
        strategy: options of ``strategy="auto"``.
        facts: the run, for which the chosen options are resolved.
        opener: opens a backend, given its name and its resolved options.
        preferred: options that replace the planner's own if the planner chooses their backend.
    """

    strategy: AutoStrategy
    facts: StrategyFacts
    opener: Callable[[str, Resolution], "Backend"]
    preferred: BackendConfig | None = None

    def resolve(self, candidate: "Candidate") -> Resolution:
        """Returns the options of a candidate, resolved for the run."""
        from accel_backends.core.backend import build_options
        from accel_backends.core.registry import load_backend

        if self.strategy.among is not None:
            return self.strategy.among.resolve(replace(self.facts, plan=candidate.options))
        kind = load_backend(candidate.backend)
        options = self.preferred if isinstance(self.preferred, kind.Config) else build_options(kind, candidate.options)
        return options.resolve(self.facts)


def as_auto(strategy: object) -> AutoStrategy | None:
    """Returns the options of ``strategy="auto"``; None if another strategy was requested."""
    if isinstance(strategy, AutoStrategy):
        return strategy
    return AutoStrategy() if strategy == AutoStrategy.backend else None


def waiting(choice: "Choice") -> "Choice":
    """Returns ``choice`` with the reason that it holds only until a model is prepared."""
    return replace(choice, reasons=(*choice.reasons, "until a model is prepared: strategy 'auto' chooses then"))


def decide(
    strategy: AutoStrategy,
    session: "Session",
    policy: "PrecisionPolicy",
    *,
    models: Sequence["nn.Module"],
    optimizers: Sequence["Optimizer"],
    batch: Any = None,
) -> Chosen:
    """Chooses a candidate on the main process and broadcasts it to all ranks.

    Collective: every rank of the group must call this.

    Raises:
        PlanError: no candidate fits, or the model cannot be profiled; raised on every rank.
        ConfigError: the hardware description does not match the processes, or there are several models.
    """
    from accel_state.collectives.objects import all_gather_object
    from accel_state.collectives.tensors import agree

    group = session.group if session.world_size > 1 else None
    memory = min(all_gather_object(session.device.memory().total, group=group)) if group else None
    chosen: Chosen | None = None
    problem: Exception | None = None
    if session.is_main_process:
        try:
            chosen = _decided(strategy, session, policy, models, optimizers, batch, memory)
        except (AccelError, ValueError) as error:
            problem = error
    if group is not None:
        agree(problem, group=group)
        chosen = all_gather_object(chosen, group=group)[0]
    elif problem is not None:
        raise problem
    assert chosen is not None
    return chosen


def _decided(
    strategy: AutoStrategy,
    session: "Session",
    policy: "PrecisionPolicy",
    models: Sequence["nn.Module"],
    optimizers: Sequence["Optimizer"],
    batch: Any,
    memory: int | None,
) -> Chosen:
    from accel_planner.cost.optimizers import optimizer_facts
    from accel_planner.cost.plan import plan_all
    from accel_planner.cost.registry import load_cost_model
    from accel_planner.profile.profiler import profile_model
    from accel_planner.select import choose

    if len(models) != 1:
        raise ConfigError(
            f"strategy 'auto' looks at one model, and {len(models)} were given to prepare; name a strategy, or prepare "
            "the largest model first"
        )
    hardware = _hardware(strategy.hardware, session, memory)
    profile = profile_model(
        models[0],
        strategy.sample if strategy.sample is not None else batch,
        batch_size=strategy.batch_size,
        seq_length=strategy.seq_length,
        loss=strategy.loss,
        policy=policy,
        device_type=hardware.kind,
    )
    facts = optimizer_facts(
        optimizers[0] if optimizers else strategy.optimizer, profile.parameters, foreach=hardware.kind != "cpu"
    )
    found = able(hardware, profile.blocks, strategy.candidates, optimizer=facts.name)
    unable = {
        backend
        for backend in {candidate.backend for candidate in found}
        if not all(map(load_cost_model(backend).steps_with, optimizers))
    }
    found = [candidate for candidate in found if candidate.backend not in unable]
    if strategy.among is not None:
        found = completing(found, strategy.among, StrategyFacts(session.topology, session.device))
    plans = plan_all(profile, facts, hardware, found)
    decision = choose(plans, margin=strategy.margin)
    candidate = decision.plan.candidate
    chosen = f"strategy 'auto' chose {candidate.name}"
    return Chosen(candidate, (chosen, *decision.reasons, *decision.changes, *profile.notes))


def _hardware(described: "Hardware | str | None", session: "Session", memory: int | None) -> "Hardware":
    """The hardware of this run, as described or as detected; ``memory``: the smallest of all ranks' devices.

    Raises:
        ConfigError: the description does not match the processes.
    """
    from accel_planner.cost.hardware import Hardware, devices_of

    if described is None:
        hardware = Hardware.detect(session)
        return hardware if memory is None or hardware.kind == "cpu" else replace(hardware, memory=memory)
    if isinstance(described, str):
        described = Hardware.parse(described, nodes=session.topology.num_nodes)
    if described.ranks != devices_of(session):
        raise ConfigError(f"hardware={described} has {described.ranks} devices, and there are {devices_of(session)}")
    return replace(described, kind=session.device.type) if session.device.kind.together else described


def able(
    hardware: "Hardware", blocks: object, names: Sequence[str] | None = None, *, optimizer: str | None = None
) -> list["Candidate"]:
    """Returns the candidates whose backend is installed and supports the optimizer's class, restricted to ``names``."""
    from accel_backends.core.registry import installed_backends
    from accel_planner.candidate import named
    from accel_planner.cost.plan import candidates_on
    from accel_planner.cost.registry import load_cost_model

    found = [
        candidate
        for candidate in candidates_on(hardware, blocks=bool(blocks))
        if optimizer is None or candidate.takes(optimizer)
    ]
    installed = {
        backend
        for backend in {candidate.backend for candidate in found} & set(installed_backends())
        if (library := load_cost_model(backend).library) is None or find_spec(library) is not None
    }
    found = [candidate for candidate in found if candidate.backend in installed]
    return found if names is None else named(found, names)


def completing(candidates: Sequence["Candidate"], options: BackendConfig, facts: StrategyFacts) -> list["Candidate"]:
    """Returns the candidates that set the open values of ``options`` and change nothing else.

    Raises:
        ConfigError: there is no such candidate.
    """
    found = [
        candidate
        for candidate in candidates
        if candidate.backend == options.backend and not candidate.wraps_blocks and _fits(candidate, options, facts)
    ]
    if not found:
        raise ConfigError(
            f"{type(options).__name__} leaves no choice that can be carried out here: give its values instead of 'auto'"
        )
    return found


def _fits(candidate: "Candidate", options: BackendConfig, facts: StrategyFacts) -> bool:
    try:
        options.resolve(replace(facts, plan=candidate.options))
    except ConfigError:
        return False
    return True


def first_batch(loader: Any, share: int) -> Any:
    """First batch that a loader over a map-style dataset gives one of ``share`` processes; None for other loaders.

    So of a dataset with other keys than numbers from 0, which its sampler knows.

    Random states are restored, so reading the batch has no effect except on state that the dataset keeps itself.
    """
    from accel_state.rng import rng_state, set_rng_state

    dataset: Any = getattr(loader, "dataset", None)
    size = getattr(loader, "batch_size", None)
    if not size or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        return None
    before = rng_state()
    try:
        items = [dataset[index % len(dataset)] for index in range(max(1, size // share))]
    except (LookupError, TypeError):
        return None
    else:
        return loader.collate_fn(items)
    finally:
        set_rng_state(before)


def checkpoint_blocks(model: "nn.Module") -> None:
    """Makes backward recompute the activations of each repeated block."""
    from accel_backends.fsdp.config import FSDPConfig
    from accel_backends.fsdp.wrap_units import find_units
    from accel_backends.ops.activation_checkpointing import ActivationCheckpointing
    from accel_backends.ops.fqn import innermost

    root = innermost(model)
    ActivationCheckpointing().apply(root, find_units(root, FSDPConfig()).blocks)
