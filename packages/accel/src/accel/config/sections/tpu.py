"""Settings of TPUs. This version plans such a launch and does not run it."""

from dataclasses import dataclass

from accel.config.setting import Facts, setting

_GROUP = "TPU"


def _tpu(help: str, **more: object) -> Facts:
    facts = {"needs": "tpu", "launch_only": True}
    return Facts(help, _GROUP, **(facts | more))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class TPUSettings:
    """What a launch on TPUs is made of."""

    tpu: bool = setting(False, Facts("Run on TPU cores through torch_xla.", _GROUP, launch_only=True))
    tpu_cluster: bool = setting(
        False, _tpu("Start on every machine of a TPU pod, from here.", aliases=("tpu_use_cluster",))
    )
    tpu_use_sudo: bool = setting(False, _tpu("Use sudo on those machines.", needs="tpu_cluster"))
    tpu_name: str | None = setting(None, _tpu("Name of the pod.", needs="tpu_cluster"))
    tpu_zone: str | None = setting(None, _tpu("Zone of the pod.", needs="tpu_cluster"))
    vm: str | None = setting(
        None, _tpu("Machines of the pod, with commas.", listed=True, aliases=("tpu_vm",), needs="tpu_cluster")
    )
    env: str | None = setting(
        None,
        _tpu("Variables for those machines: NAME=value, with commas.", listed=True, aliases=("tpu_env",), needs="tpu"),
    )
    main_training_function: str = setting(
        "main", _tpu("Accepted for compatibility; the whole script runs in each process.", choices=("main",))
    )
    downcast_bf16: bool = setting(
        False, _tpu("Both float and double become bf16 under mixed_precision=bf16.", needs="tpu")
    )
    command_file: str | None = setting(None, _tpu("A file of commands to run on the pod first.", needs="tpu_cluster"))
    commands: str | None = setting(
        None, _tpu("Commands to run on the pod first, with semicolons.", listed=True, needs="tpu_cluster")
    )
