"""Plugins built from the configuration, for calls that pass none: options by the names of the plugins' fields."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_launch.config import AccelConfig, settings
from accel_launch.launch.parallelism_degrees import degrees
from accel_state import ParallelismConfig

if TYPE_CHECKING:
    from accel_backends import TorchDynamoPlugin
    from accel_precision import AORecipeKwargs, TERecipeKwargs

_FSDP_FIELDS = {
    "fsdp_version": "fsdp_version",
    "fsdp_offload_params": "cpu_offload",
    "fsdp_transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
}
_DEEPSPEED_FIELDS = {
    "deepspeed_config_file": "hf_ds_config",
    "zero_stage": "zero_stage",
    "offload_optimizer_device": "offload_optimizer_device",
    "offload_param_device": "offload_param_device",
    "offload_optimizer_nvme_path": "offload_optimizer_nvme_path",
    "offload_param_nvme_path": "offload_param_nvme_path",
    "gradient_clipping": "gradient_clipping",
    "zero3_init_flag": "zero3_init_flag",
    "zero3_save_16bit_model": "zero3_save_16bit_model",
    "deepspeed_moe_layer_cls_names": "transformer_moe_cls_names",
}


def named_backend(config: AccelConfig) -> str | None:
    """Backend that the configuration names, or None; Megatron-LM's has a switch of its own."""
    return "megatron" if config.backend is None and config.use_megatron_lm else config.backend


def fsdp_options(config: AccelConfig) -> dict[str, Any] | None:
    """Given options of FSDP, if it is on; None if it is off."""
    if not config.use_fsdp:
        return None
    given = (name for name in settings() if name.startswith("fsdp_") and config.is_given(name))
    return {_FSDP_FIELDS.get(name, name.removeprefix("fsdp_")): getattr(config, name) for name in given}


def deepspeed_options(config: AccelConfig) -> dict[str, Any] | None:
    """Given options of DeepSpeed with their origins, if it is on; None if it is off."""
    if not config.use_deepspeed:
        return None
    given = {name: field for name, field in _DEEPSPEED_FIELDS.items() if config.is_given(name)}
    options: dict[str, Any] = {field: getattr(config, name) for name, field in given.items()}
    return {**options, "sources": {field: f"{config.origin(name)} ({name})" for name, field in given.items()}}


def degrees_of(config: AccelConfig) -> ParallelismConfig | None:
    """Given degrees of parallelism, with the options of their axes; None without any."""
    given: dict[str, Any] = degrees(config)
    if not given:
        return None
    from accel_state.parallelism.axis_options import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig

    handlers: dict[str, Any] = {}
    strategy = given.pop("cp_comm_strategy", None)
    if strategy is not None:
        handlers["cp_handler"] = TorchContextParallelConfig(strategy)
    sequence = {name: given.pop(name) for name in list(given) if name.startswith("sp_") and name[3:] in _SEQUENCE}
    if sequence:
        handlers["sp_handler"] = DeepSpeedSequenceParallelConfig(**sequence)
    return ParallelismConfig(**given, **handlers)


_SEQUENCE = ("seq_length", "seq_length_is_variable", "attn_implementation")


def fp8_recipe(config: AccelConfig, env: Mapping[str, str]) -> "AORecipeKwargs | TERecipeKwargs | None":
    """Recipe of ``mixed_precision=fp8`` from settings and variables; None at another precision."""
    if config.mixed_precision != "fp8":
        return None
    from accel_precision.recipes import recipe_from_env

    default = {settings()["fp8_backend"].facts.env[0]: config.fp8_backend}
    return recipe_from_env({**default, **env, **config.variables()})  # type: ignore[return-value]


def compilation_of(config: AccelConfig) -> "TorchDynamoPlugin | None":
    """Options of compilation; None if nothing is compiled."""
    if config.dynamo_backend == "no":
        return None
    from accel_backends import TorchDynamoPlugin

    return TorchDynamoPlugin(
        backend=config.dynamo_backend,
        mode=config.dynamo_mode if config.is_given("dynamo_mode") else None,
        fullgraph=config.dynamo_use_fullgraph,
        dynamic=config.dynamo_use_dynamic,
        use_regional_compilation=config.dynamo_use_regional_compilation,
    )
