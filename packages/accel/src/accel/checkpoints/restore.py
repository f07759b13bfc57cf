"""Restores the parts of a checkpoint on all ranks, or raises an error that names what does not fit."""

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch

from accel.checkpoints.load_report import RNG, LoadOptions, LoadReport, check_parts
from accel.checkpoints.rank_states import CLOCK, RankStates
from accel.checkpoints.run_facts import RunDescription
from accel.checkpoints.schedules import regrouped, saved_places
from accel.checkpoints.train_state import ClockState, LoaderState, Stateful, TrainState
from accel_backends.ops.dtensor import sharded_like
from accel_backends.roles.prepared_states import ModelState, OptimizerState
from accel_backends.roles.saved_state_check import PartReport, check_keys
from accel_state.pytree.saved_shapes import is_packed

if TYPE_CHECKING:
    from accel.loop.accumulator import StepClock
    from accel.prepared import PreparedObjects
    from accel_backends import Backend
    from accel_ckpt import Checkpoint
    from accel_ckpt.loading.cooperative_read import RankReads
    from accel_ckpt.loading.fetching import Fetched, PlannedFetch
    from accel_ckpt.rank_group import RankGroup, Ranks
    from accel_state.session import Session

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
Undo = tuple[str, Callable[[], Any]]
"""Name of a part, and a function that puts it back as it was before it was loaded."""


@final
@dataclass(frozen=True, slots=True)
class Restoration:
    """Everything that a checkpoint gives to a run, compared with it; nothing of the run has changed yet."""

    checkpoint: "Checkpoint"
    session: "Session"
    peers: "RankGroup"
    """The session's ranks as they see the checkpoint's files."""
    large: Mapping[str, ModelState | OptimizerState]
    """Models and optimizers."""
    fetch: "Callable[[], Fetched]"
    """Reads their values, into the tensors that they have where that is possible, and compares every byte, also of
    what no rank reads. Collective."""
    small: Mapping[str, tuple[Stateful, Any]]
    own: Mapping[str, Any]
    """States of ``large`` that this rank saved as its own, since they were not like the first rank's."""
    rank_states: RankStates
    options: LoadOptions
    reports: Mapping[str, PartReport]
    kept: tuple[str, ...]
    """Parts of the run that are not loaded."""

    @classmethod
    def read(
        cls,
        checkpoint: "Checkpoint",
        parts: TrainState,
        session: "Session",
        ranks: "Ranks",
        *,
        backend: "Backend",
        options: LoadOptions,
        ignored: Collection[str],
        in_place: bool,
    ) -> "Restoration":
        """Compares the parts of the run with the saved ones, and reads all but models and optimizers. Collective.

        Of those, names, shapes and sizes are compared. Unless ``in_place`` they are read as well, and every byte of
        the checkpoint is compared, or of what is read if the options name parts. The ranks agree once, after all of
        that.

        Raises:
            CheckpointMismatchError: the checkpoint is another run's.
            CheckpointCorruptError: it is damaged; on all ranks.
        """
        from accel_ckpt.rank_group import RankGroup

        peers = RankGroup.of(ranks)

        wanted = {name: part for name, part in parts.items() if name not in ignored and options.wants(name)}
        large = {name: part for name, part in wanted.items() if isinstance(part, ModelState | OptimizerState)}
        likes: dict[str, Any] = {}
        places: dict[str, Any] = {}
        moved: dict[int, list[int | None] | None] = {}
        planned: list[PlannedFetch] = []
        small: dict[str, tuple[Stateful, Any]] = {}
        own: dict[str, Any] = {}
        rank_states: list[RankStates] = []
        reports = {name: PartReport() for name in [*wanted, RNG] if options.wants(name)}
        verify = options.parts is None

        def compare() -> "RankReads":
            _compare_names(checkpoint, parts, options, ignored)
            _warn_of_own(checkpoint, wanted, session)
            for name, part in large.items():
                likes[name] = part.state_dict()
                facts = checkpoint.facts(name, read=_is_packed)
                reports[name] = part.check(name, likes[name], facts)
                if (mine := _own(checkpoint, name, session)) is not None:
                    own[name] = mine
                places[name] = part.placement() if isinstance(part, OptimizerState) else None
                if isinstance(part, OptimizerState):
                    moved[id(part.optimizer)] = saved_places(likes[name], facts)
            rank_states.append(RankStates.read(checkpoint, session, backend, options))
            for name, one in wanted.items():
                if name not in large:
                    state = _read(checkpoint, name, one, session)
                    small[name] = (one, _by_group(one, state, moved) if name.startswith("scheduler") else state)
            planned.append(checkpoint.planned(likes, places=places, peers=peers, in_place=in_place, verify=verify))
            return planned[0].reads

        rank_reads = _agreed(compare, peers)
        fetch = partial(_fetched, planned[0], rank_reads, peers)
        kept = tuple(name for name in [*parts, RNG] if name not in reports)
        restoration = cls(checkpoint, session, peers, large, fetch, small, own, rank_states[0], options, reports, kept)
        if in_place:
            return restoration
        fetched = fetch()
        return replace(restoration, fetch=lambda: fetched)

    def apply(self, backend: "Backend", prepared: "PreparedObjects", clock: "StepClock") -> None:
        """Loads all parts. Collective.

        First those that can refuse only when they are loaded (loaders, objects of the user), then models and
        optimizers, which were compared, and the states of this rank. If any part fails, on any rank, the first are put
        back on all.

        Raises:
            CheckpointCorruptError: a block is damaged; models and optimizers, which it names, hold a part of the
                checkpoint if they are read in place.
            Exception: what a part raised when it was loaded.
        """
        from accel_state.errors import CheckpointCorruptError

        undo = _load_small(self.small, self.session)
        restore = partial(self.rank_states.restore, self.checkpoint, backend, prepared, clock)
        try:
            values = self.fetch()
            undo.append((RNG, self.rank_states.undo()))

            def load() -> None:
                for name, part in self.large.items():
                    common = values[name]()
                    part.load_state_dict(self.own.get(name, common))
                if self.rank_states.gradients is None:
                    restore()

            _agreed(load, self.peers)
            if self.rank_states.gradients is not None:  # set by collectives, which a rank that has failed would miss
                _agreed(restore, self.peers)
        except CheckpointCorruptError as error:
            corrupt = CheckpointCorruptError(f"{error}; {self._in_parts()}")
            _put_back(undo, corrupt)
            raise corrupt from error
        except Exception as error:
            _put_back(undo, error)
            error.add_note(self._in_parts())
            raise

    def report(self, facts: RunDescription) -> LoadReport:
        """What was loaded, and in what the run differs from the one that saved; said in the log by the main process.

        A difference is a warning where training goes on with other numbers because of it.
        """
        report = LoadReport(self.checkpoint.path, self.reports, self.kept, facts.changes(self.checkpoint))
        if self.session.is_main_process:
            trains = self.options.wants(CLOCK) or any(isinstance(one, OptimizerState) for one in self.large.values())
            for change in report.changes:
                level = logging.WARNING if change.numbers and trains else logging.INFO
                _LOG.log(level, "%s: %s", self.checkpoint.path.name, change)
            for line in report.lines():
                _LOG.warning("%s: %s", self.checkpoint.path.name, line)
        return report

    def _in_parts(self) -> str:
        """The state of the run after a failure half-way, for its error."""
        if not self.large:
            return "nothing of the run has changed"
        return (
            f"of the run, {', '.join(self.large)} may hold a part of {self.checkpoint.path} now, and everything else "
            "is as it was; load_state of an intact checkpoint restores all of it"
        )


def _is_packed(path: tuple[Any, ...]) -> bool:
    return is_packed(str(path[-1]))


def _fetched(planned: "PlannedFetch", rank_reads: "Sequence[RankReads]", peers: "RankGroup") -> "Fetched":
    """Reads what was planned on all ranks. Collective."""
    found: list[Fetched] = []
    _agreed(lambda: found.append(planned.read(rank_reads)), peers)
    planned.trust(rank_reads)
    return found[0]


def _agreed(work: Callable[[], T], peers: "RankGroup") -> list[T]:
    """What ``work`` gives on each rank; damage that one of them finds is damage on all, any other failure fails all."""
    from accel_ckpt.format.blocks import UnavailableError
    from accel_state.collectives.objects import agree
    from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError

    result: Any = None
    damage: str | None = None
    error: Exception | None = None
    try:
        result = work()
    except (CheckpointMismatchError, UnavailableError) as caught:
        error = caught
    except CheckpointError as caught:
        damage = str(caught)
    except Exception as caught:
        error = caught
    told: list[Any] = agree(error, group=peers.group, note=(damage, result))
    if found := sorted({text for text, _ in told if text is not None}):
        raise CheckpointCorruptError("; ".join(found))
    return [value for _, value in told]


def _compare_names(checkpoint: "Checkpoint", parts: TrainState, options: LoadOptions, ignored: Collection[str]) -> None:
    if options.parts is not None:
        check_parts(options.parts, [*checkpoint.names, RNG], [*parts, RNG])
    else:
        parts.check_names([name for name in checkpoint.names if name not in ignored], ignored=ignored)


def _load_small(parts: Mapping[str, tuple[Stateful, Any]], session: "Session") -> "list[Undo]":
    """Loads all of ``parts``, or none; returns the functions that undo the load, one for each part, with its name.

    Collective: every rank of the group must call this.
    """
    from accel_state.collectives.objects import agree

    undo: list[Undo] = []
    error: Exception | None = None
    try:
        for name, (part, state) in parts.items():
            if isinstance(part, LoaderState | ClockState):
                undo.append((name, part.undo()))
            else:
                own = part.state_dict()
                if name.startswith("scheduler"):
                    check_keys(name, own, state)
                undo.append((name, partial(part.load_state_dict, _copy_of(own))))
                state = _as_present(own, state)
            part.load_state_dict(state)
    except Exception as caught:
        caught.add_note(f"while {name} was loaded")
        error = caught
    try:
        agree(error, group=session.group)
    except Exception as failure:
        _put_back(undo, failure)
        raise
    return undo


def _as_present(present: Any, saved: Any) -> Any:
    """Returns a saved state with sharded tensors, and mappings of a class, where the present state has such.

    A checkpoint has full tensors and plain dicts, and a schedule takes what it loads as its attributes: the milestones
    of a ``MultiStepLR`` are a ``Counter``.
    """
    if isinstance(saved, torch.Tensor):
        return sharded_like(saved, present) if isinstance(present, torch.Tensor) else saved
    if isinstance(saved, dict) and isinstance(present, Mapping):
        found = {key: _as_present(present.get(key), value) for key, value in saved.items()}
        if type(present) is dict or not isinstance(present, dict):
            return found
        own = present.copy()
        own.clear()
        own.update(found)
        return own
    if isinstance(saved, list) and isinstance(present, list) and len(saved) == len(present):
        return [_as_present(one, value) for one, value in zip(present, saved, strict=True)]
    return saved


def _copy_of(state: Any) -> Any:
    """A deep copy, also of tensors that torch refuses to copy."""
    from accel_ckpt.format.tree import leaves

    tensors = [one for one in leaves(state).values() if isinstance(one, torch.Tensor)]
    special = [one for one in tensors if one.grad_fn is not None or type(one) is not torch.Tensor]
    return copy.deepcopy(state, {id(tensor): _copy_of_tensor(tensor) for tensor in special})


@torch.no_grad()
def _copy_of_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that an autograd graph computed, or of one of a subclass, which may lack ``new_empty``."""
    if tensor.grad_fn is not None:
        return tensor.detach().clone()
    try:
        return copy.deepcopy(tensor)
    except (RuntimeError, NotImplementedError):
        copied = tensor.detach().clone().as_subclass(type(tensor))
        copied.__dict__.update(copy.deepcopy(tensor.__dict__))
        return copied.requires_grad_(tensor.requires_grad)


def _put_back(undo: "Sequence[Undo]", error: Exception) -> None:
    """Undoes loads, the last one first; a part that cannot be put back is named in ``error``."""
    for name, one in reversed(undo):
        try:
            one()
        except Exception as caught:
            error.add_note(f"{name} could not be put back as it was: {type(caught).__name__}: {caught}")


def _own(checkpoint: "Checkpoint", name: str, session: "Session") -> Any | None:
    """What this rank saved of a part that was not like the first rank's, if it goes on as the same rank of as many."""
    return checkpoint.read_local(name, session.rank) if checkpoint.world_size == session.world_size else None


def _read(checkpoint: "Checkpoint", name: str, part: Stateful, session: "Session") -> Any:
    state, own = checkpoint.read(name), _own(checkpoint, name, session)
    if isinstance(part, LoaderState):
        return state if own is None else {**state, LoaderState.PRIVATE: own}
    return state if own is None else own


def _by_group(schedule: Any, state: Any, moved: Mapping[int, list[int | None] | None]) -> Any:
    """The state of a schedule, with the entries of each group of its optimizer where the group is now."""
    places = [moved.get(id(one.optimizer)) for one in schedule.optimizers]
    return state if len(places) != 1 or places[0] is None else regrouped(schedule.state_dict(), state, places[0])


def _warn_of_own(checkpoint: "Checkpoint", parts: Mapping[str, Stateful], session: "Session") -> None:
    """Says what had a value of each rank, and cannot have on another number of ranks."""
    if checkpoint.world_size == session.world_size or session.rank:
        return
    saved = {name for rank in range(checkpoint.world_size) for name in checkpoint.local_names(rank)}
    if lost := sorted(name for name in saved if name in parts and not isinstance(parts[name], LoaderState)):
        _LOG.warning(
            "%s: each of %d ranks had its own %s; %d ranks go on with the first one's",
            checkpoint.path,
            checkpoint.world_size,
            ", ".join(lost),
            session.world_size,
        )
