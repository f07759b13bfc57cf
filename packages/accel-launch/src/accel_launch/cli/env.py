"""``accel env``."""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import rich_click as click

from accel_launch.cli.config import rows_as_json, shown
from accel_launch.cli.options import as_json, config_file, config_from
from accel_launch.cli.printing import print_json

_PACKAGES = (
    *("accel-training", "accel-state", "accel-precision", "accel-data", "accel-backends", "accel-ckpt"),
    *("accel-deepspeed", "accel-megatron", "accel-inference", "accel-planner", "accel-observe", "accel-launch"),
    *("accel-compat", "accel-testing"),
    *("torch", "torchvision", "torch-xla", "triton", "numpy", "safetensors", "click", "rich", "PyYAML"),
    *("deepspeed", "megatron-core", "torchao", "transformer-engine", "bitsandbytes", "flash-attn"),
    *("accelerate", "transformers", "trl", "peft", "diffusers", "datasets", "wandb", "mlflow", "tensorboard"),
)
_VARIABLES = (
    "ACCEL_",
    "ACCELERATE_",
    "CUDA_VISIBLE",
    "MASTER_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "FSDP_",
    "PARALLELISM_CONFIG_",
    "MEGATRON_LM_",
    "TORCH",
    "PJRT_",
    "SLURM_JOB",
    "OMPI_COMM",
)
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@click.command()
@config_file
@as_json
def env(config_file: str | None, *, as_json: bool) -> int:
    """Prints versions, devices, variables and changed settings for a bug report."""
    found = environment(config_file)
    if as_json:
        print_json(found)
        return 0
    for title, value in found.items():
        if value in ({}, []):
            print(f"{title}: none{' changed' * (title == 'settings')}")
        elif isinstance(value, Mapping):
            print(f"{title}:", *(f"  {name}: {text}" for name, text in value.items()), sep="\n")
        elif isinstance(value, list):
            print(f"{title}:", *(f"  {_line(item)}" for item in value), sep="\n")
        else:
            print(f"{title}: {value}")
    return 0


def environment(config_file: str | None = None) -> dict[str, object]:
    """Facts for a bug report, as plain data. Their names initialise the devices' driver."""
    changed = [row for row in rows_as_json(config_from({}, config_file)) if row["source"] != "default"]
    return {
        "platform": platform.platform(),
        "python": f"{platform.python_version()} at {sys.executable}",
        "accel": shutil.which("accel") or "not on the PATH",
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "accelerate": accelerate_in_use(),
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "devices": _devices(),
        "torch": _torch_facts(),
        "topology": _topology(),
        "backends": _backends(),
        "tools": {name: path for name in _TOOLS if (path := shutil.which(name)) is not None},
        "limits": _limits(),
        "variables": {
            name: "(hidden)" if any(word in name for word in _SECRET) else value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES)
        },
        "settings": changed,
    }


def accelerate_in_use() -> str:
    """What ``import accelerate`` finds in this process, and in programs under ``accel launch --compat``."""
    spec, compat = find_spec("accelerate"), _version("accel-compat")
    if spec is None:
        here = "not installed"
    else:
        offered = "accel_compat" in Path(spec.origin or "").parts
        here = f"{_version('accelerate')}, {'offered by accel-compat' if offered else 'the installed distribution'}"
    return f"{here}; under accel launch --compat: {f'accel-compat {compat}' if compat else 'accel-compat is missing'}"


_TOOLS = ("nvidia-smi", "rocm-smi", "sbatch", "srun", "mpirun", "ssh", "gcc", "ninja", "nvcc")


def _torch_facts() -> dict[str, object]:
    """Features of this build of torch."""
    import torch
    from torch import distributed

    groups = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if getattr(distributed, f"is_{name}_available")()]
    facts: dict[str, object] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "process groups": ", ".join(groups),
        "threads": torch.get_num_threads(),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _topology() -> str:
    """Topology of this process, as an Accelerator would read it."""
    from accel_state import Topology
    from accel_state.errors import AccelError

    try:
        place = Topology.from_env(os.environ)
    except AccelError as error:
        return f"cannot be read: {error}"
    return f"rank {place.rank} of {place.world_size}, node {place.node_rank} of {place.num_nodes}, by {place.launcher}"


# Libraries that a listed backend additionally needs: what is imported, and what is installed for it.
_LIBRARIES = {
    "deepspeed": ("deepspeed", "deepspeed"),
    "megatron": ("megatron", "megatron-core"),
    "xla": ("torch_xla", "torch_xla"),
}


def _backends() -> str:
    from accel_backends import installed_backends

    return ", ".join(map(_with_library, installed_backends()))


def _with_library(backend: str) -> str:
    module, library = _LIBRARIES.get(backend, (None, None))
    missing = module is not None and find_spec(module) is None
    return f"{backend} ({library} is not installed)" if missing else backend


def _limits() -> dict[str, object]:
    """Resource limits that often break a job on another machine: open files, shared memory, temporary space."""
    found: dict[str, object] = {}
    try:
        import resource

        found["open files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError):
        pass
    for name, folder in (("shared memory", "/dev/shm"), ("temporary files", tempfile.gettempdir())):
        if os.path.isdir(folder):
            found[name] = f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB free in {folder}"
    return found


def _line(item: object) -> str:
    if isinstance(item, Mapping) and "name" in item:
        return f"{item['name']}: {shown(item['value'])} ({item['source']} {item['detail']})"
    return str(item)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _devices() -> list[str]:
    import torch

    from accel_state.device.device import Device
    from accel_state.device.kinds import DEVICE_KINDS

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return ["cpu"]
    indices = range(torch.accelerator.device_count())
    if kind.type not in DEVICE_KINDS:  # of another package, without a row of its own
        return [f"{kind.type}:{index}" for index in indices]
    return [f"{one} {one.product_name()}".rstrip() for one in (Device(kind.type, index) for index in indices)]
