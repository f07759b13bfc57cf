"""States of models in DistributedDataParallel."""

from collections.abc import Iterable, Mapping
from typing import Any, cast, final

from torch import nn

from accel_backends.ddp.comm_hooks import begin_anew, hook_name
from accel_backends.ddp.config import DDPConfig
from accel_backends.ddp.find import find_ddp
from accel_backends.roles.states import ReplicatedStates
from accel_state.logging import get_logger

_log = get_logger(__name__)


@final
class DDPStates(ReplicatedStates):
    """Full states on every rank, with buffers that may differ between forwards."""

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """As every backend; PowerSGD begins anew, because a checkpoint has nothing of it."""
        super().load_model(model, state, strict=strict)
        wrapped = find_ddp(model)
        hook = hook_name(cast(DDPConfig, self.config).comm_hook)
        if "power_sgd" in hook and wrapped is not None and begin_anew(wrapped):
            _log.warning(
                "comm_hook=%r begins anew: a checkpoint has neither its errors nor its factors, so the run goes on "
                "otherwise than the one that saved it",
                hook,
            )

    def sync_buffers(self, models: Iterable[nn.Module]) -> None:
        """Copies rank 0's buffers to every rank, as DDP's next forward would.

        Nothing if ``broadcast_buffers`` is off.
        """
        wrapped = [found for model in models if (found := find_ddp(model)) is not None]
        buffers = [buffer for model in wrapped for buffer in model.buffers()]
        if buffers and cast(DDPConfig, self.config).syncs_buffers:
            from accel_state.collectives.tensors import broadcast

            broadcast(buffers, group=self.run.session.group)
