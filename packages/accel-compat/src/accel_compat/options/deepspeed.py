"""DeepSpeed's plugin: accel's options have Accelerate's fields."""

from typing import Any

from accel.utils.dataclasses import DeepSpeedPlugin

CompatDeepSpeedPlugin = DeepSpeedPlugin


def translate_deepspeed(plugin: Any) -> Any:
    """Returns accel's options, which are the plugin itself."""
    return CompatDeepSpeedPlugin() if plugin is None else plugin


def get_active_deepspeed_plugin(state: Any) -> Any:
    """DeepSpeed's options in use.

    Raises:
        ValueError: the run does not use DeepSpeed.
    """
    from accel_state.enums import DistributedType

    if state.distributed_type != DistributedType.DEEPSPEED:
        raise ValueError("Couldn't retrieve the active `DeepSpeedPlugin` as none were enabled.")
    return state.deepspeed_plugin
