"""States of models in DistributedDataParallel."""

from collections.abc import Iterable
from typing import cast, final

from torch import nn

from accel_backends.ddp.config import DDPConfig
from accel_backends.ddp.find import find_ddp
from accel_backends.roles.states import ReplicatedStates


@final
class DDPStates(ReplicatedStates):
    """Full states on every rank, with buffers that may differ between forwards."""

    def sync_buffers(self, models: Iterable[nn.Module]) -> None:
        """Copies rank 0's buffers to every rank, as DDP's next forward would.

        Nothing if ``broadcast_buffers`` is off.
        """
        wrapped = [found for model in models if (found := find_ddp(model)) is not None]
        buffers = [buffer for model in wrapped for buffer in model.buffers()]
        if buffers and cast(DDPConfig, self.config).syncs_buffers:
            from accel_state.collectives.tensors import broadcast

            broadcast(buffers, group=self.run.session.group)
