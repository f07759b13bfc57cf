"""Command lines and environments of a launch, as ``accelerate.utils.launch`` returns them.

The module is that of Accelerate's name too, so that ``which`` and ``subprocess`` can be replaced there. The commands
start the script itself: its ``import accelerate`` is the accelerate that is installed, unlike under ``launch_command``.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from shutil import which
from typing import Any

from accel_compat.absent import _filter_args as _filter_args
from accel_compat.absent import prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env
from accel_compat.absent import prepare_extend_env_parallelism_config as prepare_extend_env_parallelism_config
from accel_compat.absent import prepare_sagemager_args_inputs as prepare_sagemager_args_inputs
from accel_compat.absent import prepare_tpu as prepare_tpu
from accel_compat.absent import setup_fp8_env as setup_fp8_env
from accel_compat.commands.argument_parser import given_settings
from accel_compat.commands.prepared_launch import PrepareForLaunch as PrepareForLaunch
from accel_launch.cli.options import config_from
from accel_launch.config.model import AccelConfig
from accel_launch.launch.supervisor.ports import DEFAULT_PORT, reserved_port

__all__ = [
    "PrepareForLaunch",
    "_convert_nargs_to_dict",
    "_filter_args",
    "env_var_path_add",
    "prepare_deepspeed_cmd_env",
    "prepare_extend_env_parallelism_config",
    "prepare_multi_gpu_env",
    "prepare_sagemager_args_inputs",
    "prepare_simple_launcher_cmd_env",
    "prepare_tpu",
    "setup_fp8_env",
]


def env_var_path_add(env_var_name: str, path_to_add: str | os.PathLike[str]) -> str:
    """Value of a variable of search paths with one path more; the variable stays as it is."""
    known = [path for path in os.environ.get(env_var_name, "").split(":") if path]
    return ":".join([*known, os.fspath(path_to_add)])


def _environment(config: AccelConfig) -> dict[str, str]:
    threads, gpus = config.num_cpu_threads_per_process, config.gpu_ids
    made = {**os.environ, **config.variables()}
    if threads is not None:
        made["OMP_NUM_THREADS"] = str(threads)
    if gpus is not None and str(gpus) != "all":
        made["CUDA_VISIBLE_DEVICES"] = str(gpus)
    if config.num_machines > 1 and config.main_process_ip is not None:
        made["MASTER_ADDR"] = str(config.main_process_ip)
        made["MASTER_PORT"] = str(DEFAULT_PORT if config.main_process_port is None else config.main_process_port)
    return made


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a script that is started once, or by mpirun if a hostfile is named.

    Raises:
        OSError: a hostfile is named, and there is no mpirun.
        ValueError: a module without Python.
    """
    config = config_from(given_settings(args), args.config_file)
    if config.module and config.no_python:
        raise ValueError("--module and --no_python cannot be used together: a module runs in Python; leave one out")
    python = [] if config.no_python else [sys.executable, *(["-m"] if config.module else [])]
    program = [*python, args.training_script, *args.training_script_args]
    if config.mpirun_hostfile is None:
        return program, _environment(config)
    return [*_mpirun(config), *program], _environment(config)


def _mpirun(config: AccelConfig) -> list[str]:
    if not which("mpirun"):
        raise OSError("mpirun was not found; install Open MPI or Intel MPI, or set no mpirun_hostfile")
    said = subprocess.check_output(["mpirun", "--version"])
    hosts, each = ("--hostfile", "--npernode") if b"Open MPI" in said else ("-f", "-ppn")
    total = config.num_processes or config.num_machines
    more = shlex.split(config.mpirun_args or "")
    return [
        *("mpirun", hosts, str(config.mpirun_hostfile), each, str(max(1, total // config.num_machines))),
        *("-n", str(total), *more),
    ]


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Environment of processes that torchrun starts; sets torchrun's options as attributes of ``args``."""
    config = config_from(given_settings(args), getattr(args, "config_file", None))
    port = config.main_process_port
    if port == 0:
        with reserved_port(0) as free:
            port = free
    nodes = config.num_machines
    args.nproc_per_node = str((config.num_processes or nodes) // nodes)
    args.nnodes = str(nodes)
    args.master_port = str(DEFAULT_PORT if port is None else port)
    if nodes > 1:
        args.node_rank = int(config.machine_rank)
        args.master_addr = str(config.main_process_ip)
    return _environment(config)


def _convert_nargs_to_dict(nargs: Sequence[str]) -> dict[str, Any]:
    """Values of a script's arguments by name: truth values, numbers or texts; an option without a value is True.

    Raises:
        ValueError: truth values are written out for some options, and left out for others.
    """
    values: dict[str, Any] = {}
    bare: list[str] = []
    name = ""
    for word in [*nargs, "--"]:
        if not word.startswith("-") or _number(word) is not None:
            values[name] = _value(word)
            name = ""
            continue
        if name:
            values[name] = True
            bare.append(name)
        name = word.lstrip("-")
    written = [name for name, value in values.items() if isinstance(value, bool) and name not in bare]
    if bare and written:
        raise ValueError(
            f"arguments of the script give truth values in two ways: {written} have a value and {bare} have none; "
            "SageMaker passes on one way only"
        )
    return values


def _number(word: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return None


def _value(word: str) -> Any:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    number = _number(word)
    return word if number is None else number
