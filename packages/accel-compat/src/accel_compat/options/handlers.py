"""Options as Accelerate has them: handlers, loaders, accumulation, project."""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from accel_backends.ddp.comm_hooks import DDPCommunicationHookType
from accel_state.environment import clear_environment, str_to_bool


class MutableHandler:
    """Base of options that can be changed after they are made."""

    def to_dict(self) -> dict[str, Any]:
        """Returns a deep copy of the fields."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Returns the fields that differ from those of a new object."""
        with clear_environment():
            default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if default.get(name) != value}


@dataclass
class CompatAutocastKwargs(MutableHandler):
    """Options of autocast."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class CompatDDPKwargs(MutableHandler):
    """Options of DistributedDataParallel."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: Any = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Returns the fields that DistributedDataParallel takes."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Registers the configured hook with a wrapped model."""
        from accel_backends.ddp.config import DistributedDataParallelKwargs

        DistributedDataParallelKwargs(
            comm_hook=self.comm_hook, comm_wrapper=self.comm_wrapper, comm_state_option=self.comm_state_option
        ).register_comm_hook(model, model.process_group)


@dataclass
class CompatGradScalerKwargs(MutableHandler):
    """Options of the fp16 loss scale."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class CompatProcessGroupKwargs(MutableHandler):
    """Options of the process group."""

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.timeout is None:
            self.timeout = timedelta(seconds=1800 if self.backend != "nccl" else 600)


@dataclass
class CompatAccumulationPlugin(MutableHandler):
    """Options of gradient accumulation."""

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class DataLoaderConfiguration:
    """Options of prepared loaders."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        if self.use_stateful_dataloader:
            from accel_compat.data.loaders import stateful_loader

            stateful_loader()


@dataclass
class CompatProjectConfiguration:
    """Folders of a project, and the names of its checkpoints."""

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: Any = None) -> None:
        """Sets the project's folder, and that of logs if it has none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass
class CompatProfileKwargs(MutableHandler):
    """Options of torch's profiler."""

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> Any:
        """Returns a profiler with these options."""
        from accel.utils.dataclasses import ProfileKwargs

        return ProfileKwargs(**vars(self)).build()


@dataclass
class CompatDynamoPlugin(MutableHandler):
    """Options of torch.compile."""

    backend: Any = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        from accel.utils.enums import DynamoBackend

        if self.backend is None:
            self.backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
        self.backend = DynamoBackend(str(self.backend).upper())
        prefix = "ACCELERATE_DYNAMO_"
        if self.mode is None:
            self.mode = os.environ.get(f"{prefix}MODE", "default")
        if self.fullgraph is None:
            self.fullgraph = str_to_bool(os.environ.get(f"{prefix}USE_FULLGRAPH", "False")) == 1
        if self.use_regional_compilation is None:
            self.use_regional_compilation = (
                str_to_bool(os.environ.get(f"{prefix}USE_REGIONAL_COMPILATION", "False")) == 1
            )
        if self.dynamic is None and os.environ.get(f"{prefix}USE_DYNAMIC") is not None:
            self.dynamic = str_to_bool(os.environ[f"{prefix}USE_DYNAMIC"]) == 1

    def to_dict(self) -> dict[str, Any]:
        """Returns a deep copy of the fields, with the backend as text."""
        fields = copy.deepcopy(self.__dict__)
        fields["backend"] = fields["backend"].value.lower()
        return fields

    def to_kwargs(self) -> dict[str, Any]:
        """Returns the arguments of torch.compile."""
        kwargs = super().to_kwargs()
        kwargs.pop("use_regional_compilation", None)
        return kwargs


@dataclass
class MSAMPRecipeKwargs(MutableHandler):
    """Options of MS-AMP; a deprecated library that accel does not drive."""

    opt_level: str = field(default_factory=lambda: os.environ.get("ACCELERATE_FP8_OPT_LEVEL", "O2"))

    def __post_init__(self) -> None:
        if self.opt_level not in ("O1", "O2"):
            raise ValueError(f"`opt_level` must be one of O1, O2; got {self.opt_level!r}")
