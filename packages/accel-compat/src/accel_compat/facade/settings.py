"""Properties of the Accelerator that are settings of the run."""

import os
from typing import Any

from accel_compat.options.handlers import DataLoaderConfiguration


class SettingProperties:
    """Settings of an Accelerator."""

    dataloader_config: DataLoaderConfiguration
    project_configuration: Any
    _backend: Any
    state: Any

    @property
    def mixed_precision(self) -> str:
        """Name of the precision."""
        return str(self.state.mixed_precision)

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is the global one."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads for all processes."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether all processes get equally many batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether random orders are functions of a seed and the epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether copies to the device overlap."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders are torchdata's."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> Any:
        """Folder of the project."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> Any:
        """Folder of logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next checkpoint."""
        return int(self.project_configuration.iteration)

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by FSDP2."""
        return bool(self.state.is_fsdp2)

    @property
    def deepspeed_plugin(self) -> Any:
        """DeepSpeed's options in use."""
        return self.state.deepspeed_plugin

    @property
    def backend(self) -> Any:
        """accel's backend, which trains."""
        return self._backend

    @property
    def deepspeed_config(self) -> Any:
        """DeepSpeed's configuration, in which ``prepare`` replaces every "auto"; None without DeepSpeed."""
        plugin = self.deepspeed_plugin
        return None if plugin is None else plugin.deepspeed_config

    @property
    def parallelism_config(self) -> Any:
        """Degrees of parallelism, or None."""
        return self.state.parallelism_config

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether several kinds of parallelism can be combined."""
        return self.is_fsdp2

    @property
    def torch_device_mesh(self) -> Any:
        """Mesh of the degrees of parallelism, or None."""
        return self.state.device_mesh

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes weights."""
        return bool(self.state.is_main_process)

    @property
    def fp8_enabled(self) -> bool:
        """Whether the precision is fp8."""
        return self.mixed_precision == "fp8"

    @property
    def delayed_fp8_autocast(self) -> bool:
        """Whether fp8 begins after models are wrapped."""
        return False

    @property
    def fp8_backend(self) -> Any:
        """Library of fp8."""
        from accel.utils.enums import FP8BackendType

        return FP8BackendType(os.environ.get("ACCELERATE_FP8_BACKEND", "NO"))

    @property
    def tensor_parallel_rank(self) -> int:
        """Position along the axis of tensor parallelism."""
        return self._along("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Position along the axis of pipeline parallelism."""
        return self._along("pp")

    @property
    def context_parallel_rank(self) -> int:
        """Position along the axis of context parallelism."""
        return self._along("cp")

    @property
    def data_parallel_rank(self) -> int:
        """Position along the axis of data parallelism."""
        return self._along("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Position along the axis of sharded data parallelism."""
        return self._along("dp_shard")

    def _along(self, axis: str) -> int:
        mesh = self.torch_device_mesh
        if mesh is None or axis not in mesh.mesh_dim_names:
            raise RuntimeError(f"there is no axis {axis!r} in this run; give `parallelism_config` to the Accelerator")
        return int(mesh.get_local_rank(axis))
