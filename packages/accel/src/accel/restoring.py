"""Puts the parts of a checkpoint back: all of them on all ranks, or none and an error that says which does not fit."""

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, final

from torch import nn

from accel import open_window
from accel.clock import StepClock
from accel.train_state import LoaderState, ModelState, OptimizerState, Stateful, TrainState

if TYPE_CHECKING:
    from accel_backends import Backend
    from accel_ckpt import Checkpoint
    from accel_ckpt.peers import Peers, Ranks
    from accel_state.session import Session

_LOG = logging.getLogger(__name__)
RNG, SEED_KEY = "rng", "seed"


@final
@dataclass(frozen=True, slots=True)
class Restoration:
    """Everything that a checkpoint gives to a run, read and compared; nothing of the run has changed yet."""

    checkpoint: "Checkpoint"
    session: "Session"
    large: Mapping[str, tuple[ModelState | OptimizerState, Callable[[], Any]]]
    """Models and optimizers, with what puts their tensors into place."""
    small: Mapping[str, tuple[Stateful, Any]]

    @classmethod
    def read(
        cls,
        checkpoint: "Checkpoint",
        parts: TrainState,
        session: "Session",
        ranks: "Ranks",
        *,
        ignored: Collection[str],
    ) -> "Restoration":
        """Compares what each part needs with what is saved, then reads it, and compares every byte. Collective.

        ``ranks`` are the session's as they see the checkpoint's files.

        Raises:
            CheckpointMismatchError: the checkpoint is another run's.
            CheckpointCorruptError: it is damaged; on all ranks.
        """
        from accel_ckpt.peers import Peers
        from accel_state.errors import CheckpointError

        peers = Peers.of(ranks)

        def compare_names() -> None:
            parts.check_names([name for name in checkpoint.names if name not in ignored], ignored=ignored)

        _agreed(compare_names, checkpoint, peers)
        wanted = {name: part for name, part in parts.items() if name not in ignored}
        models = {name: part for name, part in wanted.items() if isinstance(part, ModelState | OptimizerState)}
        likes = {name: part.state_dict() for name, part in models.items()}
        places: dict[str, Any] = {}

        def compare() -> None:
            for name, part in models.items():
                part.check(name, likes[name], checkpoint.facts(name))
                places[name] = part.placement() if isinstance(part, OptimizerState) else None

        _agreed(compare, checkpoint, peers)
        large: dict[str, tuple[ModelState | OptimizerState, Callable[[], Any]]] = {}
        small: dict[str, tuple[Stateful, Any]] = {}

        def fetch() -> None:
            puts = checkpoint.fetch(likes, places=places, group=peers)
            large.update({name: (part, puts[name]) for name, part in models.items()})

        def read() -> None:
            if session.rank < checkpoint.world_size and RNG not in checkpoint.local_names(session.rank):
                raise CheckpointError(f"{checkpoint.path} holds no random state of rank {session.rank}, which saved it")
            for name in wanted.keys() - models.keys():
                small[name] = (wanted[name], _read(checkpoint, name, wanted[name], session))

        _agreed(fetch, checkpoint, peers)
        _agreed(read, checkpoint, peers)
        checkpoint.verify(group=peers)  # what no rank has read
        return cls(checkpoint, session, large, small)

    def apply(self) -> None:
        """Loads all parts, or none. Collective.

        First those of which only loading tells whether they accept it (loaders, objects of the user); they are put
        back if one of them does not, on any rank. Models and optimizers, which were compared and would be large to
        put back, come last.

        Raises:
            Exception: what a part raised when it was loaded; every part is as it was.
        """
        _load_small(self.small, self.session)
        for part, values in self.large.values():
            part.load_state_dict(values())


def _agreed(work: Callable[[], None], checkpoint: "Checkpoint", peers: "Peers") -> None:
    """Does ``work`` on all ranks; damage that one of them finds is damage on all, any other failure fails all."""
    from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
    from accel_state.objects import agree

    damage: str | None = None
    error: Exception | None = None
    try:
        work()
    except CheckpointMismatchError as caught:
        error = caught
    except CheckpointError as caught:
        damage = str(caught)
    except Exception as caught:
        error = caught
    agree(error, group=peers.group)
    told = peers.together(f"reading {checkpoint.path}", lambda: damage)
    if found := sorted({text for text in told if text is not None}):
        raise CheckpointCorruptError("; ".join(found))


def restore_local(
    checkpoint: "Checkpoint",
    session: "Session",
    backend: "Backend",
    models: Sequence[nn.Module],
    clock: StepClock,
) -> None:
    """Random state, and gradients of a window that was open.

    The state is this rank's, or that of the first rank which drops out of the same; where none was saved, one derived
    from the run's seed.
    """
    from accel_state import rng

    rank = backend.random_rank
    own = checkpoint.read_local(RNG, rank) if rank < checkpoint.world_size else None
    if own is not None:
        if "numpy" in own and find_spec("numpy") is not None:
            import_module("numpy")  # else a generator that nobody here has used yet would count as foreign
        left = rng.set_rng_state(own, strict=False)
        if left:
            _LOG.warning(
                "%s: the random state of %s is not restored: the saving process had another kind of device or did "
                "not use it",
                checkpoint.path,
                ", ".join(left),
            )
    else:
        rng.set_seed(rng.derive_seed(int(checkpoint.metadata[SEED_KEY]), rank))
    if clock.open:
        open_window.restore(
            backend,
            models,
            lambda source: checkpoint.read_local(open_window.GRADIENTS, source),
            saved_ranks=checkpoint.world_size,
            rank=session.rank,
            world_size=session.world_size,
        )


def _load_small(parts: Mapping[str, tuple[Stateful, Any]], session: "Session") -> None:
    from accel.belonging import check_keys
    from accel_state.objects import agree

    before: dict[str, Any] = {}
    error: Exception | None = None
    try:
        for name, (part, state) in parts.items():
            own = part.state_dict()
            if name.startswith("scheduler"):
                check_keys(name, own, state)
            before[name] = copy.deepcopy(own)
            part.load_state_dict(state)
    except Exception as caught:
        error = caught
    try:
        agree(error, group=session.group)
    except Exception:
        for name, state in before.items():
            parts[name][0].load_state_dict(state)
        raise


def _read(checkpoint: "Checkpoint", name: str, part: Stateful, session: "Session") -> Any:
    state = checkpoint.read(name)
    if isinstance(part, LoaderState) and checkpoint.world_size == session.world_size:
        own = checkpoint.read_local(name, session.rank)
        return state if own is None else {**state, LoaderState.PRIVATE: own}
    return state
