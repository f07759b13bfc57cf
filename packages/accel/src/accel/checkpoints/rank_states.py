"""States of one rank in a checkpoint: its random state, its gradients, and loss weights of open windows.

They are read with the other parts, before anything of the run changes, and restored last.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, final

from accel.checkpoints.gradients import WEIGHTS, ZEROS, data_shards, set_zeros
from accel.checkpoints.load_report import RNG, LoadOptions
from accel.checkpoints.run_facts import SEED_KEY
from accel_backends.roles import unreduced_gradients
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from accel.loop.accumulator import StepClock
    from accel.prepared import PreparedObjects
    from accel_backends import Backend
    from accel_ckpt import Checkpoint
    from accel_state.session import Session

_LOG = logging.getLogger(__name__)
CLOCK = "clock"
"""Name of the part that counts micro-steps; the gradients of an open window go with it."""


@final
@dataclass(frozen=True, slots=True)
class RankStates:
    """States that this rank takes from a checkpoint, on any number of ranks.

    Attributes:
        options: what is loaded; the random state and the clock may be left out.
        rng: the random state of this rank, or of the first rank that drops out of the same; None: none was saved.
        seed: of the random state that is derived where none was saved.
        gradients: those of open windows and later steps, by model position and parameter name; None: none were saved.
        zeros: names of the parameters whose gradients are zero at least, by model position.
        weights: of the losses in open windows.
    """

    options: LoadOptions
    rng: Mapping[str, Any] | None = None
    seed: int | None = None
    gradients: Mapping[str, Mapping[str, Any]] | None = None
    zeros: Mapping[str, Collection[str]] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(
        cls, checkpoint: "Checkpoint", session: "Session", backend: "Backend", options: LoadOptions
    ) -> "RankStates":
        """Reads and verifies them. Not a collective.

        Raises:
            CheckpointError: the checkpoint lacks the random state of a rank that saved it, or the seed for a new one.
        """
        rng, seed = _random_state(checkpoint, session, backend) if options.wants(RNG) else (None, None)
        if not options.wants(CLOCK):
            return cls(options, rng, seed)
        zeros: Any = checkpoint.read_local(ZEROS, 0) or {}  # the same on every rank that saved
        # Every rank saved its gradients, or none did.
        if unreduced_gradients.GRADIENTS not in checkpoint.local_names(0):
            return cls(options, rng, seed, zeros=zeros)
        gradients = unreduced_gradients.read(
            lambda source: checkpoint.read_local(unreduced_gradients.GRADIENTS, source),
            saved_ranks=checkpoint.world_size,
            rank=session.rank,
            world_size=session.world_size,
        )
        return cls(options, rng, seed, gradients, zeros, _weights(checkpoint, backend))

    def restore(
        self, checkpoint: "Checkpoint", backend: "Backend", prepared: "PreparedObjects", clock: "StepClock"
    ) -> None:
        """Restores them, after everything else has been loaded; gradients that this run has accumulated are dropped.

        Collective if there are ``gradients``: every rank of the group must call this.
        """
        if self.options.wants(RNG):
            self._restore_random_state(checkpoint, backend.layout.rng_seed_rank)
        if not self.options.wants(CLOCK):
            return
        if self.gradients is None:
            unreduced_gradients.drop(backend, prepared.models)
        else:
            unreduced_gradients.restore(backend, prepared.models, self.gradients)
            clock.load_weights(self.weights)
        set_zeros(prepared, self.zeros)

    def undo(self) -> Callable[[], object]:
        """Returns a function that undoes what is restored from now on, except gradients."""
        from accel_state import rng

        return partial(rng.set_rng_state, rng.rng_state(), strict=False) if self.options.wants(RNG) else lambda: None

    def _restore_random_state(self, checkpoint: "Checkpoint", rank: int) -> None:
        from accel_state import rng

        if self.rng is None:
            assert self.seed is not None
            rng.set_seed(rng.derive_seed(self.seed, rank))
            return
        if "numpy" in self.rng and find_spec("numpy") is not None:
            import_module("numpy")  # else a generator that nobody here has used yet would count as foreign
        if left := rng.set_rng_state(self.rng, strict=False):
            _LOG.warning(
                "%s: the random state of %s is not restored: the saving process had another kind of device or did "
                "not use it",
                checkpoint.path,
                ", ".join(left),
            )


def _random_state(
    checkpoint: "Checkpoint", session: "Session", backend: "Backend"
) -> tuple[Mapping[str, Any] | None, int | None]:
    """The random state that this rank takes, or the seed from which it derives one."""
    if session.rank < checkpoint.world_size and RNG not in checkpoint.local_names(session.rank):
        raise CheckpointError(f"{checkpoint.path} holds no random state of rank {session.rank}, which saved it")
    rank = backend.layout.rng_seed_rank
    own: Any = checkpoint.read_local(RNG, rank) if rank < checkpoint.world_size else None
    if own is not None:
        return own, None
    seed = checkpoint.metadata.get(SEED_KEY)
    if not isinstance(seed, int):
        raise CheckpointError(
            f"{checkpoint.path} holds neither a random state of rank {rank} nor the seed of the run that saved it"
        )
    return None, seed


def _weights(checkpoint: "Checkpoint", backend: "Backend") -> dict[str, float]:
    """Weights of this rank in open windows: its own, or on other ranks, or where ranks share samples, a part of all."""
    ranks, shards = backend.session.world_size, data_shards(backend)
    same = checkpoint.world_size == ranks == shards
    totals: dict[str, float] = {}
    for source in [backend.session.rank] if same else range(checkpoint.world_size):
        found: Any = checkpoint.read_local(WEIGHTS, source)
        for text, weight in (found or {}).items():
            totals[text] = totals.get(text, 0.0) + weight
    return totals if same else {text: total / shards for text, total in totals.items()}
