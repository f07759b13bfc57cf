"""Settings of an Accelerator, under the names that users of Accelerate know."""

import dataclasses
from abc import ABC
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from accel.loop.accumulator import StepClock
from accel.optimizer import PreparedOptimizer
from accel.setup.kwargs_handlers import ProjectConfiguration
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel.state import AcceleratorState, GradientState
    from accel_backends import Backend, FullyShardedDataParallelPlugin
    from accel_data import LoaderOptions
    from accel_deepspeed import DeepSpeedPlugin
    from accel_precision import PrecisionPolicy
    from accel_state import DistributedType, FP8BackendType, ParallelismConfig
    from accel_state.session import Session


class SettingsFacet(ABC):
    """Properties read from the parts that own the settings; only those that may change during a run can be set."""

    session: "Session"
    clock: StepClock
    backend: "Backend"
    policy: "PrecisionPolicy"
    dataloader_config: "LoaderOptions"
    parallelism_config: "ParallelismConfig"
    project_configuration: ProjectConfiguration
    _optimizers: list[PreparedOptimizer]

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
        from accel_state import FP8BackendType

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
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"no DeepSpeed plugin {name!r}; there are {', '.join(known) or 'none by name'}{hint}")
        from accel_backends.core.native import native
        from accel_deepspeed import DeepSpeedBackend

        native(self.backend, DeepSpeedBackend).reconfigure(known[name])

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
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is the global one, of which each process takes its shard."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads for all; None: for iterable datasets only."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether samples are repeated so that every process gets equally many, full batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self.dataloader_config = dataclasses.replace(self.dataloader_config, even_batches=even)

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling follows ``data_seed`` instead of the loader's own generator."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device without waiting for the copy."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders with a state were requested; every prepared loader has a state."""
        return self.dataloader_config.use_stateful_dataloader

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
