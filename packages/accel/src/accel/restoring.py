"""Puts the parts of a checkpoint back: all of them on all ranks, or none and an error that says which does not fit."""

import copy
import logging
from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import nn

from accel import open_window
from accel.clock import StepClock
from accel.train_state import LoaderState, ModelState, OptimizerState, Stateful, TrainState

if TYPE_CHECKING:
    from accel_backends import Backend
    from accel_ckpt import Checkpoint
    from accel_state.session import Session

_LOG = logging.getLogger(__name__)
RNG, SEED_KEY = "rng", "seed"


def restore(checkpoint: "Checkpoint", parts: TrainState, session: "Session", *, ignored: Collection[str]) -> None:
    """Loads every part but the ``ignored`` ones. Collective.

    What each part needs is compared with what is saved before anything is touched. Then those are loaded of which
    only loading tells whether they accept it (loaders, objects of the user), and put back if one of them does not, on
    any rank; models and optimizers, which were compared and would be large to put back, come last.

    Raises:
        CheckpointMismatchError: the checkpoint is another run's; every part is as it was.
        Exception: what a part raised when it was loaded; every part is as it was.
    """
    from accel_state.objects import agree

    parts.check_names([name for name in checkpoint.names if name not in ignored], ignored=ignored)
    wanted = {name: part for name, part in parts.items() if name not in ignored}
    large = {name: part for name, part in wanted.items() if isinstance(part, ModelState | OptimizerState)}
    likes = {name: part.state_dict() for name, part in large.items()}
    error: Exception | None = None
    try:
        for name, part in large.items():
            part.check(name, likes[name], checkpoint.facts(name))
    except Exception as caught:
        error = caught
    agree(error, group=session.group)
    _load_small(checkpoint, {name: part for name, part in wanted.items() if name not in large}, session)
    for name, part in large.items():
        place = part.placement() if isinstance(part, OptimizerState) else None
        part.load_state_dict(checkpoint.read(name, like=likes.pop(name), strict=False, place=place))


def restore_local(
    checkpoint: "Checkpoint",
    session: "Session",
    backend: "Backend",
    models: Sequence[nn.Module],
    clock: StepClock,
) -> None:
    """Random state of this rank, or one derived from the run's; gradients of a window that was open."""
    from accel_state import rng

    rank = session.rank
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
            rank=rank,
            world_size=session.world_size,
        )


def _load_small(checkpoint: "Checkpoint", parts: dict[str, Stateful], session: "Session") -> None:
    from accel.belonging import check_keys
    from accel_state.objects import agree

    before: dict[str, Any] = {}
    error: Exception | None = None
    try:
        states = {name: _read(checkpoint, name, part, session) for name, part in parts.items()}
        for name, part in parts.items():
            own = part.state_dict()
            if name.startswith("scheduler"):
                check_keys(name, own, states[name])
            before[name] = copy.deepcopy(own)
            part.load_state_dict(states[name])
    except Exception as caught:
        error = caught
    try:
        agree(error, group=session.group)
    except Exception:
        for name, state in before.items():
            parts[name].load_state_dict(state)
        raise


def _read(checkpoint: "Checkpoint", name: str, part: Stateful, session: "Session") -> Any:
    state = checkpoint.read(name)
    if isinstance(part, LoaderState) and checkpoint.world_size == session.world_size:
        own = checkpoint.read_local(name, session.rank)
        return state if own is None else {**state, LoaderState.PRIVATE: own}
    return state
