"""``strategy="auto"``: the planner chooses when the first model is prepared, on all ranks alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, final

from accel_backends.core.config import BackendConfig
from accel_state.errors import AccelError, ConfigError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_backends import Backend, Choice
    from accel_planner.candidate import Candidate
    from accel_planner.cost.hardware import Hardware
    from accel_planner.select import Decision
    from accel_precision import PrecisionPolicy
    from accel_state import Session


@final
@dataclass(slots=True)
class AutoStrategy(BackendConfig):
    """What ``strategy="auto"`` is told beyond what it finds out.

    Attributes:
        sample: a batch as the loader gives it, of one process's size, or a function of ``batch_size`` and
            ``seq_length``. None: the first samples of a loader that is prepared in the same call.
        batch_size: samples of a micro-batch, for a sample function or token ids.
        seq_length: tokens of a sample; without ``sample`` and loader, token ids are made up.
        loss: of the model and a batch; None guesses one.
        optimizer: kind of the optimizer, where none is prepared in the same call.
        hardware: a description such as "8x80GB", of as many devices as there are processes; None: found out.
        margin: part of each device's memory that is to stay free.
        candidates: names of strategies to choose from; None: all that are installed.
        among: options of one backend that leave something open: only what settles that is chosen from.
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


@final
@dataclass(frozen=True, slots=True)
class Chosen:
    """A decision as ranks tell it each other."""

    candidate: "Candidate"
    reasons: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Undecided:
    """A choice that waits for a model.

    Attributes:
        strategy: what it is told.
        opener: opens a backend by name with options.
        preferred: options to use in the place of the planner's own, should their backend be chosen.
    """

    strategy: AutoStrategy
    opener: Callable[[str, BackendConfig], "Backend"]
    preferred: BackendConfig | None = None

    def open(self, candidate: "Candidate") -> "Backend":
        """The backend of a candidate."""
        from accel_backends.core.registry import load_backend

        kind = load_backend(candidate.backend)
        if self.strategy.among is not None:
            return self.opener(candidate.backend, self.strategy.among.settled(candidate.options) or kind.options({}))
        options = self.preferred if isinstance(self.preferred, kind.Config) else kind.options(candidate.options)
        return self.opener(candidate.backend, options)


def as_auto(strategy: object) -> AutoStrategy | None:
    """The options of ``strategy="auto"``, if that is what was asked for."""
    if isinstance(strategy, AutoStrategy):
        return strategy
    return AutoStrategy() if strategy == AutoStrategy.backend else None


def waiting(choice: "Choice") -> "Choice":
    """The choice that holds until a model is prepared."""
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
    """The main process's decision, on every rank; collective.

    Raises:
        PlanError: nothing fits, or the model cannot be looked at; on every rank.
        ConfigError: the description does not fit the processes, or there are several models.
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
    from accel_backends.ops.optimizer_support import steps_by_element
    from accel_planner.cost.hardware import Hardware, devices_of
    from accel_planner.cost.model import plan_all
    from accel_planner.cost.optimizers import optimizer_facts
    from accel_planner.profile.profiler import profile_model

    if len(models) != 1:
        raise ConfigError(
            f"strategy 'auto' looks at one model, and {len(models)} were given to prepare; name a strategy, or prepare "
            "the largest model first"
        )
    described = strategy.hardware
    if isinstance(described, str):
        described = Hardware.parse(described, nodes=session.topology.num_nodes)
    if described is not None and described.ranks != devices_of(session):
        raise ConfigError(f"hardware={described} has {described.ranks} devices, and there are {devices_of(session)}")
    if described is not None and described.kind != session.device.type and session.device.kind.together:
        described = replace(described, kind=session.device.type)
    hardware = described or Hardware.detect(session)
    if described is None and memory is not None and hardware.kind != "cpu":
        hardware = replace(hardware, memory=memory)
    profile = profile_model(
        models[0],
        strategy.sample if strategy.sample is not None else batch,
        batch_size=strategy.batch_size,
        seq_length=strategy.seq_length,
        loss=strategy.loss,
        policy=policy,
    )
    facts = optimizer_facts(
        optimizers[0] if optimizers else strategy.optimizer, profile.parameters, foreach=hardware.kind != "cpu"
    )
    found = able(hardware, profile.blocks, strategy.candidates, optimizer=facts.name)
    if any(one.kind == "zero" for one in found) and not all(map(steps_by_element, optimizers)):
        found = [one for one in found if one.kind != "zero"]
    if strategy.among is not None:
        found = settling(found, strategy.among)
    plans = plan_all(profile, facts, hardware, found)
    return _told(_choose(plans, strategy.margin), profile.notes)


def able(
    hardware: "Hardware", blocks: object, names: Sequence[str] | None = None, *, optimizer: str | None = None
) -> list["Candidate"]:
    """The candidates whose backend is installed and takes the optimizer's class, or those of them that are named."""
    from accel_backends.core.registry import installed_backends
    from accel_planner.candidate import candidates, named

    known = set(installed_backends())
    found = [
        candidate
        for candidate in candidates(hardware.devices, hardware.nodes, blocks=bool(blocks), kind=hardware.kind)
        if candidate.backend in known
        and (candidate.needs is None or find_spec(candidate.needs) is not None)
        and (optimizer is None or candidate.takes(optimizer))
    ]
    return found if names is None else named(found, names)


def settling(candidates: Sequence["Candidate"], options: BackendConfig) -> list["Candidate"]:
    """The candidates that decide what ``options`` leave open, and nothing else.

    Raises:
        ConfigError: there is none.
    """
    found = [
        candidate
        for candidate in candidates
        if candidate.backend == options.backend
        and not candidate.checkpointing
        and options.settled(candidate.options) is not None
    ]
    if not found:
        raise ConfigError(
            f"{type(options).__name__} leaves no choice that can be carried out here: give its values instead of 'auto'"
        )
    return found


def _choose(plans: Any, margin: float) -> "Decision":
    from accel_planner.select import choose

    return choose(plans, margin=margin)


def _told(decision: "Decision", notes: tuple[str, ...]) -> Chosen:
    candidate = decision.plan.candidate
    told = f"strategy 'auto' chose {candidate.name}"
    return Chosen(candidate, (told, *decision.reasons, *decision.changes, *notes))


def first_batch(loader: Any, share: int) -> Any:
    """The batch that a loader over an indexed dataset would give one of ``share`` processes first, or None.

    Random states are put back as they were, so that looking changes nothing but what the dataset itself remembers.
    """
    from accel_state.rng import rng_state, set_rng_state

    dataset: Any = getattr(loader, "dataset", None)
    size = getattr(loader, "batch_size", None)
    if not size or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        return None
    before = rng_state()
    try:
        items = [dataset[index % len(dataset)] for index in range(max(1, size // share))]
        return loader.collate_fn(items)
    finally:
        set_rng_state(before)


def checkpoint_blocks(model: "nn.Module") -> None:
    """Puts each repeated block, in place, into a wrapper that computes its activations again in backward."""
    from accel_backends.fsdp.config import FSDPConfig
    from accel_backends.fsdp.shard import checkpointed, replace_modules
    from accel_backends.fsdp.wrap_units import find_units
    from accel_backends.ops.fqn import innermost

    root = innermost(model)
    blocks = [root.get_submodule(name) for name in find_units(root, FSDPConfig()).blocks]
    replace_modules(root, {id(block): checkpointed(block) for block in blocks})
