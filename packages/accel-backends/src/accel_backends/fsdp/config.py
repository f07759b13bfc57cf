"""Options of fully sharded data parallelism, under the names of Accelerate's plugin."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, cast, final

from torch import nn

from accel_backends.core.config import BackendConfig, FullStateForm, Resolution, StrategyFacts
from accel_backends.core.option_parsing import (
    AutoWrap,
    BackwardPrefetch,
    MixedDtypes,
    ShardingLevel,
    StateDictKind,
    as_flag,
    as_member,
    as_number,
    full_form,
    mixed_dtypes,
    offloads,
    reshard_value,
    wrap_value,
)
from accel_backends.ops.activation_checkpointing import ActivationCheckpointing
from accel_state.errors import BackendError, ConfigError
from accel_state.parallelism.config import MESH_AXES, ParallelismConfig
from accel_state.topology import Topology

PREFIX, AUTO = "FSDP_", "auto"
MODEL_AXES = ("ep", "cp", "sp", "tp")
"""Axes that are applied to a model before it is sharded, outermost first."""
_KEEPS = (ShardingLevel.SHARD_GRAD_OP, ShardingLevel.NO_SHARD, ShardingLevel.HYBRID_SHARD_ZERO2)
_HYBRID = (ShardingLevel.HYBRID_SHARD, ShardingLevel.HYBRID_SHARD_ZERO2)


@final
@dataclass(slots=True)
class FSDPConfig(BackendConfig):
    """Options of sharding parameters, gradients and optimizer states over ranks.

    An option that is None is read from the environment variable ``FSDP_<NAME>`` in capitals (``FSDP_OFFLOAD_PARAMS``,
    ``FSDP_TRANSFORMER_CLS_TO_WRAP``); without it, the default below applies. Enums are given by name in any case, by
    number, or as torch's own members.

    Attributes:
        fsdp_version: 2 shards each parameter (``fully_shard``, backend "fsdp"); 1 flattens them (backend "fsdp1").
        sharding_strategy: FULL_SHARD (1; the default) shards all and frees parameters after forward, SHARD_GRAD_OP (2)
            keeps them until after backward, NO_SHARD (3) replicates, HYBRID_SHARD (4) shards within groups and
            replicates between groups, HYBRID_SHARD_ZERO2 (5) does so and keeps parameters until after backward. "auto":
            the planner chooses among the first four when an Accelerator prepares the first model. Version 2.
        reshard_after_forward: free parameters after forward (takes precedence over the strategy); a number keeps them
            sharded over that many neighbouring ranks between forward and backward. Version 2.
        shard_size: shard degree; None: all ranks, or those of one node with a hybrid strategy.
        replicate_size: number of replicas; None follows from ``shard_size``.
        auto_wrap_policy: selection of the units: TRANSFORMER_BASED_WRAP (by class), SIZE_BASED_WRAP, NO_WRAP (the model
            is the only unit), or a function of a module. None: the given classes, otherwise the model's
            ``_no_split_modules``, otherwise its repeated blocks.
        transformer_cls_names_to_wrap: names of classes, a list or one text with commas.
        min_num_params: minimum number of elements of a unit for SIZE_BASED_WRAP; 0 makes no units.
        mixed_precision_policy: dtypes that override those of the precision: "bf16", a mapping of ``param_dtype``,
            ``reduce_dtype``, ``output_dtype``, ``buffer_dtype`` (version 1) and ``cast_forward_inputs``, or torch's
            object.
        cpu_offload: keep parameters, gradients and optimizer states in host memory.
        pin_memory: pin offloaded tensors; None: yes, unless the device is the CPU.
        ignored_modules: modules that are not sharded, or a pattern that their full names match. They are replicated,
            and the gradients of their parameters are averaged over all ranks. Version 1 takes frozen modules only.
        activation_checkpointing: recompute a unit's activations in backward instead of keeping them.
        activation_checkpointing_offload: keep the inputs of checkpointed units in host memory. Version 2.
        backward_prefetch: BACKWARD_PRE all-gathers the next unit while one computes its backward, NO_PREFETCH does not;
            BACKWARD_POST exists in version 1 only. None: BACKWARD_PRE.
        forward_prefetch: number of units to all-gather ahead in forward (True: 1), beyond the default overlap.
        limit_all_gathers: bound how far the host runs ahead of the device. Version 1; version 2 always does.
        sync_module_states: broadcast rank 0's parameters and buffers first; on by default.
        cpu_ram_efficient_loading: only rank 0 needs the values; other ranks move their models to the meta device before
            sharding. Version 2; with version 1 it saves no memory.
        param_init_fn: initialiser, called with each module whose parameters were on the meta device.
        find_unused_parameters: ranks may use different parameters of one unit in a step; a parameter has a zero
            gradient on ranks that do not use it, and no gradient if no rank uses it. All ranks have to call the same
            units. Version 2.
        use_orig_params: version 1; only True is supported, because False loses the names of parameters.
        state_dict_type: accepted for compatibility; checkpoints are sharded regardless, and load at any number of
            ranks.
        state_dict_config: form of full state dicts from ``get_state_dict``: a mapping of ``offload_to_cpu`` and
            ``rank0_only`` (both True), or torch's ``FullStateDictConfig``.
        optim_state_dict_config: the same for ``full_optimizer`` of the states.

    Raises:
        ConfigError: an invalid value, with the nearest valid one.
    """

    fsdp_version: int | str | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: Any = None
    param_init_fn: Callable[[nn.Module], Any] | None = None
    sync_module_states: Any = None
    forward_prefetch: Any = None
    activation_checkpointing: Any = None
    activation_checkpointing_offload: Any = None
    cpu_ram_efficient_loading: Any = None
    transformer_cls_names_to_wrap: Any = None
    min_num_params: Any = None
    shard_size: int | None = None
    replicate_size: int | None = None
    pin_memory: bool | None = None
    find_unused_parameters: bool = False

    axes: ClassVar[frozenset[str]] = frozenset({"dp_replicate", "dp_shard", "ep", "tp", "cp", "sp"})

    @property
    def backend(self) -> str:  # type: ignore[override]
        """Name of the backend of the version: "fsdp" or "fsdp1"."""
        return "fsdp" if self.fsdp_version == 2 else "fsdp1"

    @property
    def needs_ranks(self) -> bool:  # type: ignore[override]
        """Whether the options are of version 1, with which a single process trains without FSDP."""
        return self.fsdp_version == 1

    @property
    def bounds_experts(self) -> bool:
        """Whether the options are of version 2; version 1 leaves experts as they are."""
        return self.fsdp_version == 2

    def resolve(self, facts: StrategyFacts) -> Resolution:
        """Returns these options with the requested degrees; XLA options on XLA devices.

        On XLA devices one process shards over all devices, and the compiler places the all-gathers.

        Raises:
            ConfigError: degrees that contradict these options or do not divide the ranks; on XLA devices offloading,
                activation checkpointing or degrees, which the XLA backend does not have.
        """
        if facts.plan is not None and not self.planned:
            return BackendConfig.resolve(self, facts)
        config = self._with_plan(facts) if self.planned else self._with_degrees(facts.parallelism)
        if facts.device.kind.together:
            return config._without_ranks(facts)
        given = facts.parallelism
        beside = prod(given.size(axis) for axis in MODEL_AXES)
        if beside > 1:
            config._check_beside(given)
            given.served_by(self.backend).fitted(facts.topology.world_size)
        replicas, shards = config.data_degrees(facts.topology, beside)
        degrees = replace(facts.parallelism, dp_replicate_size=replicas, dp_shard_size=shards)
        return Resolution(config, degrees)

    def data_degrees(self, topology: Topology, beside: int = 1) -> tuple[int, int]:
        """Returns the number of replicas and their shard degree; ``beside``: product of the degrees of other axes."""
        return self.degrees(topology.world_size // beside, max(1, topology.local_world_size // beside))

    def _check_beside(self, parallelism: ParallelismConfig) -> None:
        """Refuses options that the axes of a model exclude."""
        active = {axis: parallelism.size(axis) for axis in MODEL_AXES if parallelism.size(axis) > 1}
        sizes = ", ".join(f"{axis}_size={size}" for axis, size in active.items())
        if self.fsdp_version == 1:
            raise ConfigError(f"{sizes}: fsdp_version=1 flattens parameters, which have no axes then; use version 2")
        if self.cpu_ram_efficient_loading:
            raise ConfigError(
                f"{sizes} with cpu_ram_efficient_loading=True: every rank needs the values before its layers are "
                "sharded; nearest: leave it out"
            )
        attention = None if parallelism.sp_handler is None else parallelism.sp_handler.sp_attn_implementation
        if "sp" in active and attention not in (None, "sdpa"):
            raise ConfigError(
                f"{sizes} with sp_attn_implementation={attention!r}: this backend exchanges heads around "
                "scaled_dot_product_attention; nearest: 'sdpa', or strategy='deepspeed'"
            )

    @property
    def planned(self) -> bool:
        """Whether the planner chooses the sharding strategy."""
        return bool(self.sharding_strategy == AUTO)

    def _with_plan(self, facts: StrategyFacts) -> "FSDPConfig":
        """Returns these options with the planner's choice, once it has chosen."""
        if facts.device.kind.together or facts.open_axes != frozenset(MESH_AXES):
            other = "XLA devices" if facts.device.kind.together else "degrees of parallelism"
            raise ConfigError(f"sharding_strategy='auto' does not exist with {other}; nearest: 'FULL_SHARD'")
        if facts.plan is None:
            return self
        for name in ("activation_checkpointing", "cpu_offload"):
            if (chosen := facts.plan.get(name, False)) != getattr(self, name):
                raise ConfigError(f"the planner chose {name}={chosen}, and the options say {getattr(self, name)}")
        return replace(self, sharding_strategy=facts.plan["sharding_strategy"])

    def _with_degrees(self, parallelism: ParallelismConfig) -> "FSDPConfig":
        if parallelism.total_size == 1:
            return self
        degrees = {"shard_size": parallelism.size("dp_shard"), "replicate_size": parallelism.size("dp_replicate")}
        for name, size in degrees.items():
            mine = getattr(self, name)
            if mine not in (None, size):
                raise ConfigError(
                    f"parallelism_config has dp_{name}={size}, and the sharding options {name}={mine}; give one of them"
                )
        return replace(self, shard_size=degrees["shard_size"], replicate_size=degrees["replicate_size"])

    def _without_ranks(self, facts: StrategyFacts) -> Resolution:
        """Options of a backend in which one process shards over all devices."""
        from accel_backends.xla.config import XLAConfig

        unable = ("cpu_offload", "activation_checkpointing", "shard_size", "replicate_size", "ignored_modules")
        for name in unable:
            if getattr(self, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} does not exist on XLA devices; leave it out, and XLAConfig("
                    "shard_parameters=True) is what is left of these options"
                )
        experts = facts.parallelism.ep_handler
        if experts is not None and experts.capacity_factor is not None:
            raise ConfigError(f"ep_handler={experts} does not exist on XLA devices; nearest: ep_handler=None")
        config = XLAConfig(shard_parameters=self.sharding_strategy is not ShardingLevel.NO_SHARD)
        found = config.resolve(facts)
        return replace(found, reasons=(f"{type(self).__name__} means {type(config).__name__} on {facts.device.type}",))

    def __post_init__(self) -> None:
        env = os.environ
        self.fsdp_version = as_number("fsdp_version", self._given("fsdp_version", "VERSION", env, 2))
        if self.fsdp_version not in (1, 2):
            raise ConfigError(f"fsdp_version is {self.fsdp_version}; expected 2 (fully_shard) or 1")
        self._read_sharding(env)
        self._read_wrapping(env)
        self._read_memory(env)
        self._read_schedule(env)
        self.mixed_precision_policy = mixed_dtypes(self.mixed_precision_policy)
        self.state_dict_type = as_member(
            "state_dict_type",
            self._given("state_dict_type", "STATE_DICT_TYPE", env, StateDictKind.SHARDED_STATE_DICT),
            StateDictKind,
        )
        self.state_dict_config = full_form("state_dict_config", self.state_dict_config)
        self.optim_state_dict_config = full_form("optim_state_dict_config", self.optim_state_dict_config)
        if self.state_dict_type is StateDictKind.FULL_STATE_DICT:
            logging.getLogger(__name__).info(
                "state_dict_type=FULL_STATE_DICT changes nothing: checkpoints are sharded and load at any number of "
                "ranks; get_state_dict and save_model give full weights"
            )
        if self.state_dict_type is StateDictKind.LOCAL_STATE_DICT:
            raise ConfigError(
                "state_dict_type LOCAL_STATE_DICT fits one number of ranks only; nearest: SHARDED_STATE_DICT"
            )

    def of_version(self, version: int, other: str) -> "FSDPConfig":
        """Returns these options if they are of the given version; ``other`` is the backend of the other version.

        Raises:
            BackendError: the options are of the other version, or leave the strategy to the planner.
        """
        if self.planned:
            raise BackendError("sharding_strategy='auto' needs an Accelerator's prepare; nearest: FULL_SHARD")
        if self.fsdp_version != version:
            raise BackendError(
                f"the options say fsdp_version={self.fsdp_version}, not {version}; use backend {other!r}"
            )
        return self

    def _given(self, name: str, variable: str, env: Mapping[str, str], default: Any = None) -> Any:
        value = getattr(self, name)
        if value is None:
            value = env.get(PREFIX + variable) or default
        return value

    def _flag(self, name: str, variable: str, env: Mapping[str, str], default: bool) -> bool:
        return as_flag(name, self._given(name, variable, env, default))

    def _read_sharding(self, env: Mapping[str, str]) -> None:
        strategy = self._given("sharding_strategy", "SHARDING_STRATEGY", env, ShardingLevel.FULL_SHARD)
        is_open = str(strategy).strip().lower() == AUTO
        self.sharding_strategy = AUTO if is_open else as_member("sharding_strategy", strategy, ShardingLevel)
        if is_open and self.fsdp_version == 1:
            raise ConfigError("sharding_strategy='auto' compares strategies of version 2; nearest: fsdp_version=2")
        reshard = self._given("reshard_after_forward", "RESHARD_AFTER_FORWARD", env)
        if reshard is not None and self.fsdp_version == 1:
            if isinstance(reshard, bool):
                raise ConfigError(
                    f"reshard_after_forward={reshard} is not supported with FSDP1; nearest: "
                    f"sharding_strategy={'FULL_SHARD' if reshard else 'SHARD_GRAD_OP'!r}, or fsdp_version=2"
                )
            self.sharding_strategy = as_member("reshard_after_forward", reshard, ShardingLevel)
            reshard = None
        self.reshard_after_forward = None if reshard is None else reshard_value(reshard)
        for name in ("shard_size", "replicate_size"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, as_number(name, value))
                if getattr(self, name) < 1:
                    raise ConfigError(f"{name} is {value}; it counts ranks, at least 1")
        for name in ("reshard_after_forward", "shard_size", "replicate_size") if is_open else ():
            if getattr(self, name) is not None:
                raise ConfigError(f"sharding_strategy='auto' chooses {name}, too; leave it out, or name a strategy")

    def _read_wrapping(self, env: Mapping[str, str]) -> None:
        names = self._given("transformer_cls_names_to_wrap", "TRANSFORMER_CLS_TO_WRAP", env)
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",") if name.strip()]
        self.transformer_cls_names_to_wrap = None if names is None else list(names)
        self.min_num_params = as_number("min_num_params", self._given("min_num_params", "MIN_NUM_PARAMS", env, 0))
        self.auto_wrap_policy = wrap_value(self._given("auto_wrap_policy", "AUTO_WRAP_POLICY", env))
        if self.transformer_cls_names_to_wrap and self.auto_wrap_policy in (AutoWrap.SIZE_BASED_WRAP, AutoWrap.NO_WRAP):
            raise ConfigError(
                f"transformer_cls_names_to_wrap={self.transformer_cls_names_to_wrap} has no meaning with "
                f"auto_wrap_policy={self.auto_wrap_policy}; nearest: TRANSFORMER_BASED_WRAP"
            )
        self.ignored_modules = self._given("ignored_modules", "IGNORED_MODULES", env)

    @property
    def recomputed(self) -> ActivationCheckpointing | None:
        """Activation checkpointing by the options above; None without it."""
        if not self.activation_checkpointing:
            return None
        return ActivationCheckpointing(offload=bool(self.activation_checkpointing_offload))

    def _read_memory(self, env: Mapping[str, str]) -> None:
        if self.cpu_offload is None:
            self.cpu_offload = as_flag("cpu_offload", env.get(f"{PREFIX}OFFLOAD_PARAMS") or False)
        elif not isinstance(self.cpu_offload, bool):
            pinned = getattr(self.cpu_offload, "pin_memory", None)
            self.pin_memory = pinned if self.pin_memory is None else self.pin_memory
            self.cpu_offload = offloads(self.cpu_offload)
        self.activation_checkpointing = self._flag(
            "activation_checkpointing", "ACTIVATION_CHECKPOINTING", env, default=False
        )
        self.activation_checkpointing_offload = self._flag(
            "activation_checkpointing_offload", "ACTIVATION_CHECKPOINTING_OFFLOAD", env, default=False
        )
        if self.activation_checkpointing_offload and not (self.activation_checkpointing and self.fsdp_version == 2):
            raise ConfigError(
                "activation_checkpointing_offload needs activation_checkpointing=True and fsdp_version=2; got "
                f"activation_checkpointing={self.activation_checkpointing}, fsdp_version={self.fsdp_version}"
            )
        self.cpu_ram_efficient_loading = self._flag(
            "cpu_ram_efficient_loading", "CPU_RAM_EFFICIENT_LOADING", env, default=False
        )
        if self.cpu_ram_efficient_loading and self.fsdp_version == 1:
            logging.getLogger(__name__).warning(
                "cpu_ram_efficient_loading=True saves no memory with fsdp_version=1, whose ranks all hold the whole "
                "model while it is wrapped; fsdp_version=2 does"
            )
        self.sync_module_states = self._flag("sync_module_states", "SYNC_MODULE_STATES", env, default=True)
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            raise ConfigError(
                "cpu_ram_efficient_loading=True needs sync_module_states=True: the values come from rank 0"
            )

    def _read_schedule(self, env: Mapping[str, str]) -> None:
        prefetch = self._given("backward_prefetch", "BACKWARD_PREFETCH", env)
        if prefetch is not None:
            prefetch = as_member("backward_prefetch", prefetch, BackwardPrefetch)
        if prefetch is BackwardPrefetch.BACKWARD_POST and self.fsdp_version == 2:
            raise ConfigError(
                "backward_prefetch BACKWARD_POST is not supported in FSDP2; nearest: BACKWARD_PRE, or fsdp_version=1"
            )
        self.backward_prefetch = prefetch
        ahead = self._given("forward_prefetch", "FORWARD_PREFETCH", env, False)
        self.forward_prefetch = int(
            as_flag("forward_prefetch", ahead) if not str(ahead).isdecimal() else as_number("forward_prefetch", ahead)
        )
        self.limit_all_gathers = as_flag("limit_all_gathers", self.limit_all_gathers)
        self.find_unused_parameters = as_flag("find_unused_parameters", self.find_unused_parameters)
        self.use_orig_params = self._flag("use_orig_params", "USE_ORIG_PARAMS", env, default=True)
        if self.fsdp_version == 1 and not self.use_orig_params:
            raise ConfigError(
                "use_orig_params=False makes flat parameters without names or groups; nearest: use_orig_params=True"
            )

    @property
    def hybrid(self) -> bool:
        """Whether the strategy is hybrid: sharded within groups of ranks, which are replicas of each other."""
        return self.sharding_strategy in _HYBRID

    @property
    def reshard(self) -> bool | int:
        """Parameters between forward and backward: freed (True), kept (False), or resharded over that many ranks."""
        given: bool | int | None = self.reshard_after_forward
        return self.sharding_strategy not in _KEEPS if given is None else given

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Sets the dtypes by a precision's name, unless they are set and ``override`` is off.

        With ``buffer_autocast`` buffers stay in fp32.
        """
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = mixed_dtypes(mixed_precision, buffers_wide=buffer_autocast)

    def degrees(self, world_size: int, local_world_size: int) -> tuple[int, int]:
        """Returns the number of replicas and the shard degree.

        Raises:
            ConfigError: a degree that does not divide the number of ranks.
        """
        shard, replicate = self.shard_size, self.replicate_size
        if self.sharding_strategy is ShardingLevel.NO_SHARD:
            if shard not in (None, 1) or replicate not in (None, world_size):
                raise ConfigError(
                    f"sharding_strategy NO_SHARD with shard_size={shard}, replicate_size={replicate}; nearest: "
                    "HYBRID_SHARD, which takes them"
                )
            shard, replicate = 1, world_size
        if shard is None:
            if replicate is None:
                shard = local_world_size if self.hybrid and world_size % local_world_size == 0 else world_size
            else:
                shard = max(1, world_size // replicate)
        replicate = max(1, world_size // shard) if replicate is None else replicate
        if prod((shard, replicate)) != world_size:
            divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
            raise ConfigError(
                f"shard_size={self.shard_size}, replicate_size={self.replicate_size} make {shard} x {replicate} = "
                f"{shard * replicate} ranks, and there are {world_size}; sizes that divide it: "
                f"{', '.join(map(str, divisors))}"
            )
        reshard = self.reshard
        if not isinstance(reshard, bool) and (reshard < 1 or shard % reshard):
            divisors = [size for size in range(1, shard + 1) if shard % size == 0]
            raise ConfigError(
                f"reshard_after_forward={reshard} does not divide the {shard} ranks that a parameter is sharded over; "
                f"sizes that do: {', '.join(map(str, divisors))}"
            )
        return replicate, shard

    @property
    def state_form(self) -> FullStateForm:
        """Form of full model state dicts."""
        return cast(FullStateForm, self.state_dict_config)

    @property
    def optimizer_state_form(self) -> FullStateForm:
        """Form of full optimizer state dicts."""
        return cast(FullStateForm, self.optim_state_dict_config)

    @property
    def dtypes(self) -> MixedDtypes:
        """``mixed_precision_policy`` as a mapping, empty without one."""
        return self.mixed_precision_policy or {}


FullyShardedDataParallelPlugin = FSDPConfig
