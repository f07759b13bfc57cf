"""Settings of the degrees of parallelism, as ``ParallelismConfig`` takes them."""

from dataclasses import dataclass

from accel_launch.config.setting import Facts, setting

_PREFIX = "parallelism_config_"


def _degree(name: str, help: str, **more: object) -> Facts:
    facts = {
        "env": (f"PARALLELISM_CONFIG_{name}",),
        "section": "parallelism_config",
        "prefix": _PREFIX,
        "minimum": None,
    }
    return Facts(help, "Parallelism", **(facts | more))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ParallelismSettings:
    """Degrees, whose product is the number of processes, and the options of single axes."""

    use_parallelism_config: bool | None = setting(
        None,
        Facts(
            "Insist on a degree above 1, or turn all degrees off; if not given, those count that are.",
            "Parallelism",
            env=("ACCELERATE_USE_PARALLELISM_CONFIG",),
        ),
    )
    parallelism_config_dp_replicate_size: int = setting(
        1, _degree("DP_REPLICATE_SIZE", "Replicas of the model.", minimum=1)
    )
    parallelism_config_dp_shard_size: int = setting(
        1, _degree("DP_SHARD_SIZE", "Processes that share one replica's parameters.", minimum=1)
    )
    parallelism_config_tp_size: int = setting(
        1, _degree("TP_SIZE", "Processes that share each layer's computation.", minimum=1)
    )
    parallelism_config_cp_size: int = setting(
        1, _degree("CP_SIZE", "Processes that share each sequence (ring attention).", minimum=1)
    )
    parallelism_config_cp_backend: str = setting(
        "torch", _degree("CP_BACKEND", "Backend that computes it; torch: any that can.", needs=f"{_PREFIX}cp_size")
    )
    parallelism_config_cp_comm_strategy: str = setting(
        "allgather",
        _degree(
            "CP_COMM_STRATEGY",
            "How keys and values travel.",
            choices=("allgather", "alltoall"),
            needs=f"{_PREFIX}cp_size",
        ),
    )
    parallelism_config_sp_size: int = setting(
        1, _degree("SP_SIZE", "Processes that share each sequence (Ulysses).", minimum=1)
    )
    parallelism_config_sp_backend: str = setting(
        "deepspeed",
        _degree("SP_BACKEND", "Backend that computes it; deepspeed: any that can.", needs=f"{_PREFIX}sp_size"),
    )
    parallelism_config_sp_seq_length: int | None = setting(
        None, _degree("SP_SEQ_LENGTH", "Tokens of a sequence.", minimum=1, needs=f"{_PREFIX}sp_size")
    )
    parallelism_config_sp_seq_length_is_variable: bool = setting(
        True,
        _degree("SP_SEQ_LENGTH_IS_VARIABLE", "Sequences differ in length.", valued=True, needs=f"{_PREFIX}sp_size"),
    )
    parallelism_config_sp_attn_implementation: str | None = setting(
        None, _degree("SP_ATTN_IMPLEMENTATION", "Attention, like sdpa.", needs=f"{_PREFIX}sp_size")
    )
    parallelism_config_pp_size: int = setting(1, _degree("PP_SIZE", "Stages of a pipeline.", minimum=1))
    parallelism_config_ep_size: int = setting(
        1, _degree("EP_SIZE", "Processes among which the experts of a layer are divided.", minimum=1)
    )
