"""Settings of Megatron-LM, as ``MegatronLMPlugin`` takes them."""

from dataclasses import dataclass

from accel_launch.config.setting import Facts, setting

_GROUP = "Megatron-LM"


def _megatron(env: str, help: str, **more: object) -> Facts:
    facts = {
        "env": (f"MEGATRON_LM_{env}",),
        "section": "megatron_lm_config",
        "needs": "use_megatron_lm",
        "prefix": "megatron_lm_",
    }
    return Facts(help, _GROUP, **(facts | more))  # type: ignore[arg-type]


def _switch(env: str, help: str, *, default: bool | None = False) -> bool:
    switch: bool = setting(default, _megatron(env, help, valued=True))
    return switch


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class MegatronSettings:
    """Options of the ``megatron`` backend, if one is installed."""

    use_megatron_lm: bool = setting(
        False, Facts("Train with Megatron-LM.", _GROUP, env=("ACCELERATE_USE_MEGATRON_LM",), strategy="megatron")
    )
    megatron_lm_tp_degree: int = setting(1, _megatron("TP_DEGREE", "Tensor-parallel processes.", minimum=1))
    megatron_lm_pp_degree: int = setting(1, _megatron("PP_DEGREE", "Pipeline stages.", minimum=1))
    megatron_lm_num_micro_batches: int | None = setting(
        None, _megatron("NUM_MICRO_BATCHES", "Micro-batches of a pipeline's batch.", minimum=1)
    )
    megatron_lm_gradient_clipping: float = setting(
        1.0, _megatron("GRADIENT_CLIPPING", "Norm that gradients are clipped to; 0 not at all.", minimum=0)
    )
    megatron_lm_sequence_parallelism: bool = _switch("SEQUENCE_PARALLELISM", "Split sequences too.")
    megatron_lm_recompute_activations: bool = _switch("RECOMPUTE_ACTIVATIONS", "Compute activations again.")
    megatron_lm_use_distributed_optimizer: bool = _switch("USE_DISTRIBUTED_OPTIMIZER", "Shard optimizer states.")
    megatron_lm_use_custom_fsdp: bool = _switch("USE_CUSTOM_FSDP", "Megatron's own FSDP.")
    megatron_lm_no_load_optim: bool = _switch("NO_LOAD_OPTIM", "Load no optimizer.")
    megatron_lm_no_save_optim: bool = _switch("NO_SAVE_OPTIM", "Save no optimizer.")
    megatron_lm_eod_mask_loss: bool = _switch("EOD_MASK_LOSS", "Ends of documents have no loss.")
    megatron_lm_optimizer_cpu_offload: bool = _switch("OPTIMIZER_CPU_OFFLOAD", "Optimizer states on the host.")
    megatron_lm_overlap_cpu_optimizer_d2h_h2d: bool = _switch(
        "OVERLAP_CPU_OPTIMIZER_D2H_H2D", "Copy them while others compute."
    )
    megatron_lm_use_precision_aware_optimizer: bool = _switch(
        "USE_PRECISION_AWARE_OPTIMIZER", "States of the optimizer in other dtypes."
    )
    megatron_lm_decoder_last_pipeline_num_layers: int | None = setting(
        None, _megatron("DECODER_LAST_PIPELINE_NUM_LAYERS", "Layers of the last stage.", minimum=0)
    )
    megatron_lm_recompute_granularity: str | None = setting(
        None, _megatron("RECOMPUTE_GRANULARITY", "What is computed again.", choices=("full", "selective"))
    )
    megatron_lm_recompute_method: str | None = setting(
        None, _megatron("RECOMPUTE_METHOD", "Which layers are.", choices=("uniform", "block"))
    )
    megatron_lm_recompute_num_layers: int | None = setting(
        None, _megatron("RECOMPUTE_NUM_LAYERS", "How many layers at a time.", minimum=1)
    )
    megatron_lm_attention_backend: str | None = setting(
        None, _megatron("ATTENTION_BACKEND", "Attention: flash, fused, unfused, local, auto.")
    )
    megatron_lm_expert_model_parallel_size: int | None = setting(
        None, _megatron("EXPERT_MODEL_PARALLEL_SIZE", "Processes that share the experts.", minimum=1)
    )
    megatron_lm_expert_tensor_parallel_size: int | None = setting(
        None, _megatron("EXPERT_TENSOR_PARALLEL_SIZE", "Processes that share each expert.", minimum=1)
    )
    megatron_lm_context_parallel_size: int | None = setting(
        None, _megatron("CONTEXT_PARALLEL_SIZE", "Processes that share each sequence.", minimum=1)
    )
    megatron_lm_attention_dropout: float | None = setting(
        None, _megatron("ATTENTION_DROPOUT", "Dropout of attention.", minimum=0, maximum=1)
    )
    megatron_lm_hidden_dropout: float | None = setting(
        None, _megatron("HIDDEN_DROPOUT", "Dropout of hidden states.", minimum=0, maximum=1)
    )
    megatron_lm_attention_softmax_in_fp32: bool | None = _switch(
        "ATTENTION_SOFTMAX_IN_FP32", "Softmax of attention in fp32.", default=None
    )
    megatron_lm_calculate_per_token_loss: bool | None = _switch(
        "CALCULATE_PER_TOKEN_LOSS", "Losses weigh tokens.", default=None
    )
    megatron_lm_use_rotary_position_embeddings: bool | None = _switch(
        "USE_ROTARY_POSITION_EMBEDDINGS", "Rotary positions.", default=None
    )
