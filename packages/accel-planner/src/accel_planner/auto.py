"""``strategy="auto"``: the planner chooses a strategy when the first model is prepared, the same on all ranks."""

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
        opener: opens a backend, given its name and options.
        preferred: options that replace the planner's own if the planner chooses their backend.
    """

    strategy: AutoStrategy
    opener: Callable[[str, BackendConfig], "Backend"]
    preferred: BackendConfig | None = None

    def open(self, candidate: "Candidate") -> "Backend":
        """Opens the backend of a candidate."""
        from accel_backends.core.backend import build_options
        from accel_backends.core.registry import load_backend

        kind = load_backend(candidate.backend)
        if self.strategy.among is not None:
            settled = self.strategy.among.settled(candidate.options)
            return self.opener(candidate.backend, settled or build_options(kind, {}))
        options = self.preferred if isinstance(self.preferred, kind.Config) else build_options(kind, candidate.options)
        return self.opener(candidate.backend, options)


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
    """Returns the candidates whose backend is installed and supports the optimizer's class, restricted to ``names``."""
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
    """Returns the candidates that set the open values of ``options`` and change nothing else.

    Raises:
        ConfigError: there is no such candidate.
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
    """First batch that a loader over a map-style dataset gives one of ``share`` processes; None for other loaders.

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
        return loader.collate_fn(items)
    finally:
        set_rng_state(before)


def checkpoint_blocks(model: "nn.Module") -> None:
    """Wraps each repeated block, in place, with activation checkpointing."""
    from accel_backends.fsdp.config import FSDPConfig
    from accel_backends.fsdp.shard import checkpointed, replace_modules
    from accel_backends.fsdp.wrap_units import find_units
    from accel_backends.ops.fqn import innermost

    root = innermost(model)
    blocks = [root.get_submodule(name) for name in find_units(root, FSDPConfig()).blocks]
    replace_modules(root, {id(block): checkpointed(block) for block in blocks})
