"""Settings of fully sharded data parallelism, as ``FullyShardedDataParallelPlugin`` takes them."""

from dataclasses import dataclass

from accel_launch.config.setting import Facts, setting


def _fsdp(env: str, help: str, **more: object) -> Facts:
    facts = {"env": (f"FSDP_{env}",), "section": "fsdp_config", "needs": "use_fsdp", "prefix": "fsdp_"}
    return Facts(help, "FSDP", **(facts | more))  # type: ignore[arg-type]


_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class FSDPSettings:
    """Sharding of parameters, gradients and optimizer states."""

    use_fsdp: bool = setting(False, Facts("Shard with FSDP.", "FSDP", env=("ACCELERATE_USE_FSDP",), strategy="fsdp"))
    fsdp_version: int = setting(
        2, _fsdp("VERSION", "2 shards each parameter, 1 flattens them.", minimum=1, maximum=2, option="fsdp_version")
    )
    fsdp_sharding_strategy: str = setting(
        "FULL_SHARD",
        _fsdp(
            "SHARDING_STRATEGY",
            "What is sharded, and between whom; AUTO: as the planner chooses.",
            choices=(*_STRATEGIES, "AUTO"),
            pattern="[1-5]",
        ),
    )
    fsdp_reshard_after_forward: str | None = setting(
        None,
        _fsdp(
            "RESHARD_AFTER_FORWARD",
            "Free parameters after forward: true, false, or over how many ranks to keep them; version 1: a strategy.",
            choices=("true", "false", *_STRATEGIES),
            pattern=r"\d+",
        ),
    )
    fsdp_offload_params: bool = setting(
        False,
        _fsdp(
            "OFFLOAD_PARAMS", "Keep parameters, gradients and states on the host.", valued=True, option="cpu_offload"
        ),
    )
    fsdp_min_num_params: int = setting(0, _fsdp("MIN_NUM_PARAMS", "Size of a unit for SIZE_BASED_WRAP.", minimum=0))
    fsdp_auto_wrap_policy: str | None = setting(
        None,
        _fsdp(
            "AUTO_WRAP_POLICY",
            "Which modules are gathered as a unit.",
            choices=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
        ),
    )
    fsdp_transformer_layer_cls_to_wrap: str | None = setting(
        None,
        _fsdp(
            "TRANSFORMER_CLS_TO_WRAP",
            "Classes of the units, with commas.",
            listed=True,
            aliases=("transformer_cls_names_to_wrap",),
            option="transformer_cls_names_to_wrap",
        ),
    )
    fsdp_backward_prefetch: str | None = setting(
        None,
        _fsdp(
            "BACKWARD_PREFETCH",
            "When the next unit is gathered in backward.",
            choices=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
            aliases=("fsdp_backward_prefetch_policy", "backward_prefetch_policy"),
        ),
    )
    fsdp_state_dict_type: str | None = setting(
        None,
        _fsdp(
            "STATE_DICT_TYPE",
            "Taken for compatibility: checkpoints are sharded and load everywhere.",
            choices=("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"),
        ),
    )
    fsdp_forward_prefetch: bool = setting(
        False, _fsdp("FORWARD_PREFETCH", "Gather one unit ahead in forward.", valued=True)
    )
    fsdp_use_orig_params: bool = setting(
        True, _fsdp("USE_ORIG_PARAMS", "Parameters keep their names (version 1).", valued=True)
    )
    fsdp_cpu_ram_efficient_loading: bool = setting(
        False, _fsdp("CPU_RAM_EFFICIENT_LOADING", "Only rank 0 needs the values.", valued=True)
    )
    fsdp_sync_module_states: bool = setting(
        True, _fsdp("SYNC_MODULE_STATES", "Start from rank 0's parameters.", valued=True)
    )
    fsdp_activation_checkpointing: bool = setting(
        False,
        _fsdp("ACTIVATION_CHECKPOINTING", "Compute activations again in backward.", valued=True),
    )
    fsdp_activation_checkpointing_offload: bool = setting(
        False,
        _fsdp("ACTIVATION_CHECKPOINTING_OFFLOAD", "Keep the units' inputs on the host meanwhile.", valued=True),
    )
    fsdp_ignored_modules: str | None = setting(
        None, _fsdp("IGNORED_MODULES", "A pattern of whole names of modules that are left out.")
    )
