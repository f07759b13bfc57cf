"""This rank's stage of a model of megatron-core, built, wrapped and filled."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_megatron.conversion.architecture import Architecture
from accel_megatron.conversion.rules import stack_name
from accel_megatron.families.context import ContextRanks
from accel_megatron.families.losses import vocab_parallel_losses
from accel_megatron.families.sharded_calls import ShardedCalls
from accel_megatron.families.table import family_of
from accel_megatron.training.gathering import chunk_name, place
from accel_megatron.training.padding import stop_padding
from accel_megatron.training.provider import check_parameters, provided_model
from accel_state.environment import patch_environment
from accel_state.errors import PrepareError

if TYPE_CHECKING:
    from accel_megatron.config import MegatronConfig

# Variables that megatron-core sets when it builds a model, for Transformer Engine.
_SETS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def transformer_config(
    options: "MegatronConfig",
    architecture: Architecture,
    dtype: torch.dtype = torch.float32,
    scaled: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Any:
    """Returns megatron-core's ``TransformerConfig`` of a model under these options.

    ``dtype``: in which the model computes (fp32, fp64, bf16 or fp16). ``scaled``: multiplies a loss by the loss scale.

    Raises:
        PrepareError: the options say something else than the model.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    if options.use_rotary_position_embeddings not in (None, architecture.rotary):
        raise PrepareError(
            f"use_rotary_position_embeddings={options.use_rotary_position_embeddings}, and the model has "
            f"{'rotary' if architecture.rotary else 'learned'} positions; leave the option out"
        )
    values = dict(architecture.transformer)
    for name in ("attention_dropout", "hidden_dropout"):
        given = getattr(options, name)
        if given is None and name not in values:
            raise PrepareError(
                f"{name}: this model has dropout in places where megatron-core has none, so say how much megatron-core "
                "has, MegatronLMPlugin(hidden_dropout=..., attention_dropout=...); nearest: dropout_rate=0.0 in the "
                "model's configuration"
            )
        values[name] = values[name] if given is None else given
    if options.recompute_activations:
        values["recompute_granularity"] = options.recompute_granularity
        if options.recompute_granularity == "full":
            values["recompute_method"] = options.recompute_method
            values["recompute_num_layers"] = options.recompute_num_layers
    if options.own_step:  # which alone knows the shapes that stages pass on; other dispatchers need one shape
        values |= {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    return TransformerConfig(
        **values,
        tensor_model_parallel_size=options.tp_degree,
        pipeline_model_parallel_size=options.pp_degree,
        virtual_pipeline_model_parallel_size=options.chunks(architecture.num_layers),
        expert_model_parallel_size=options.expert_model_parallel_size,
        expert_tensor_parallel_size=options.expert_tensor_parallel_size,
        context_parallel_size=options.context_parallel_size,
        sequence_parallel=options.sequence_parallelism,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        grad_scale_func=scaled,
        # In fp32 the scores need no cast, and in fp64 they have none.
        attention_softmax_in_fp32=options.attention_softmax_in_fp32 and dtype in (torch.bfloat16, torch.float16),
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=True,
    )


def build_chunk(
    number: int,
    config: Any,
    architecture: Architecture,
    all_weights: Mapping[str, torch.Tensor],
    device: torch.device,
    trained: Mapping[str, bool],
    options: "MegatronConfig",
) -> Any:
    """Returns one chunk of this rank's stage with its weights, in Megatron-LM's data-parallel wrappers.

    ``number``: of the chunk; 0 without an interleaved schedule. ``all_weights``: of all chunks of this rank.
    ``trained``: whether each parameter of the Transformers model is trained.

    Collective: every rank of the group must call this.

    Raises:
        PrepareError: of the parameters that megatron-core keeps in one tensor, only some are trained; or the user's own
            function builds a model with other parameters.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    here = place()
    chunk = number if here.chunks > 1 else None
    position, count, *_ = here.of_chunk(number)
    first, last = position == 0, position == count - 1
    rules = dict(architecture.rules(*here.of_chunk(number)))
    weights = {name: all_weights[chunk_name(number, name)] for name in rules}
    with patch_environment(**dict.fromkeys(_SETS, "1")):
        model: Any = (
            family_of(architecture).build(
                config,
                architecture,
                first=first,
                last=last,
                num_layers=architecture.num_layers // count,
                chunk=chunk,
            )
            if options.custom_model_provider_function is None
            else provided_model(options, config, first=first, last=last, chunk=chunk)
        )
    if options.custom_model_provider_function is not None:
        check_parameters(model, weights)
    if architecture.padding is not None and first:
        stop_padding(model.embedding.word_embeddings, architecture.padding)
    if config.params_dtype == torch.float64:
        model.compute_language_model_loss = vocab_parallel_losses
        model.double()
    model.to(device)
    ranks = ContextRanks.of(config)
    if ranks is not None:
        model.forward = ShardedCalls(model, ranks)
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys(), sorted(own.keys() ^ weights.keys())
    for name, rule in rules.items():
        with torch.no_grad():
            own[name].copy_(weights[name])
        flags = {trained[stack_name(one)] for one in rule.names}
        if len(flags) > 1:
            raise PrepareError(f"{', '.join(rule.names)} are one tensor in megatron-core; train all of them, or none")
        own[name].requires_grad_(flags.pop())
        # megatron-core marks weights only when it initialises them; norms of gradients count unmarked ones once.
        own[name].tensor_model_parallel = rule.dim is not None
    half = config.bf16 or config.fp16
    if half:
        model = Float16Module(config, model)
    wrapping = DistributedDataParallelConfig(
        grad_reduce_in_fp32=half,
        overlap_grad_reduce=False,
        use_distributed_optimizer=options.use_distributed_optimizer,
    )
    return DistributedDataParallel(config, wrapping, model)


def named_weights(chunks: Iterable[Any]) -> dict[str, Any]:
    """Returns the parameters of this rank's chunks, by megatron-core's names."""
    return {
        chunk_name(number, name): parameter
        for number, chunk in enumerate(chunks)
        for name, parameter in bare(chunk).named_parameters()
    }


def bare(chunk: Any) -> Any:
    """Returns the model of megatron-core in Megatron-LM's wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
