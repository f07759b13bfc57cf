"""AcceleratorState: precision and strategy of the run, shared by all instances."""

from contextlib import AbstractContextManager
from typing import Any

from accel_compat.state.process_state import _FACTS, SharedPartialState
from accel_compat.state.shared import SharedAttributes
from accel_state.enums import DistributedType
from accel_state.environment import parse_choice_from_env, parse_flag_from_env

PRECISIONS = ("no", "fp8", "fp16", "bf16")


class SharedAcceleratorState(SharedAttributes):
    """Precision and strategy as Accelerate's ``AcceleratorState`` presents them: one state for all instances.

    Attributes:
        deepspeed_plugins: DeepSpeed's options by name, or None.
        parallelism_config: degrees of parallelism, or None.
        device_mesh: mesh of those degrees, or None.
    """

    _shared_state: dict[str, Any] = {}
    _known_attrs = frozenset(
        (*_FACTS.split(), "deepspeed_plugin", "dynamo_plugin", "fsdp_plugin", "megatron_lm_plugin")
    )
    _shown = "AcceleratorState"
    distributed_type: DistributedType

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        cpu = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
        if SharedPartialState._shared_state == {}:
            SharedPartialState(cpu, **kwargs)
        self.__dict__.update(SharedPartialState._shared_state)
        self._check_initialized(mixed_precision, cpu)
        if self.initialized:
            return
        self.deepspeed_plugins: dict[str, Any] | None = None
        self.torch_tp_plugin = torch_tp_plugin
        self.parallelism_config = parallelism_config
        self.device_mesh: Any = None
        self.use_ipex = None
        precision = (
            parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no") if mixed_precision is None else mixed_precision
        )
        precision = precision.lower()
        if precision == "fp8":
            precision = _checked_fp8()
        self.dynamo_plugin = dynamo_plugin
        if not _from_accelerator:
            raise ValueError(
                "Please make sure to properly initialize your accelerator via `accelerator = Accelerator()` before "
                "using any functionality from the `accelerate` library."
            )
        self._mixed_precision = (
            "no" if self.distributed_type == DistributedType.DEEPSPEED and precision != "fp8" else precision
        )
        if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED") and not cpu:
            self._select_deepspeed(deepspeed_plugin, precision)
        elif self.distributed_type.value.startswith("MULTI_") or self.distributed_type == DistributedType.NO:
            sharded = parse_flag_from_env("ACCELERATE_USE_FSDP") or fsdp_plugin is not None
            if sharded and self.num_processes > 1:
                self.distributed_type = DistributedType.FSDP
                if self._mixed_precision != "no" and fsdp_plugin is not None:
                    fsdp_plugin.set_mixed_precision(self._mixed_precision)
                self.fsdp_plugin = fsdp_plugin
            elif fsdp_plugin is not None:
                self.fsdp_plugin = fsdp_plugin
        SharedPartialState._shared_state["distributed_type"] = self.distributed_type

    def _select_deepspeed(self, plugin: Any, precision: str) -> None:
        self.distributed_type = DistributedType.DEEPSPEED
        plugins = plugin if isinstance(plugin, dict) else {"default": plugin}
        for one in plugins.values():
            if one is not None:
                one.set_mixed_precision(precision)
        self.deepspeed_plugins = None if plugin is None else plugins
        self._deepspeed_name = next(iter(plugins))
        if plugin is not None:
            plugins[self._deepspeed_name].select(_from_accelerator_state=True)

    @property
    def initialized(self) -> bool:
        """Whether the state has more than the process's facts."""
        return self._shared_state != SharedPartialState._shared_state

    def __repr__(self) -> str:
        text = f"{SharedPartialState()!r}\nMixed precision type: {self.mixed_precision}\n"
        if self.distributed_type == DistributedType.DEEPSPEED and self.deepspeed_plugin is not None:
            text += f"ds_config: {self.deepspeed_plugin.deepspeed_config}\n"
        return text

    def _check_initialized(self, mixed_precision: str | None = None, cpu: bool | None = None) -> None:
        if not self.initialized:
            return
        problem = "AcceleratorState has already been initialized and cannot be changed, restart your runtime completely and pass `{flag}` to `Accelerator()`."
        if cpu and self.device.type != "cpu":
            raise ValueError(problem.format(flag="cpu=True"))
        if (
            mixed_precision is not None
            and mixed_precision != self._mixed_precision
            and self.distributed_type != DistributedType.DEEPSPEED
        ):
            raise ValueError(problem.format(flag=f"mixed_precision='{mixed_precision}'"))

    @property
    def mixed_precision(self) -> str:
        """Name of the precision; under DeepSpeed that of its configuration."""
        if self.distributed_type != DistributedType.DEEPSPEED or self._mixed_precision == "fp8":
            return str(self._mixed_precision)
        config = {} if self.deepspeed_plugin is None else self.deepspeed_plugin.deepspeed_config
        for name in ("fp16", "bf16"):
            if config.get(name, {}).get("enabled", False):
                return name
        return "no"

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forgets the state, and with ``reset_partial_state`` that of the process."""
        SharedAcceleratorState._shared_state.clear()
        if reset_partial_state:
            SharedPartialState._reset_state()

    @property
    def deepspeed_plugin(self) -> Any:
        """DeepSpeed's options in use, or None."""
        if self.distributed_type != DistributedType.DEEPSPEED or self.deepspeed_plugins is None:
            return None
        return self.deepspeed_plugins[self._deepspeed_name]

    def get_deepspeed_plugin(self, name: str) -> Any:
        """DeepSpeed's options with this name."""
        assert self.deepspeed_plugins is not None
        return self.deepspeed_plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Selects DeepSpeed's options of models prepared from now on."""
        assert self.deepspeed_plugins is not None
        assert name is not None
        chosen = self.deepspeed_plugins[name]
        for plugin in self.deepspeed_plugins.values():
            if plugin is not chosen:
                plugin._unselect()
        chosen.select(_from_accelerator_state=True)
        self._deepspeed_name = name

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by FSDP2."""
        plugin = self.__dict__.get("fsdp_plugin")
        return self.distributed_type == DistributedType.FSDP and plugin is not None and plugin.fsdp_version == 2

    @property
    def fork_launched(self) -> bool:
        """Whether the processes were forked."""
        return bool(SharedPartialState().fork_launched)

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return SharedPartialState().use_distributed

    @property
    def is_last_process(self) -> bool:
        """Whether this process has the highest rank."""
        return SharedPartialState().is_last_process

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return SharedPartialState().is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return SharedPartialState().is_local_main_process

    def wait_for_everyone(self) -> None:
        """Barrier: blocks until every process has called this."""
        SharedPartialState().wait_for_everyone()

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Context manager that yields this rank's shard of ``inputs``."""
        return SharedPartialState().split_between_processes(inputs, apply_padding)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Context manager: rank 0 runs the block before the other ranks."""
        return SharedPartialState().main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Context manager: local rank 0 runs the block before the other ranks of its node."""
        return SharedPartialState().local_main_process_first()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on local rank 0 of each node."""
        SharedPartialState().print(*args, **kwargs)

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroys the process group, unless the processes were forked."""
        SharedPartialState().destroy_process_group(group)


def _checked_fp8() -> str:
    from accel.utils.imports import is_fp8_available

    if not is_fp8_available():
        raise ValueError("Using `fp8` precision requires `transformer_engine` or `torchao` to be installed.")
    return "fp8"


def is_initialized() -> bool:
    """Whether an Accelerator has been made."""
    return SharedAcceleratorState._shared_state != {}
