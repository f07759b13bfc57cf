"""Environment of rank processes: the caller's variables, without those that would affect the test."""

import sys
from collections.abc import Mapping

# Launchers' variables describe the rank of *this* process; a child rank must not inherit them.
_FOREIGN_PREFIXES = (
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MPI_",
    "MV2_",
    "HYDI_",
    "LSB_",
    "TORCHELASTIC_",
    "TPU_WORKER_",
    "ACCELERATE_",
)
_FOREIGN = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NODE_RANK",
        "ACCEL_CONFIG",
        "PYTHONHASHSEED",
        "PYTEST_CURRENT_TEST",
        "PYTEST_ADDOPTS",
    }
)
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}

# Ranks are forked from a process that has imported torch, and CUDA's driver does not survive a fork: torch then counts
# devices without the driver.
_WITHOUT_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "CUDA_MODULE_LOADING": "LAZY"}


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of a new rank: no launcher's, one thread, gloo on loopback, no driver, its own hash seed."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES)
    }
    kept.update(_ONE_THREAD)
    kept.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    kept.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name, value in _WITHOUT_DRIVER.items():
        kept.setdefault(name, value)
    return kept


def changed_variables(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """Variables to set (None: to remove) to turn ``before`` into ``now``, for example those of a fixture."""
    changed: dict[str, str | None] = {name: value for name, value in now.items() if before.get(name) != value}
    return changed | dict.fromkeys(before.keys() - now.keys())


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Variables of one rank of this machine during one job, as torchrun sets them; its rendezvous is at ``port``."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
