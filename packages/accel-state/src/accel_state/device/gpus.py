"""Queries of NVIDIA GPUs, drivers and NUMA affinity, needed before processes start."""

import logging
import os
import re
import shutil
import subprocess
from pathlib import Path

from packaging.version import Version

from accel_state.environment import parse_flag_from_env, usable_cpus

_LOG = logging.getLogger(__name__)

# Consumer GPUs of this series lack peer-to-peer transfers under older drivers.
_NO_PEER_SERIES = "RTX 40"
_PEER_DRIVER = "550.40.07"


def get_gpu_info() -> tuple[list[str], int]:
    """Returns the names of all NVIDIA GPUs and their number, from nvidia-smi, so that no CUDA context is created.

    Raises:
        RuntimeError: nvidia-smi is missing or fails.
    """
    names = _ask_nvidia_smi("name")
    return names, len(names)


def get_driver_version() -> str:
    """Returns the version of the NVIDIA driver.

    Raises:
        RuntimeError: nvidia-smi is missing or fails, or there is no GPU.
    """
    versions = _ask_nvidia_smi("driver_version")
    if not versions:
        raise RuntimeError("nvidia-smi lists no GPU")
    return versions[0]


def check_cuda_p2p_ib_support() -> bool:
    """Whether GPU peer-to-peer transfers work: False for several RTX 40 cards under a driver before 550.40.07.

    True if nvidia-smi cannot answer.
    """
    try:
        names, count = get_gpu_info()
        if count <= 1 or not any(_NO_PEER_SERIES in name for name in names):
            return True
        return Version(get_driver_version()) >= Version(_PEER_DRIVER)
    except (RuntimeError, ValueError):
        return True


def check_cuda_fp8_capability() -> bool:
    """Whether the current CUDA device computes in float8; False without a CUDA device."""
    from accel_state.device.device import Device, count_devices

    if count_devices("cuda") == 0:
        return False
    import torch

    return Device("cuda", torch.cuda.current_device()).supports(torch.float8_e4m3fn)


def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Binds this process to the CPUs next to its GPU, as Linux lists them; does nothing without CUDA or such a list.

    ``verbose`` logs the result; the default is the value of ``ACCELERATE_DEBUG_MODE``.
    """
    from accel_state.device.device import count_devices

    if not hasattr(os, "sched_setaffinity") or count_devices("cuda") <= local_process_index:
        return
    cpus = _cpus_near_gpu(local_process_index).intersection(usable_cpus())
    if cpus:
        os.sched_setaffinity(0, cpus)
    if parse_flag_from_env("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        _LOG.info("process %d keeps to CPUs %s", local_process_index, sorted(cpus) or usable_cpus())


# Accelerate's name for the variant that ignores its cache; here nothing is cached.
override_numa_affinity = set_numa_affinity


def parse_cpu_list(text: str) -> set[int]:
    """Parses a CPU list of the Linux kernel: ``"0-3,8,10-11"``.

    Raises:
        ValueError: ``text`` is not such a list.
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise ValueError(f"cannot read {part!r} in the CPU list {text!r}; expected like '0-3,8'")
        cpus.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return cpus


def _cpus_near_gpu(index: int) -> set[int]:
    import torch

    facts = torch.cuda.get_device_properties(index)
    domain, bus, device = (getattr(facts, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    if domain is None or bus is None or device is None:
        return set()
    path = Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/local_cpulist")
    return parse_cpu_list(path.read_text()) if path.is_file() else set()


def _ask_nvidia_smi(field: str) -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise RuntimeError("nvidia-smi is not on the PATH; is an NVIDIA driver installed?")
    try:
        answer = subprocess.run(
            [tool, f"--query-gpu={field}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (subprocess.SubprocessError, OSError) as error:
        raise RuntimeError(f"nvidia-smi failed: {error}") from error
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
