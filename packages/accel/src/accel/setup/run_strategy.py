"""Strategy of a run: its backend, and the deferred choice of ``strategy="auto"``."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from accel_backends import Backend, Choice
    from accel_planner.auto import Undecided
    from accel_precision import PrecisionPolicy
    from accel_state import DataShard, ParallelismConfig
    from accel_state.session import Session


@final
class RunStrategy:
    """The backend that trains, and the facts that it was chosen by.

    Every part of an Accelerator reads ``backend`` at each use, because ``strategy="auto"`` replaces the provisional
    backend when the first trainable model is prepared.

    Attributes:
        backend: the backend in use.
        choice: its name, with the reasons for it.
        parallelism: degrees of parallelism as the backend applies them.
        data_shard: shard of the samples that this rank reads.
    """

    __slots__ = ("_undecided", "backend", "choice", "data_shard", "parallelism", "policy", "session")

    def __init__(
        self,
        session: "Session",
        policy: "PrecisionPolicy",
        backend: "Backend",
        choice: "Choice",
        parallelism: "ParallelismConfig",
        undecided: "Undecided | None" = None,
    ) -> None:
        self.session = session
        self.policy = policy
        self.backend = backend
        self.choice = choice
        self.parallelism = parallelism
        self.data_shard: DataShard = parallelism.data_shard(session.topology)
        self._undecided = undecided

    def counts(self) -> list[dict[str, int]]:
        """Step counts of the backend, for the checkpoint."""
        return self.backend.states.counts()

    def load_counts(self, saved: Sequence[Mapping[str, int]] | None) -> None:
        """Restores the step counts of a checkpoint; None: it has none."""
        self.backend.states.load_counts(saved or ())

    def decide(self, items: Sequence[Any], kinds: Sequence[str], *, split_batches: bool, in_use: bool) -> None:
        """Chooses a backend for the model, the optimizer and the loader among ``items``, if none is chosen yet.

        ``in_use``: the provisional backend has prepared models, so it stays open.

        Collective: every rank of the group must call this.
        """
        undecided = self._undecided
        models = [item for item, kind in zip(items, kinds, strict=True) if kind == "model"]
        if undecided is None or not any(p.requires_grad for model in models for p in model.parameters()):
            return
        from accel_backends import Choice
        from accel_planner.auto import checkpoint_blocks, decide, first_batch
        from accel_planner.cost.hardware import devices_of

        session = self.session
        loader = next((item for item, kind in zip(items, kinds, strict=True) if kind == "loader"), None)
        wanted = undecided.strategy.sample is None and undecided.strategy.seq_length is None
        share = (self.data_shard.count if split_batches else 1) * devices_of(session) // session.world_size
        chosen = decide(
            undecided.strategy,
            session,
            self.policy,
            models=models,
            optimizers=[item for item, kind in zip(items, kinds, strict=True) if kind == "optimizer"],
            batch=first_batch(loader, share) if wanted and session.is_main_process else None,
        )
        candidate = chosen.candidate
        if not in_use:
            self.backend.close()
        resolution = undecided.resolve(candidate)
        self.backend = undecided.opener(candidate.backend, resolution)
        self.choice = Choice(candidate.backend, chosen.reasons)
        self.parallelism = resolution.parallelism
        if candidate.wraps_blocks:
            for model in models:
                checkpoint_blocks(model)
        self._undecided = None
