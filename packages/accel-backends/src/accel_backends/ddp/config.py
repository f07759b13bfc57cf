"""Options of DistributedDataParallel."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch.nn.parallel import DistributedDataParallel

from accel_backends.core.config import BackendConfig
from accel_backends.ddp.comm_hooks import DDPCommunicationHookType, hook_name, register_comm_hook
from accel_state.errors import ConfigError


@dataclass(slots=True)
class DDPConfig(BackendConfig):
    """Options of DistributedDataParallel, under its own names, and of the reduction of gradients.

    Attributes:
        dim: batch dimension (torch's option, without effect here).
        broadcast_buffers: broadcast rank 0's buffers before each forward.
        bucket_cap_mb: size of the gradient buckets, MiB.
        find_unused_parameters: search in each forward for parameters that will get no gradient, so that their buckets
            do not delay others; faster if most steps leave parameters out, slower otherwise. Gradients are the same
            either way.
        check_reduction: accepted, without effect in torch.
        gradient_as_bucket_view: make gradients views of the buckets, which saves one copy of them.
        static_graph: promise that every step runs the same graph.
        comm_hook: "no", "fp16", "bf16", "power_sgd" or "batched_power_sgd".
        comm_wrapper: "no", "fp16" or "bf16": dtype around a PowerSGD hook.
        comm_state_option: options of ``PowerSGDState``.
        forward_sync_buffers: torch's newer name of ``broadcast_buffers``; takes precedence if given.
        init_sync: on wrapping, verify that parameters agree in shape, and broadcast rank 0's values.
        sync_batch_norm: compute batch statistics over all ranks.
    """

    backend: ClassVar[str] = "ddp"
    needs_ranks: ClassVar[bool] = True

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_state_option: Mapping[str, Any] = field(default_factory=dict)
    forward_sync_buffers: bool | None = None
    init_sync: bool = True
    sync_batch_norm: bool = False

    def __post_init__(self) -> None:
        hook, wrapper = hook_name(self.comm_hook), hook_name(self.comm_wrapper, "comm_wrapper")
        if wrapper != "no" and hook in ("no", wrapper):
            raise ConfigError(f"comm_wrapper={wrapper!r} around comm_hook={hook!r}: use comm_hook={wrapper!r} alone")
        if self.comm_state_option and "power_sgd" not in hook:
            raise ConfigError(f"comm_state_option is for comm_hook 'power_sgd' or 'batched_power_sgd', not {hook!r}")
        if not self.bucket_cap_mb > 0:
            raise ConfigError(f"bucket_cap_mb is {self.bucket_cap_mb}; expected a size in MiB above 0")

    @property
    def bounds_experts(self) -> bool:
        """Whether undivided experts get their capacity: always."""
        return True

    @property
    def syncs_buffers(self) -> bool:
        """Whether each forward starts from rank 0's buffers; resolves the option's two names."""
        return self.broadcast_buffers if self.forward_sync_buffers is None else self.forward_sync_buffers

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of ``DistributedDataParallel``, by the names in the installed torch.

        Contains only values that differ from the defaults: if torch is given its own default of 25 MiB, it omits the
        small first bucket with which communication starts early.
        """
        arguments: dict[str, Any] = {
            name: value
            for name, value in self.to_kwargs().items()
            if name
            in (
                "dim",
                "bucket_cap_mb",
                "find_unused_parameters",
                "gradient_as_bucket_view",
                "static_graph",
                "init_sync",
            )
        }
        newer = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
        arguments["forward_sync_buffers" if newer else "broadcast_buffers"] = self.syncs_buffers
        return arguments

    def register_comm_hook(self, model: DistributedDataParallel, group: Any = None) -> None:
        """Registers the configured communication hook on a DDP model; does nothing for ``"no"``."""
        hook, wrapper = hook_name(self.comm_hook), hook_name(self.comm_wrapper, "comm_wrapper")
        register_comm_hook(model, hook, wrapper, self.comm_state_option, group=group)


DistributedDataParallelKwargs = DDPConfig
