"""Names that Accelerate has and accel lacks, with alternatives; imported only when a name is not found."""

from typing import Any

PAGE = "docs/reference/differences.md"
"""The page that lists all of these names, with reasons."""

_STAGES = "prepare_pippy splits a model into stages and runs them"
_MEGATRON = "accel-megatron has MegatronLMPlugin, for strategy=; the loop is the ordinary one"
_OF_MEGATRON = "accel-megatron has it: from accel_megatron import it, and read what differs"
_FILES = "accelerator.save_state, save_model and save write checkpoints here; accel merge-weights exports one"
_FP8 = 'mixed_precision="fp8" with AORecipeKwargs or TERecipeKwargs in kwargs_handlers does that here'
_COMMANDS = "accel launch starts processes; accel launch --dry-run shows their environment"
_INNER = "it is an inner part of Accelerate"
_SMALL = "it has nothing to do with training"

_INSTEAD = {
    _STAGES: "build_pipeline find_pippy_batch_size generate_device_map pippy_forward",
    _MEGATRON: (
        "MegatronLMPlugin add_model_config_to_megatron_parser MegatronLMDummyScheduler MegatronEngine "
        "MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper megatron_lm_initialize megatron_lm_prepare_data_loader "
        "megatron_lm_prepare_model_optimizer_scheduler megatron_lm_prepare_optimizer megatron_lm_prepare_scheduler"
    ),
    _OF_MEGATRON: (
        "AbstractTrainStep BertTrainStep GPTTrainStep T5TrainStep MegatronLMDummyDataLoader "
        "avg_losses_across_data_parallel_group gather_across_data_parallel_groups"
    ),
    _FILES: (
        "checkpointing save load save_fsdp_model save_fsdp_optimizer load_fsdp_model load_fsdp_optimizer "
        "merge_fsdp_weights"
    ),
    _FP8: (
        "MSAMPRecipeKwargs apply_fp8_autowrap contextual_fp8_autocast convert_model has_transformer_engine_layers "
        "convert_model_to_fp8_ao has_ao_layers filter_first_and_last_linear_layers"
    ),
    _COMMANDS: (
        "commands PrepareForLaunch prepare_deepspeed_cmd_env prepare_multi_gpu_env prepare_sagemager_args_inputs "
        "prepare_simple_launcher_cmd_env prepare_tpu"
    ),
    "the package accel_testing tests programs here": "test_utils",
    "accel.utils.compile_regions, or TorchDynamoPlugin(use_regional_compilation=True), with any strategy": (
        "compile_regions_deepspeed compile_regions_fsdp2"
    ),
    "accel config default writes such a file": "write_basic_config",
    "set the field cpu_ram_efficient_loading of FullyShardedDataParallelPlugin": (
        "enable_fsdp_ram_efficient_loading disable_fsdp_ram_efficient_loading"
    ),
    _INNER: (
        "GatheredParameters DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper "
        "get_active_deepspeed_plugin get_grad_scaler get_mixed_precision_context_manager ensure_weights_retied "
        "fsdp2_prepare_model fsdp2_load_full_state_dict fsdp2_apply_ac fsdp2_canonicalize_names "
        "fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler get_model_tp_size deepspeed_required torchao_required"
    ),
    _SMALL: (
        "is_port_in_use merge_dicts convert_bytes check_os_kernel clean_state_dict_for_safetensors get_pretty_name "
        "recursive_getattr is_compiled_module is_peft_model memory_utils install_xla get_module_children_bottom_up "
        "has_compiled_regions model_has_dtensor"
    ),
}
_INSTEAD_ON_ACCELERATOR = {
    "it wrapped LOMO's optimizers, which are not served": "lomo_backward has_lomo_optimizer",
    "models that are spread over devices for inference are not served": "verify_device_map",
    "accelerator.policy has the precision": (
        "native_amp fp8_enabled fp8_recipe_handler te_recipe_handler ao_recipe_handler msamp_recipe_handler "
        "has_fp8_handler delayed_fp8_autocast autocast_handler scaler_handler"
    ),
    "accelerator.config has the settings": "ddp_handler init_handler profile_handler kwargs_handlers",
    "accelerator.set_trigger and check_trigger work": "flag_tensor",
    _MEGATRON: "megatron_lm_plugin",
    _INNER: "deepspeed_engine_wrapped",
}


def advice(name: str) -> str:
    """Alternative to ``name`` of ``accelerate`` or ``accelerate.utils``; empty if Accelerate has no such name."""
    return _advice(_INSTEAD, name)


def missing_on_accelerator(accelerator: Any, name: str) -> AttributeError | None:
    """Error for an attribute of Accelerate's ``Accelerator`` that accel lacks; None for any other name."""
    said = _advice(_INSTEAD_ON_ACCELERATOR, name)
    if not said:
        return None
    return AttributeError(f"'Accelerator' object has no attribute {name!r}{said}", name=name, obj=accelerator)


def names() -> list[str]:
    """Names of ``accelerate`` and ``accelerate.utils`` that accel lacks."""
    return " ".join(_INSTEAD.values()).split()


def names_on_accelerator() -> list[str]:
    """Attributes of Accelerate's ``Accelerator`` that accel lacks."""
    return " ".join(_INSTEAD_ON_ACCELERATOR.values()).split()


def _advice(table: dict[str, str], name: str) -> str:
    instead = next((text for text, known in table.items() if name in known.split()), None)
    return "" if instead is None else f", which Accelerate has: {instead} (see {PAGE})"
