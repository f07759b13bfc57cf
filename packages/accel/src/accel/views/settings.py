"""Settings of an Accelerator, and its position in the device mesh, read from the parts that own them."""

import dataclasses
from abc import ABC
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from accel_state.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from accel.checkpoints.checkpointer import Checkpointer
    from accel.checkpoints.load_report import LoadReport
    from accel.loop.accumulator import StepClock
    from accel.loop.loaders import Loaders
    from accel.prepared import Preparation, PreparedObjects
    from accel.setup.run_strategy import RunStrategy
    from accel.state import AcceleratorState, GradientState
    from accel.utils.enums import FP8BackendType
    from accel_backends import Backend, Choice, FullyShardedDataParallelPlugin, TorchDynamoPlugin
    from accel_ckpt import SaveHandle
    from accel_ckpt.series.project import ProjectConfiguration
    from accel_data import LoaderOptions
    from accel_deepspeed import DeepSpeedPlugin
    from accel_launch.config.model import AccelConfig
    from accel_precision import PrecisionPolicy
    from accel_state import DataShard, DistributedType, ParallelismConfig
    from accel_state.session import Session
B = TypeVar("B", bound="Backend")


class SettingViews(ABC):
    """Settings and the position in the device mesh; only settings that may change during a run can be set.

    Attributes:
        config: the settings, with the origin of each.
        policy: dtype of each role.
        clock: counts the micro-batches of accumulation windows.
        project_configuration: folders of the project, and names and number of its checkpoints.
    """

    session: "Session"
    config: "AccelConfig"
    policy: "PrecisionPolicy"
    clock: "StepClock"
    project_configuration: "ProjectConfiguration"
    _strategy: "RunStrategy"
    _prepared: "PreparedObjects"
    _loaders: "Loaders"
    _preparation: "Preparation"
    _checkpointer: "Checkpointer"

    if not TYPE_CHECKING:  # otherwise type checkers would accept every attribute name

        def __getattr__(self, name: str) -> object:
            from accel.absent import missing_on_accelerator

            missing = missing_on_accelerator(self, name)
            if missing is not None:
                raise missing
            return object.__getattribute__(self, name)  # raises the original error again, also from within a property

    @property
    def state(self) -> "AcceleratorState":
        """View of the process and the settings, for code that expects an ``AcceleratorState``."""
        from accel.state import AcceleratorState

        return AcceleratorState(self)

    @property
    def gradient_state(self) -> "GradientState":
        """View of the accumulation clock, for code that expects a ``GradientState``."""
        from accel.state import GradientState

        return GradientState(self.clock)

    @property
    def prepared(self) -> "PreparedObjects":
        """Everything that this Accelerator has prepared, and the objects that were registered with it."""
        return self._prepared

    @property
    def backend(self) -> "Backend":
        """The backend that trains; with ``strategy="auto"`` a provisional one until a model is prepared."""
        return self._strategy.backend

    @property
    def choice(self) -> "Choice":
        """Name of the backend, and the reasons for it."""
        return self._strategy.choice

    @property
    def parallelism_config(self) -> "ParallelismConfig":
        """Degrees of parallelism."""
        return self._strategy.parallelism

    @property
    def data_shard(self) -> "DataShard":
        """Shard of the samples that this process reads."""
        return self._strategy.data_shard

    def native(self, kind: "type[B]") -> "B":
        """Returns the backend as an instance of ``kind``, with the methods that only that backend has.

        ``accelerator.native(DeepSpeedBackend).zero_init()``, for example.

        Raises:
            BackendError: another backend runs; the message names the strategy that gives this one.
        """
        from accel_backends.core.native import native

        return native(self.backend, kind)

    @property
    def distributed_type(self) -> "DistributedType":
        """Accelerate's name for the kind of distribution."""
        from accel.state import distributed_type

        return distributed_type(self.session, self.backend)

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each with its own accelerator."""
        return self.session.world_size > 1 and self.session.device.type != "cpu"

    @property
    def mixed_precision(self) -> str:
        """Name of the precision policy: no, fp16, bf16, fp8, or the given roles."""
        return self.policy.name

    @property
    def fp8_backend(self) -> "FP8BackendType | str":
        """Library that computes in fp8: AO, TE, NO, or the name of another installed library."""
        from accel.utils.enums import FP8BackendType

        library = "" if self.policy.fp8 is None else self.policy.fp8.library
        known = {"": FP8BackendType.NO, "torchao": FP8BackendType.AO, "transformer_engine": FP8BackendType.TE}
        return known.get(library, library)

    @property
    def scaler(self) -> Any:
        """Loss scaler; None if the precision needs none."""
        return self.backend.loss_scale

    @property
    def fsdp_plugin(self) -> "FullyShardedDataParallelPlugin | None":
        """Sharding options; None if torch does not shard the models."""
        from accel_backends import FullyShardedDataParallelPlugin

        config = self.backend.config
        return config if isinstance(config, FullyShardedDataParallelPlugin) else None

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by FSDP2 (``fully_shard``)."""
        plugin = self.fsdp_plugin
        return plugin is not None and plugin.fsdp_version == 2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Same as ``is_fsdp2``: only FSDP2 composes with other kinds of parallelism."""
        return self.is_fsdp2

    @property
    def deepspeed_plugin(self) -> "DeepSpeedPlugin | None":
        """DeepSpeed's options; None without DeepSpeed."""
        from accel_deepspeed import DeepSpeedPlugin

        config = self.backend.config
        return config if isinstance(config, DeepSpeedPlugin) else None

    @property
    def deepspeed_plugins(self) -> "Mapping[str, DeepSpeedPlugin]":
        """DeepSpeed's options by name, if several were given."""
        plugin = self.deepspeed_plugin
        return {} if plugin is None else dict(plugin.plugins)

    def select_deepspeed_plugin(self, name: str) -> None:
        """Selects the options of models prepared from now on; existing engines keep theirs.

        Raises:
            ConfigError: ``deepspeed_plugins`` has no such name.
        """
        known = self.deepspeed_plugins
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"no DeepSpeed plugin {name!r}; there are {', '.join(known) or 'none by name'}{hint}")
        from accel_deepspeed import DeepSpeedBackend

        self.native(DeepSpeedBackend).reconfigure(known[name])

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends an accumulation window."""
        return self.clock.due

    @sync_gradients.setter
    def sync_gradients(self, due: bool) -> None:
        self.clock.due = due

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one optimizer step."""
        return self.clock.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, num_steps: int) -> None:
        self.clock.num_steps = num_steps

    @property
    def step(self) -> int:
        """Micro-batches counted by ``accumulate`` since a loader last ended."""
        return self.clock.step

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether a prepared optimizer skipped its last due step because gradients had overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    @property
    def dataloader_config(self) -> "LoaderOptions":
        """How loaders that are prepared from now on are sharded."""
        return self._loaders.options

    @dataloader_config.setter
    def dataloader_config(self, options: "LoaderOptions") -> None:
        self._loaders.options = options

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is the global one, of which each process takes its shard."""
        return self._loaders.options.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads for all; None: for iterable datasets only."""
        return self._loaders.options.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether samples are repeated so that every process gets equally many, full batches."""
        return self._loaders.options.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._loaders.options = dataclasses.replace(self._loaders.options, even_batches=even)

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling follows ``data_seed`` instead of the loader's own generator."""
        return self._loaders.options.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device without waiting for the copy."""
        return self._loaders.options.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders with a state were requested; every prepared loader has a state."""
        return self._loaders.options.use_stateful_dataloader

    @property
    def rng_types(self) -> tuple[str, ...]:
        """Random generators that are set to the main process's state whenever a pass of a loader begins."""
        return self._loaders.rng_types

    @rng_types.setter
    def rng_types(self, kinds: tuple[str, ...]) -> None:
        self._loaders.rng_types = kinds

    @property
    def device_placement(self) -> bool:
        """Whether prepared models and batches are moved to the device."""
        return self._preparation.options.device_placement

    @device_placement.setter
    def device_placement(self, placed: bool) -> None:
        self._preparation.options.device_placement = placed

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers that are prepared from now on step only when their optimizer does."""
        return self._preparation.options.follow_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, follow: bool) -> None:
        self._preparation.options.follow_optimizer = follow

    @property
    def dynamo_plugin(self) -> "TorchDynamoPlugin | None":
        """Options of compilation; None: models are not compiled."""
        return self._preparation.options.dynamo

    @dynamo_plugin.setter
    def dynamo_plugin(self, plugin: "TorchDynamoPlugin | None") -> None:
        self._preparation.options.dynamo = plugin

    @property
    def project_dir(self) -> Any:
        """The project's folder."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> Any:
        """Folder in which trackers write."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next automatic checkpoint."""
        return self.project_configuration.iteration

    @property
    def last_save(self) -> "SaveHandle | None":
        """Handle of the last asynchronous save: whether it is done, and how long it blocked the loop."""
        return self._checkpointer.last_save

    @property
    def last_load(self) -> "LoadReport | None":
        """Report of the last ``load_state``: loaded, missing and unused entries, and differences between this run and
        the saved one; None before the first load.
        """
        return self._checkpointer.last_load

    @property
    def torch_device_mesh(self) -> "DeviceMesh | None":
        """Mesh of all processes, with an axis for each degree above 1; None without such a degree.

        Collective: every rank of the group must call this. Later accesses are local.
        """
        return self._strategy.parallelism.get_device_mesh(self.session.device.type)

    @property
    def data_parallel_rank(self) -> int:
        """Index of the model replica of which this process holds all or a shard; 0 if there is one replica."""
        return self._along("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Index of this process's shard of its replica; 0 if the model is not sharded."""
        return self._along("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """Index of this process in its tensor-parallel group; 0 without tensor parallelism."""
        return self._along("tp")

    @property
    def context_parallel_rank(self) -> int:
        """Index of this process in its context-parallel group; 0 without context parallelism."""
        return self._along("cp")

    def maybe_context_parallel(
        self,
        buffers: "Sequence[torch.Tensor] | None" = None,
        buffer_seq_dims: "Sequence[int] | None" = None,
        no_restore_buffers: "Collection[torch.Tensor] | None" = None,
    ) -> AbstractContextManager[None]:
        """With context or sequence parallelism buffers are, within the block and in place, this rank's shards.

        Not needed where a model is called with full sequences, which it shards itself. Labels have to be shifted by one
        before, and be passed to the model as ``shift_labels``. Without these axes nothing changes.

        Args:
            buffers: tensors with full sequences, equal on all ranks of a context- or sequence-parallel group.
            buffer_seq_dims: dim of the sequence of each buffer.
            no_restore_buffers: those of the buffers that may stay shards afterwards.
        """
        layout = self._strategy.backend.layout
        return layout.sharded_buffers(buffers or (), buffer_seq_dims or (), no_restore_buffers or ())

    @property
    def expert_parallel_rank(self) -> int:
        """Index of this process in its expert-parallel group; 0 without expert parallelism."""
        return self._along("ep")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Index of this process's pipeline stage; 0 without pipeline parallelism."""
        return self._along("pp")

    @property
    def should_save_model(self) -> bool:
        """Whether this process holds a shard of the first replica; these processes together hold the full model.

        For your own files: all processes call ``save_state`` and ``save_model``, which distribute the work.
        """
        place = self._strategy.parallelism.coordinates(self.session.rank)
        return not any(place[axis] for axis in ("dp_replicate", "cp", "sp"))

    def _along(self, axis: str) -> int:
        return self._strategy.parallelism.coordinates(self.session.rank)[axis]
