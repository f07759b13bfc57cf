"""Auto strategy of an Accelerator: the backend is chosen when the first model is prepared."""

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from accel_backends import Backend, Choice
    from accel_planner.auto import Undecided
    from accel_precision import PrecisionPolicy
    from accel_state import DataShard, ParallelismConfig
    from accel_state.session import Session


class ChoosingFacet(ABC):
    """Replaces the provisional backend of a run without a model by the chosen one."""

    session: "Session"
    policy: "PrecisionPolicy"
    backend: "Backend"
    choice: "Choice"
    parallelism_config: "ParallelismConfig"
    data_shard: "DataShard"
    _models: "list[nn.Module]"
    _undecided: "Undecided | None"

    def _decide(self, items: Sequence[Any], kinds: Sequence[str], *, split_batches: bool) -> None:
        """Chooses a backend for the model, the optimizer and the loader among ``items``.

        Collective: every rank of the group must call this.
        """
        from accel_backends import Choice
        from accel_planner.auto import checkpoint_blocks, decide, first_batch
        from accel_planner.cost.hardware import devices_of

        undecided = self._undecided
        models = [item for item, kind in zip(items, kinds, strict=True) if kind == "model"]
        if undecided is None or not any(p.requires_grad for model in models for p in model.parameters()):
            return
        loader = next((item for item, kind in zip(items, kinds, strict=True) if kind == "loader"), None)
        wanted = undecided.strategy.sample is None and undecided.strategy.seq_length is None
        share = (self.data_shard.count if split_batches else 1) * devices_of(self.session) // self.session.world_size
        chosen = decide(
            undecided.strategy,
            self.session,
            self.policy,
            models=models,
            optimizers=[item for item, kind in zip(items, kinds, strict=True) if kind == "optimizer"],
            batch=first_batch(loader, share) if wanted and self.session.is_main_process else None,
        )
        candidate = chosen.candidate
        if not self._models:
            self.backend.close()
        resolution = undecided.resolve(candidate)
        self.backend = undecided.opener(candidate.backend, resolution)
        self.choice = Choice(candidate.backend, chosen.reasons)
        self.parallelism_config = resolution.parallelism
        if candidate.checkpointing and candidate.kind != "sharded":
            for model in models:
                checkpoint_blocks(model)
        self._undecided = None
