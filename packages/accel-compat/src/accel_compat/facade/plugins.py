"""Options that an Accelerator is given, sorted and completed from the environment."""

import os
from collections.abc import Sequence
from typing import Any

from accel.utils.dataclasses import AORecipeKwargs, FP8RecipeKwargs, TERecipeKwargs
from accel_compat.options.handlers import (
    CompatAutocastKwargs,
    CompatDDPKwargs,
    CompatGradScalerKwargs,
    CompatProcessGroupKwargs,
    CompatProfileKwargs,
    MSAMPRecipeKwargs,
    MutableHandler,
)
from accel_state.enums import DistributedType
from accel_state.environment import parse_flag_from_env


class PluginsFixedError(NotImplementedError):
    """DeepSpeed's options were given to a second Accelerator; all share those of the first."""


_REPLICAS = frozenset({"dp_replicate"})

FIELDS: dict[type, str] = {
    CompatDDPKwargs: "ddp_handler",
    CompatGradScalerKwargs: "scaler_handler",
    CompatProcessGroupKwargs: "init_handler",
    CompatAutocastKwargs: "autocast_handler",
    CompatProfileKwargs: "profile_handler",
    AORecipeKwargs: "ao_recipe_handler",
    TERecipeKwargs: "te_recipe_handler",
    MSAMPRecipeKwargs: "msamp_recipe_handler",
    FP8RecipeKwargs: "fp8_recipe_handler",
}


def handlers_by_field(handlers: Sequence[Any]) -> dict[str, Any]:
    """Returns each handler under the name of the Accelerator's attribute, None for those that are not given.

    Raises:
        ValueError: two handlers of a kind, or an object that is none.
    """
    found: dict[str, Any] = dict.fromkeys(FIELDS.values())
    for handler in handlers:
        assert isinstance(handler, MutableHandler) or type(handler) in FIELDS, (
            f"Unsupported kwargs handler passed: {handler}."
        )
        name = next((field for kind, field in FIELDS.items() if isinstance(handler, kind)), None)
        if name is None:
            continue
        if found[name] is not None:
            raise ValueError(f"You can only pass one {type(handler).__name__} in `kwargs_handlers`.")
        found[name] = handler
    return found


def refuse_megatron(plugin: Any) -> None:
    """Refuses Megatron-LM, which trains through accel's own Accelerator only.

    Raises:
        RuntimeError: a plugin is given, or the environment asks for it.
    """
    asked = "megatron_lm_plugin" if plugin is not None else "ACCELERATE_USE_MEGATRON_LM"
    if plugin is not None or parse_flag_from_env(asked):
        raise RuntimeError(
            f"{asked}: Accelerate's loop of Megatron-LM, in which backward and step do nothing, is not offered; with accel "
            "itself: Accelerator(strategy=MegatronLMPlugin(...)) with the plugin of accel_megatron, in the ordinary loop"
        )


def check_sequences(parallelism: Any, distributed_type: DistributedType) -> None:
    """Refuses ``sp_size`` without DeepSpeed, as Accelerate does: the loaders of a script deliver other batches there.

    Raises:
        ValueError: names the degree, and the nearest that works.
    """
    if parallelism is not None and parallelism.size("sp") > 1 and distributed_type != DistributedType.DEEPSPEED:
        raise ValueError(
            f"sp_size={parallelism.size('sp')} needs DeepSpeed (deepspeed_plugin=, or --use_deepspeed); without it, "
            "accel's own Accelerator splits sequences with FSDP, or use cp_size"
        )


def chosen_plugins(deepspeed: Any, several: Any, fsdp: Any, parallelism: Any = None) -> tuple[Any, Any]:
    """Returns DeepSpeed's and FSDP's options: given ones, or those that the environment or the degrees ask for.

    Layers and sequences are sharded by FSDP's version 2, so degrees of them ask for its options.
    """
    if deepspeed is not None and several is not None:
        raise ValueError("You cannot pass in both `deepspeed_plugins` and `deepspeed_plugin`.")
    deepspeed = several if several is not None else deepspeed
    if isinstance(deepspeed, dict) and not deepspeed:
        deepspeed = None
    deepspeed = _deepspeed(deepspeed)
    if fsdp is None and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        from accel_compat.options.fsdp import CompatFSDPPlugin

        fsdp = CompatFSDPPlugin()
    elif fsdp is not None:
        from accel_compat.options.fsdp import CompatFSDPPlugin

        if not isinstance(fsdp, CompatFSDPPlugin):
            raise TypeError("`fsdp_plugin` must be a FullyShardedDataParallelPlugin object.")
        os.environ["ACCELERATE_USE_FSDP"] = "true"
    elif deepspeed is None and parallelism is not None and not _REPLICAS.issuperset(parallelism.active_mesh_dims):
        from accel_compat.options.fsdp import CompatFSDPPlugin

        fsdp = CompatFSDPPlugin(fsdp_version=2)
    return deepspeed, fsdp


def _deepspeed(plugin: Any) -> Any:
    from accel_compat.state.accelerator_state import SharedAcceleratorState, is_initialized

    known = SharedAcceleratorState._shared_state.get("deepspeed_plugins") if is_initialized() else None
    if known is not None:
        if plugin is not None:
            raise PluginsFixedError(
                "You cannot pass in a `deepspeed_plugin` when creating a second `Accelerator`. Please make sure the "
                "first `Accelerator` is initialized with all the plugins you want to use."
            )
        return known
    if plugin is None:
        if not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
            return None
        from accel_compat.options.deepspeed import CompatDeepSpeedPlugin

        return CompatDeepSpeedPlugin()
    from accel_compat.options.deepspeed import CompatDeepSpeedPlugin

    for one in plugin.values() if isinstance(plugin, dict) else [plugin]:
        if not isinstance(one, CompatDeepSpeedPlugin):
            raise TypeError("`deepspeed_plugin` must be a DeepSpeedPlugin object.")
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    return plugin
