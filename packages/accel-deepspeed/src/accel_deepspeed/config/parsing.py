"""Parsing of DeepSpeed's options to the types of their fields."""

from collections.abc import Callable, Mapping
from typing import Any

from accel_backends.core.option_parsing import as_flag, as_number
from accel_deepspeed.config.ds_json import near
from accel_state.errors import ConfigError

STAGES = (0, 1, 2, 3)
OFFLOAD = ("none", "cpu", "nvme")


def read(name: str, value: Any, origin: str) -> Any:
    """Returns a value as the type of the field ``name``.

    Raises:
        ConfigError: the value is invalid; with valid ones.
    """
    reader: Callable[[str, Any, str], Any] = _READERS.get(name, _path)
    return reader(name, value, origin)


def _stage(name: str, value: Any, origin: str) -> int:
    number = as_number(f"{name} ({origin})", value)
    if number not in STAGES:
        nearest = min(STAGES, key=lambda stage: abs(stage - number))
        raise ConfigError(f"{name} is {value!r} ({origin}); expected 0, 1, 2 or 3; nearest: {nearest}")
    return number


def _count(name: str, value: Any, origin: str) -> int:
    number = as_number(f"{name} ({origin})", value)
    if number < 1:
        raise ConfigError(f"{name} is {value!r} ({origin}); expected 1 or more")
    return number


def _norm(name: str, value: Any, origin: str) -> float:
    try:
        norm = float(value)
    except (TypeError, ValueError):
        norm = -1.0
    if norm < 0:
        raise ConfigError(f"{name} is {value!r} ({origin}); expected a norm, 0 for none, or 'auto'")
    return norm


def _flag(name: str, value: Any, origin: str) -> bool:
    return as_flag(f"{name} ({origin})", value)


def _device(name: str, value: Any, origin: str) -> str:
    device = str(getattr(value, "value", value)).lower()
    if device not in OFFLOAD:
        raise ConfigError(f"{name} is {value!r} ({origin}); expected none, cpu or nvme{near(device, OFFLOAD)}")
    return device


def _path(name: str, value: Any, origin: str) -> str | None:
    return None if str(value).lower() == "none" else str(value)


_READERS: Mapping[str, Callable[[str, Any, str], Any]] = {
    "zero_stage": _stage,
    "gradient_accumulation_steps": _count,
    "gradient_clipping": _norm,
    "zero3_save_16bit_model": _flag,
    "offload_optimizer_device": _device,
    "offload_param_device": _device,
}
