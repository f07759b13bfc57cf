"""Fields of DeepSpeed's options: their keys in its JSON, their environment variables, defaults and types."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from accel_backends.core.option_parsing import as_flag, as_number
from accel_deepspeed.config.ds_json import AUTO, ZERO, near
from accel_state.errors import ConfigError

PREFIX = "ACCELERATE_DEEPSPEED_"
STAGES = (0, 1, 2, 3)
OFFLOAD = ("none", "cpu", "nvme")


@final
@dataclass(frozen=True, slots=True)
class OptionField:
    """A field whose value DeepSpeed's JSON has, too.

    Attributes:
        key: dotted key in DeepSpeed's JSON.
        variable: environment variable.
        default: value if no source has one.
        read: converts a value, given the field's name, the value and its origin; raises ConfigError with valid values.
    """

    key: str
    variable: str
    default: Any
    read: Callable[[str, Any, str], Any]


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


_STEPS, _CLIP = "gradient_accumulation_steps", "gradient_clipping"
_SAVE = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
FIELDS: Mapping[str, OptionField] = {
    _STEPS: OptionField(_STEPS, f"ACCELERATE_{_STEPS.upper()}", AUTO, _count),
    _CLIP: OptionField(_CLIP, f"ACCELERATE_{_CLIP.upper()}", AUTO, _norm),
    "zero_stage": OptionField(f"{ZERO}.stage", f"{PREFIX}ZERO_STAGE", 2, _stage),
    **{
        f"{part}_{what}": OptionField(f"{ZERO}.{part}.{what}", f"{PREFIX}{part}_{what}".upper(), default, read)
        for what, default, read in (("device", "none", _device), ("nvme_path", None, _path))
        for part in ("offload_optimizer", "offload_param")
    },
    "zero3_save_16bit_model": OptionField(_SAVE, f"{PREFIX}ZERO3_SAVE_16BIT_MODEL", False, _flag),
}
