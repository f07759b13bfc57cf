"""Settings of DeepSpeed, as ``DeepSpeedPlugin`` takes them, and of the way its jobs are started."""

from dataclasses import dataclass

from accel_launch.config.setting import Facts, setting

_GROUP = "DeepSpeed"
_DEVICES = ("none", "cpu", "nvme")


def _deepspeed(env: str, help: str, **more: object) -> Facts:
    facts = {
        "env": (f"ACCELERATE_{env}",) if env else (),
        "section": "deepspeed_config",
        "needs": "use_deepspeed",
        "prefix": "deepspeed_",
    }
    return Facts(help, _GROUP, **(facts | more))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class DeepSpeedSettings:
    """DeepSpeed's configuration: a file, or settings for parts of it."""

    use_deepspeed: bool = setting(
        False, Facts("Train with DeepSpeed.", _GROUP, env=("ACCELERATE_USE_DEEPSPEED",), strategy="deepspeed")
    )
    deepspeed_config_file: str | None = setting(
        None,
        _deepspeed(
            "DEEPSPEED_CONFIG_FILE",
            "DeepSpeed's own JSON file; what is auto there is filled in.",
            option="hf_ds_config",
        ),
    )
    zero_stage: int | None = setting(
        None, _deepspeed("DEEPSPEED_ZERO_STAGE", "What ZeRO shards; 2 if nobody says.", minimum=0, maximum=3)
    )
    offload_optimizer_device: str | None = setting(
        None, _deepspeed("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "Where optimizer states live.", choices=_DEVICES)
    )
    offload_param_device: str | None = setting(
        None, _deepspeed("DEEPSPEED_OFFLOAD_PARAM_DEVICE", "Where parameters live (stage 3).", choices=_DEVICES)
    )
    offload_optimizer_nvme_path: str | None = setting(
        None, _deepspeed("DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "Folder for optimizer states on NVMe.")
    )
    offload_param_nvme_path: str | None = setting(
        None, _deepspeed("DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "Folder for parameters on NVMe.")
    )
    gradient_clipping: float | None = setting(
        None, _deepspeed("GRADIENT_CLIPPING", "Norm that the engine clips gradients to.", minimum=0)
    )
    zero3_init_flag: bool | None = setting(
        None, _deepspeed("DEEPSPEED_ZERO3_INIT", "Build models sharded (stage 3).", valued=True)
    )
    zero3_save_16bit_model: bool | None = setting(
        None, _deepspeed("DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "Save whole 16-bit weights (stage 3).", valued=True)
    )
    deepspeed_moe_layer_cls_names: str | None = setting(
        None,
        _deepspeed(
            "DEEPSPEED_MOE_LAYER_CLS_NAMES",
            "Classes that ZeRO-3 gathers whole, with commas.",
            listed=True,
            aliases=("deepspeed_moe_layer_cls_names",),
            option="transformer_moe_cls_names",
        ),
    )
    deepspeed_hostfile: str | None = setting(
        None,
        _deepspeed("", "Machines, one 'name slots=N' a line; they are started from here over SSH.", launch_only=True),
    )
    deepspeed_inclusion_filter: str | None = setting(
        None,
        _deepspeed("", "Only these of the hostfile: host1@host2:0,1.", launch_only=True, needs="deepspeed_hostfile"),
    )
    deepspeed_exclusion_filter: str | None = setting(
        None,
        _deepspeed("", "All of the hostfile but these: host1@host2:0.", launch_only=True, needs="deepspeed_hostfile"),
    )
    deepspeed_multinode_launcher: str | None = setting(
        None,
        _deepspeed(
            "",
            "How the machines of the hostfile are started: pdsh (the same as ssh here), ssh, openmpi, or by hand "
            "(standard, nossh).",
            choices=("pdsh", "ssh", "openmpi", "standard", "nossh"),
            launch_only=True,
        ),
    )
