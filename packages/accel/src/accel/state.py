"""Views of the process and its settings under the names of ``accelerate.state``; not singletons."""

from typing import TYPE_CHECKING, Any, final

import torch

from accel.loop.accumulator import GradientAccumulationPlugin, StepClock
from accel.views.process import ProcessViews
from accel_state.enums import DistributedType
from accel_state.session import Session

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel.views.settings import SettingViews
    from accel_backends import Backend, FullyShardedDataParallelPlugin
    from accel_deepspeed import DeepSpeedPlugin
    from accel_state import ParallelismConfig

__all__ = [
    "AcceleratorState",
    "DistributedType",
    "GradientState",
    "PartialState",
    "is_initialized",
    "wait_for_everyone",
]


def distributed_type(session: Session, backend: "Backend | None" = None) -> DistributedType:
    """Accelerate's name for the kind of distribution."""
    named = getattr(backend, "distributed_type", None)
    if named is not None:
        return DistributedType(named)
    if session.world_size == 1:
        return DistributedType.NO
    return DistributedType(session.device.kind.family)


class _ProcessView(ProcessViews):
    """Process facts of PartialState and AcceleratorState."""

    def __init__(self, session: Session, backend: "Backend | None") -> None:
        self.session = session
        self._backend = backend

    @property
    def distributed_type(self) -> DistributedType:
        """Accelerate's name for the kind of distribution."""
        return distributed_type(self.session, self._backend)

    @property
    def backend(self) -> str | None:
        """Backend of the process group; None without a group."""
        return self.session.backend

    @property
    def initialized(self) -> bool:
        """Always True: a view has a session from the start."""
        return True

    def destroy_process_group(self, group: "torch.distributed.ProcessGroup | None" = None) -> None:
        """Destroys ``group``, or closes this session (and with the last one the default group, if accel opened it)."""
        if group is None:
            self.session.close()
        else:
            torch.distributed.destroy_process_group(group)

    def __getattr__(self, name: str) -> Any:
        if name == "session":  # true only before __init__, when copy and pickle probe for attributes
            raise AttributeError(name)
        return getattr(self.session, name)

    def __repr__(self) -> str:
        kind = self.distributed_type
        return (
            f"Distributed environment: {kind}{f'  Backend: {self.backend}' if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


@final
class PartialState(_ProcessView):
    """The process-wide session: the open one, or a new one.

    torch has one process group per process, so this is the only class whose instances share one object. Keyword
    arguments are those of ``accel_state.Session.open``.
    """

    def __init__(self, cpu: bool = False, **options: Any) -> None:
        session = Session.current() if not options else None
        if session is None or (cpu and session.device.type != "cpu"):
            session = Session.open(cpu=cpu, **options)
        super().__init__(session, None)


@final
class AcceleratorState(_ProcessView):
    """View of one Accelerator's process and settings; made by ``accelerator.state``."""

    def __init__(self, accelerator: "SettingViews") -> None:
        super().__init__(accelerator.session, accelerator.backend)
        self._accelerator = accelerator

    @property
    def mixed_precision(self) -> str:
        """Name of the precision policy."""
        return self._accelerator.mixed_precision

    @property
    def fsdp_plugin(self) -> "FullyShardedDataParallelPlugin | None":
        """Sharding options; None if torch does not shard the models."""
        return self._accelerator.fsdp_plugin

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by FSDP2 (``fully_shard``)."""
        return self._accelerator.is_fsdp2

    @property
    def deepspeed_plugin(self) -> "DeepSpeedPlugin | None":
        """DeepSpeed's options; None without DeepSpeed."""
        return self._accelerator.deepspeed_plugin

    @property
    def deepspeed_plugins(self) -> "Mapping[str, DeepSpeedPlugin]":
        """DeepSpeed's options by name, if several were given."""
        return self._accelerator.deepspeed_plugins

    def select_deepspeed_plugin(self, name: str) -> None:
        """Selects the options of models prepared from now on."""
        self._accelerator.select_deepspeed_plugin(name)

    @property
    def parallelism_config(self) -> "ParallelismConfig":
        """Degrees of parallelism."""
        return self._accelerator.parallelism_config

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"


@final
class GradientState:
    """View of one Accelerator's accumulation clock; made by ``accelerator.gradient_state``."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends an accumulation window."""
        return self._clock.due

    @property
    def num_steps(self) -> int:
        """Micro-batches of one optimizer step."""
        return self._clock.num_steps

    @property
    def plugin(self) -> GradientAccumulationPlugin:
        """Options of gradient accumulation."""
        return self._clock.plugin

    @property
    def adjust_scheduler(self) -> bool:
        """Whether schedulers step once per optimizer step."""
        return self._clock.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether a window ends with its loader."""
        return self._clock.plugin.sync_with_dataloader

    @property
    def active_dataloader(self) -> Any:
        """The innermost prepared loader being iterated, or None."""
        return self._clock.active_loader

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return self._clock.active_loader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has delivered its last batch."""
        loader = self._clock.active_loader
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real samples of the active loader's last global batch; -1 outside of a loop or if unknown."""
        loader = self._clock.active_loader
        return -1 if loader is None else loader.remainder

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self._clock.due = sync_gradients


def is_initialized() -> bool:
    """Whether a session is open in this process."""
    return Session.current() is not None


def wait_for_everyone() -> None:
    """Barrier: blocks until every process has called this."""
    PartialState().session.wait_for_everyone()
