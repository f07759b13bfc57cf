"""``accel env``."""

import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import rich_click as click

from accel.cli.config import rows_as_json, shown
from accel.cli.options import as_json, config_file, config_from
from accel.cli.printing import print_json

_PACKAGES = (
    "accel",
    "accel-state",
    "accel-precision",
    "accel-data",
    "accel-backends",
    "accel-ckpt",
    "torch",
    "numpy",
    "safetensors",
    "deepspeed",
    "transformers",
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
)


@click.command()
@config_file
@as_json
def env(config_file: str | None, *, as_json: bool) -> int:
    """Prints versions, devices, variables and changed settings: what a bug report needs."""
    found = environment(config_file)
    if as_json:
        print_json(found)
        return 0
    for title, value in found.items():
        if isinstance(value, Mapping):
            print(f"{title}:", *(f"  {name}: {text}" for name, text in value.items()), sep="\n")
        elif isinstance(value, list):
            print(f"{title}:", *(f"  {_line(item)}" for item in value), sep="\n")
        else:
            print(f"{title}: {value}")
    return 0


def environment(config_file: str | None = None) -> dict[str, object]:
    """Everything that a bug report needs, as plain data. Devices are listed and none is initialised."""
    changed = [row for row in rows_as_json(config_from({}, config_file)) if row["source"] != "default"]
    return {
        "platform": platform.platform(),
        "python": f"{platform.python_version()} at {sys.executable}",
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "devices": _devices(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
        "settings": changed,
    }


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

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return ["cpu"]
    count = torch.accelerator.device_count()
    if kind.type == "cuda":
        return [f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(count)]
    return [f"{kind.type}:{index}" for index in range(count)]
