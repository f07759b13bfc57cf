"""accel's options of FSDP with the values of Accelerate's plugin."""

from typing import Any

from accel_backends import FullyShardedDataParallelPlugin
from accel_backends.core.option_parsing import AutoWrap, offloads, wrap_value

_SAME = (
    "fsdp_version",
    "activation_checkpointing",
    "activation_checkpointing_offload",
    "forward_prefetch",
    "ignored_modules",
    "limit_all_gathers",
    "param_init_fn",
    "state_dict_type",
)


def translate_fsdp(plugin: Any) -> Any:
    """Returns accel's options; those that version 2 has no use for are left out."""
    if plugin is None:
        return FullyShardedDataParallelPlugin()
    fields: dict[str, Any] = {name: getattr(plugin, name) for name in _SAME}
    fields["cpu_offload"] = offloads(plugin.cpu_offload)
    if getattr(plugin.cpu_offload, "pin_memory", None) is False:
        fields["pin_memory"] = False  # True, which is torch's default too, is left to the device: a CPU cannot pin
    if plugin.fsdp_version == 2:
        fields["reshard_after_forward"] = plugin.reshard_after_forward
    else:
        fields["sharding_strategy"] = plugin.sharding_strategy.name
        fields["use_orig_params"] = plugin.use_orig_params
    if plugin.has_own_policy:
        fields["mixed_precision_policy"] = plugin.mixed_precision_policy
    if plugin.backward_prefetch is not None:
        fields["backward_prefetch"] = plugin.backward_prefetch.name
    policy = wrap_value(plugin.auto_wrap_policy)
    if policy is not None and not isinstance(policy, AutoWrap):
        fields["auto_wrap_policy"] = policy
    elif plugin.transformer_cls_names_to_wrap:
        fields["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        fields["transformer_cls_names_to_wrap"] = plugin.transformer_cls_names_to_wrap
    elif plugin.min_num_params:
        fields["auto_wrap_policy"] = "SIZE_BASED_WRAP"
        fields["min_num_params"] = plugin.min_num_params
    return FullyShardedDataParallelPlugin(**fields)
