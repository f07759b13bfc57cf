"""Facts about this machine that a launch needs, and a check that the program exists."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import final

from accel_launch.config.model import AccelConfig
from accel_launch.config.setting import nearest
from accel_launch.launch.checks import machine_range
from accel_state.environment import available_cpus
from accel_state.errors import LaunchError

# CUDA (also under WSL), ROCm, Intel graphics, Habana and TPU, Meta.
_ACCELERATOR_NODES = ("nvidia", "dxg", "kfd", "dri", "accel", "vfio", "hl", "mtia")


@final
@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts about a machine that the plan needs. ``accelerator`` is torch's device type, None if there is none.

    ``interface`` is the network interface that reaches the other machines, if it is known.
    """

    python: str
    num_cores: int
    accelerator: str | None
    num_accelerators: int
    interface: str | None = None


def read_host(config: AccelConfig) -> HostFacts:
    """Inspects this machine, only as far as ``config`` needs.

    Accelerators are counted through torch, whose import takes longer than the rest of a launch. So torch is imported
    only if the count can change the plan (not for ``cpu`` or ``tpu``, nor for one requested process) and the machine
    may have accelerators.
    """
    one_process = config.num_processes == 1 and not config.multi_gpu and config.gpu_ids is None
    kind, count = (None, 0) if config.cpu or config.tpu or one_process else _accelerators()
    return HostFacts(sys.executable, available_cpus(), kind, count, _shared_interface(config))


def count_accelerators() -> int:
    """Number of accelerators of this machine; torch is imported only if there may be any."""
    return _accelerators()[1]


def has_megatron() -> bool:
    """Whether Megatron-LM's backend and library are installed; neither is imported."""
    # A part is looked for once what it is a part of was found.
    return all(find_spec(name) is not None for name in ("accel_megatron", "megatron", "megatron.core"))


def check_program(config: AccelConfig, program: Sequence[str]) -> None:
    """Refuses a program that does not exist, before any process starts.

    Raises:
        LaunchError: names the program as given and the nearest one that exists.
    """
    if not program:
        raise LaunchError("no program to launch: give a script, or -m and a module, after the flags")
    target = program[0]
    if config.compat and not config.tpu_cluster and find_spec("accel_compat") is None:
        raise LaunchError(
            "compat needs the distribution accel-compat, which is not installed: pip install accel-compat"
        )
    if config.no_python or config.tpu_cluster:
        # the process itself searches for a command as a shell does; on a pod, the program is on the pod's machines
        return
    if config.module:
        _check_module(target)
    elif not Path(target).exists():
        folder = Path(target).parent
        siblings = [path.name for path in folder.iterdir() if path.suffix == ".py"] if folder.is_dir() else []
        close = nearest(Path(target).name, siblings)
        hint = f"did you mean {folder / close}?" if close else f"looked in {folder.resolve()}"
        raise LaunchError(f"there is no script {target!r}; {hint}")


def _check_module(name: str) -> None:
    top, _, rest = name.partition(".")
    if rest == "py":
        raise LaunchError(f"-m takes the name of a module, {name!r} is a file; drop -m, or name the module {top}")
    # Only the top-level package is looked up: finding a submodule would import its parents here. A package that is
    # installed for development may have a finder of its own.
    if PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None and find_spec(top) is None:
        raise LaunchError(f"there is no module {top!r} for -m {name}; looked in {Path.cwd()} and the environment")


def _shared_interface(config: AccelConfig) -> str | None:
    if not config.same_network or config.main_process_ip is None or machine_range(config)[1] == 1:
        return None
    from accel_launch.launch.multi_node.network import interface_to

    return interface_to(config.main_process_ip)


def _accelerators() -> tuple[str | None, int]:
    if sys.platform == "linux" and not _has_accelerator_node() and not _has_foreign_backend():
        return None, 0
    import torch

    if not torch.accelerator.is_available():
        return None, 0
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return device.type, torch.accelerator.device_count()


def _has_accelerator_node() -> bool:
    """Whether /dev has a node of an accelerator that torch itself supports (not whether the accelerator works)."""
    return any(name.startswith(_ACCELERATOR_NODES) for name in os.listdir("/dev"))


def _has_foreign_backend() -> bool:
    """Whether a package adds a device type to torch, whose device nodes are unknown here."""
    from importlib.metadata import entry_points

    return bool(entry_points(group="torch.backends"))
