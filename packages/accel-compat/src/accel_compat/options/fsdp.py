"""FSDP's plugin with Accelerate's fields, variables and errors."""

import functools
import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel_compat.options.handlers import MutableHandler
from accel_state.environment import str_to_bool

LOG = logging.getLogger("accelerate.utils.dataclasses")
PREFIX = "FSDP_"
PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
DTYPES = {"fp8": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def _env(name: str, default: Any = None) -> Any:
    return os.environ.get(PREFIX + name, default)


def _flag(name: str, default: str = "False") -> bool:
    return str_to_bool(str(_env(name, default))) == 1


def get_module_class_from_name(module: nn.Module, name: str) -> type | None:
    """Class with this name among a module and its children."""
    return next((type(one) for one in module.modules() if type(one).__name__ == name), None)


@dataclass
class CompatFSDPPlugin(MutableHandler):
    """Options of fully sharded data parallelism; None is completed from the variables ``FSDP_…``."""

    fsdp_version: Any = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[..., Any] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Any = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        if self.fsdp_version is None:
            self.fsdp_version = int(_env("VERSION", "1"))
        self._notes: list[str] = []
        self._policy_of_precision: Any = None  # the run's precision made it, and the backend has its own
        self._complete_sharding()
        self._complete_prefetch()
        if self.mixed_precision_policy is not None:
            self._complete_policy()
        self._complete_wrap()
        self._complete_offload()
        self._complete_modules()
        self._complete_flags()
        self.set_state_dict_type()
        if self._notes:
            LOG.warning("Multiple deprecation warnings due to FSDP2 conversion:\n%s", "\n".join(self._notes))

    @property
    def _second(self) -> bool:
        return bool(self.fsdp_version == 2)

    def _complete_sharding(self) -> None:
        from torch.distributed.fsdp import ShardingStrategy

        if self.sharding_strategy is not None:
            self._notes.append("sharding_strategy is deprecated in favor of reshard_after_forward")
        if self._second:
            if self.reshard_after_forward is None:
                self.reshard_after_forward = _env("RESHARD_AFTER_FORWARD", "true")
            if isinstance(self.reshard_after_forward, str):
                word = self.reshard_after_forward.lower()
                self.reshard_after_forward = (
                    str_to_bool(word, to_bool=True) if word in ("true", "false", "1", "0", "yes", "no") else word
                )
            if not isinstance(self.reshard_after_forward, bool):
                raise ValueError(
                    f"reshard_after_forward set to {self.reshard_after_forward}. This is not supported with FSDP2, please set to a `bool`"
                )
            return
        if isinstance(self.reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward set to {self.reshard_after_forward}. This is not supported with FSDP1, please set to a `str` or an instance of `torch.distributed.fsdp.fully_sharded_data_parallel.ShardingStrategy`"
            )
        if self.sharding_strategy is None:
            self.sharding_strategy = _env("SHARDING_STRATEGY", "FULL_SHARD")
        if self.reshard_after_forward is None:
            self.reshard_after_forward = _env("RESHARD_AFTER_FORWARD", self.sharding_strategy)
        self.sharding_strategy = _strategy(self.sharding_strategy, ShardingStrategy)
        self.reshard_after_forward = _strategy(self.reshard_after_forward, ShardingStrategy)

    def _complete_prefetch(self) -> None:
        from torch.distributed.fsdp import BackwardPrefetch

        if self.backward_prefetch is None:
            self.backward_prefetch = _env("BACKWARD_PREFETCH")
        given = self.backward_prefetch
        if given is not None and not isinstance(given, BackwardPrefetch):
            text = PREFETCH[int(given) - 1] if str(given).isdigit() else str(given).upper()
            self.backward_prefetch = None if text in ("NO_PREFETCH", "NONE") else BackwardPrefetch[text]
        if self._second and self.backward_prefetch is not None:
            self._notes.append("backward_prefetch is not supported in FSDP2. Setting backward prefetch to None.")
            self.backward_prefetch = None

    def _policy_class(self) -> type:
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        return MixedPrecisionPolicy if self._second else MixedPrecision

    def _complete_policy(self) -> None:
        given = self.mixed_precision_policy
        if isinstance(given, str):
            self.set_mixed_precision(given, override=True)
        elif isinstance(given, dict):
            last = "output_dtype" if self._second else "buffer_dtype"
            self.mixed_precision_policy = self._policy_class()(
                **{name: _dtype(given[name]) for name in ("param_dtype", "reduce_dtype", last) if name in given}
            )
        self.validate_mixed_precision_policy()

    def validate_mixed_precision_policy(self) -> None:
        """Raises ValueError for the policy of the other version."""
        kind = self._policy_class()
        if not isinstance(self.mixed_precision_policy, kind):
            required = "torch.distributed.fsdp." + kind.__name__
            raise ValueError(
                f"mixed_precision_policy must be an instance of {required} with FSDP{self.fsdp_version}, got {type(self.mixed_precision_policy).__name__}"
            )

    def set_mixed_precision(self, mixed_precision: str, buffer_autocast: bool = False, override: bool = False) -> None:
        """Sets the dtypes of a precision, unless a policy is set and ``override`` is not."""
        if mixed_precision not in DTYPES:
            raise ValueError(f"Must be one of {list(DTYPES)}; got mixed_precision={mixed_precision!r}")
        dtype = DTYPES[mixed_precision]
        if self.mixed_precision_policy is not None and not override:
            return
        last = "output_dtype" if self._second else "buffer_dtype"
        self.mixed_precision_policy = self._policy_class()(param_dtype=dtype, reduce_dtype=dtype, **{last: dtype})
        self._policy_of_precision = None if override else self.mixed_precision_policy

    @property
    def has_own_policy(self) -> bool:
        """Whether the user gave the dtypes, which then override those of the run's precision."""
        policy = self.mixed_precision_policy
        return policy is not None and policy is not self._policy_of_precision

    def _complete_wrap(self) -> None:
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        if self.auto_wrap_policy is None:
            self.auto_wrap_policy = _env("AUTO_WRAP_POLICY", "NO_WRAP")
        if isinstance(self.auto_wrap_policy, str):
            name = self.auto_wrap_policy.upper()
            if name not in WRAPS:
                raise ValueError(f"Invalid auto wrap policy: {self.auto_wrap_policy}. Must be one of {list(WRAPS)}")
            self.auto_wrap_policy = {
                "TRANSFORMER_BASED_WRAP": transformer_auto_wrap_policy,
                "SIZE_BASED_WRAP": size_based_auto_wrap_policy,
                "NO_WRAP": None,
            }[name]
        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            if self.transformer_cls_names_to_wrap is None:
                self.transformer_cls_names_to_wrap = _env("TRANSFORMER_CLS_TO_WRAP")
            if isinstance(self.transformer_cls_names_to_wrap, str):
                self.transformer_cls_names_to_wrap = self.transformer_cls_names_to_wrap.split(",")
        elif self.auto_wrap_policy is size_based_auto_wrap_policy:
            if self.min_num_params is None:
                self.min_num_params = int(_env("MIN_NUM_PARAMS", 0))
            elif not isinstance(self.min_num_params, int):
                raise ValueError(
                    f"`min_num_params` must be an integer. Got {self.min_num_params} of type {type(self.min_num_params)}"
                )

    def _complete_offload(self) -> None:
        if self.cpu_offload is None:
            self.cpu_offload = _flag("OFFLOAD_PARAMS")
        self.set_cpu_offload()
        self.validate_cpu_offload()

    def set_cpu_offload(self) -> None:
        """Turns a flag into torch's options of the version."""
        from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

        if isinstance(self.cpu_offload, bool) and self._second:
            self.cpu_offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()
        elif isinstance(self.cpu_offload, bool):
            self.cpu_offload = CPUOffload(offload_params=self.cpu_offload)

    def validate_cpu_offload(self) -> None:
        """Raises ValueError for options of the other version."""
        from torch.distributed.fsdp import CPUOffload, OffloadPolicy

        kind: type = OffloadPolicy if self._second else CPUOffload
        if not isinstance(self.cpu_offload, kind):
            raise ValueError(
                f"`cpu_offload` must be an instance of `torch.distributed.fsdp.{kind.__name__}` in FSDP{self.fsdp_version}, got {self.cpu_offload}"
            )

    def _complete_modules(self) -> None:
        if self.ignored_modules is None:
            self.ignored_modules = _env("IGNORED_MODULES")
        if self.use_orig_params is None and not self._second:
            self.use_orig_params = _flag("USE_ORIG_PARAMS")
        if self._second and self.use_orig_params is not None:
            self._notes.append("use_orig_params is obsolete in FSDP2, as FSDP2 always uses the original parameters.")
            self.use_orig_params = None

    def _complete_flags(self) -> None:
        if self.activation_checkpointing is None:
            self.activation_checkpointing = _flag("ACTIVATION_CHECKPOINTING")
        if self.activation_checkpointing_offload is None:
            self.activation_checkpointing_offload = _flag("ACTIVATION_CHECKPOINTING_OFFLOAD")
        if self.activation_checkpointing_offload and not (self.activation_checkpointing and self._second):
            raise ValueError(
                "`activation_checkpointing_offload` requires `activation_checkpointing` and FSDP version 2"
            )
        if self.forward_prefetch is None and not self._second:
            self.forward_prefetch = _flag("FORWARD_PREFETCH")
        elif self._second and self.forward_prefetch is not None:
            raise ValueError("forward_prefetch is not yet implemented in FSDP2, set to None or use `fsdp_version=1`")
        if self.cpu_ram_efficient_loading is None:
            self.cpu_ram_efficient_loading = _flag("CPU_RAM_EFFICIENT_LOADING")
        else:
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(self.cpu_ram_efficient_loading)
        if self.sync_module_states is None and not self._second:
            self.sync_module_states = _flag("SYNC_MODULE_STATES")
        if self._second:
            if self.sync_module_states is not None:
                self._notes.append("sync_module_states is obsolete in FSDP2, as it is not needed anymore.")
            self.sync_module_states = None
            return
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            LOG.warning(
                "sync_module_states cannot be False since efficient cpu ram loading enabled. Setting sync_module_states to True."
            )
            self.sync_module_states = True
        if self.sync_module_states:
            if not torch.accelerator.is_available():
                raise RuntimeError(
                    "There are currently no available devices found, must be one of 'XPU', 'CUDA', 'MLU', 'NPU', 'MUSA', or 'HPU'."
                )
            device = torch.accelerator.current_accelerator()
            self.param_init_fn = lambda module: module.to_empty(device=device, recurse=False)

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Sets the form of state dicts, and torch's options for it."""
        from torch.distributed.fsdp import (
            FullOptimStateDictConfig,
            FullStateDictConfig,
            ShardedOptimStateDictConfig,
            ShardedStateDictConfig,
            StateDictType,
        )

        if state_dict_type is not None:
            self.state_dict_type = state_dict_type
        if self.state_dict_type is None:
            self.state_dict_type = _env("STATE_DICT_TYPE", "SHARDED_STATE_DICT" if self._second else "FULL_STATE_DICT")
        if not isinstance(self.state_dict_type, StateDictType):
            text = str(self.state_dict_type)
            self.state_dict_type = StateDictType(int(text)) if text.isdigit() else StateDictType[text.upper()]
        if self._second and self.state_dict_type == StateDictType.LOCAL_STATE_DICT:
            raise ValueError(
                "FSDP2 does not support LOCAL_STATE_DICT. Please set `fsdp_state_dict_type` to `SHARDED_STATE_DICT` or `FULL_STATE_DICT`."
            )
        if self.state_dict_type == StateDictType.FULL_STATE_DICT:
            self.state_dict_config = self.state_dict_config or FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            self.optim_state_dict_config = self.optim_state_dict_config or FullOptimStateDictConfig(
                offload_to_cpu=True, rank0_only=True
            )
        elif self.state_dict_type == StateDictType.SHARDED_STATE_DICT:
            self.state_dict_config = self.state_dict_config or ShardedStateDictConfig(offload_to_cpu=True)
            self.optim_state_dict_config = self.optim_state_dict_config or ShardedOptimStateDictConfig(
                offload_to_cpu=True
            )

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Binds the policy to the model's classes."""
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            names: Iterable[str] = self.transformer_cls_names_to_wrap or getattr(model, "_no_split_modules", None) or []
            classes = set()
            for name in names:
                found = get_module_class_from_name(model, name)
                if found is None:
                    raise ValueError(f"Could not find the transformer layer class {name} in the model.")
                classes.add(found)
            self.auto_wrap_policy = functools.partial(self.auto_wrap_policy, transformer_layer_cls=classes)
        elif self.auto_wrap_policy is size_based_auto_wrap_policy:
            smallest = self.min_num_params or 0
            self.auto_wrap_policy = (
                functools.partial(self.auto_wrap_policy, min_num_params=smallest) if smallest > 0 else None
            )


def _strategy(given: Any, kind: Any) -> Any:
    if isinstance(given, kind):
        return given
    text = str(given)
    return kind(int(text)) if text.isdigit() else kind[text.upper()]


def _dtype(given: Any) -> Any:
    return DTYPES[given] if isinstance(given, str) and given in DTYPES else given


def get_parameters_from_modules(modules: Any, model: nn.Module, device: Any) -> set[nn.Parameter]:
    """Parameters of modules, or of those whose names a regular expression matches."""
    if modules is None:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [module.to(device) for name, module in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for module in modules for parameter in module.parameters()}
