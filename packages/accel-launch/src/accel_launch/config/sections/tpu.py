"""Settings of TPUs: one process on each machine, which drives all cores there."""

from dataclasses import dataclass

from accel_launch.config.setting import Facts, setting

_GROUP = "TPU"


def _tpu(help: str, **more: object) -> Facts:
    facts = {"needs": "tpu", "launch_only": True}
    return Facts(help, _GROUP, **(facts | more))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class TPUSettings:
    """Settings of a launch on TPUs."""

    tpu: bool = setting(False, Facts("Train on all TPU cores of a machine, in one process.", _GROUP, launch_only=True))
    tpu_cluster: bool = setting(
        False, _tpu("Start on every machine of a TPU pod, from here.", aliases=("tpu_use_cluster",))
    )
    tpu_use_sudo: bool = setting(False, _tpu("Use sudo on those machines.", needs="tpu_cluster"))
    tpu_name: str | None = setting(None, _tpu("Name of the pod.", needs="tpu_cluster"))
    tpu_zone: str | None = setting(None, _tpu("Zone of the pod.", needs="tpu_cluster"))
    vm: str | None = setting(
        None,
        _tpu("Machines of the pod, by number, with commas.", listed=True, aliases=("tpu_vm",), needs="tpu_cluster"),
    )
    env: str | None = setting(
        None,
        _tpu("Variables for the process: NAME=value, with commas.", listed=True, aliases=("tpu_env",), needs="tpu"),
    )
    main_training_function: str = setting(
        "main", _tpu("Accepted for compatibility; the whole script runs in each process.", choices=("main",))
    )
    downcast_bf16: bool = setting(False, _tpu("With mixed_precision=bf16: parameters are bf16, too.", needs="tpu"))
    command_file: str | None = setting(
        None, _tpu("A file of this machine: commands for the pod, run first.", needs="tpu_cluster")
    )
    commands: str | None = setting(
        None,
        _tpu("Commands to run on the pod first, with semicolons.", listed=True, separator=";", needs="tpu_cluster"),
    )
