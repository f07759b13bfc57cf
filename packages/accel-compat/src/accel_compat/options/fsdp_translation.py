"""accel's options of FSDP with the values of Accelerate's plugin."""

from typing import Any

from accel_backends import FullyShardedDataParallelPlugin


def translate_fsdp(plugin: Any) -> Any:
    """Returns accel's options; those that version 2 has no use for are left out."""
    if plugin is None:
        return FullyShardedDataParallelPlugin()
    second = plugin.fsdp_version == 2
    fields: dict[str, Any] = {
        "fsdp_version": plugin.fsdp_version,
        "activation_checkpointing": plugin.activation_checkpointing,
        "state_dict_type": plugin.state_dict_type,
    }
    if second:
        fields["reshard_after_forward"] = plugin.reshard_after_forward
    else:
        fields["sharding_strategy"] = plugin.sharding_strategy.name
        fields["use_orig_params"] = plugin.use_orig_params
    if plugin.transformer_cls_names_to_wrap:
        fields["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        fields["transformer_cls_names_to_wrap"] = plugin.transformer_cls_names_to_wrap
    elif plugin.min_num_params:
        fields["auto_wrap_policy"] = "SIZE_BASED_WRAP"
        fields["min_num_params"] = plugin.min_num_params
    return FullyShardedDataParallelPlugin(**fields)
