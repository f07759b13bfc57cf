"""What a launch on TPUs would be: a plan to print. Nothing here has run on one, and this version does not try."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from accel.config.model import DOCUMENT_VARIABLE, AccelConfig
from accel.launch.command import launcher_argv
from accel_state.errors import LaunchError


@final
@dataclass(frozen=True, slots=True)
class TPUPlan:
    """One process per machine, which drives all of its cores (SPMD); or gcloud, which would start that on a pod."""

    argv: tuple[str, ...]
    env: Mapping[str, str]

    def to_json(self) -> dict[str, object]:
        """The plan as plain data."""
        return {"argv": list(self.argv), "env": dict(self.env)}

    def __str__(self) -> str:
        variables = "".join(f"{name}={shlex.quote(value)} \\\n" for name, value in self.env.items())
        return f"# not carried out by this version\n{variables}{shlex.join(self.argv)}\n"


def plan_tpu(config: AccelConfig, program: Sequence[str], *, python: str) -> TPUPlan:
    """The command and its variables.

    Raises:
        LaunchError: a pod without its name or zone.
    """
    if config.tpu_cluster:
        return TPUPlan(_pod(config, program), {})
    env = {"PJRT_DEVICE": "TPU", "XLA_USE_SPMD": "1", DOCUMENT_VARIABLE: config.to_document(), **config.variables()}
    if config.mixed_precision == "bf16":
        env["XLA_DOWNCAST_BF16" if config.downcast_bf16 else "XLA_USE_BF16"] = "1"
    argv = program if config.no_python else (python, *(("-m",) if config.module else ()), *program)
    return TPUPlan(tuple(argv), env)


def refuse_tpu(plan: TPUPlan) -> int:
    """Says that TPUs are only planned for.

    Raises:
        LaunchError: always.
    """
    raise LaunchError("tpu: this version plans such a launch (--dry_run prints it) and cannot run it")


def _pod(config: AccelConfig, program: Sequence[str]) -> tuple[str, ...]:
    if not (config.tpu_name and config.tpu_zone):
        raise LaunchError("tpu_cluster needs tpu_name and tpu_zone, as gcloud knows them")
    own = ("tpu_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone", "vm", "env", "command_file", "commands")
    command = launcher_argv(config, program, instead=dict.fromkeys(own), python="python3")
    variables = [f"export {item}" for item in (config.env or "").split(",") if item]
    before = [] if config.command_file is None else [f"bash {shlex.quote(config.command_file)}"]
    before += [part.strip() for part in (config.commands or "").split(";") if part.strip()]
    sudo = "sudo " if config.tpu_use_sudo else ""
    text = "; ".join([*variables, *before, f"{sudo}{shlex.join(command)}"])
    worker = config.vm or "all"
    gcloud = ("gcloud", "compute", "tpus", "tpu-vm", "ssh", config.tpu_name, "--zone", config.tpu_zone)
    return (*gcloud, "--command", text, "--worker", worker)
