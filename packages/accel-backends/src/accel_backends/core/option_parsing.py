"""Parsing of sharding options: names in any case, numbers, torch's enums and objects."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from enum import Enum
from typing import Any, TypeVar, cast

import torch

from accel_backends.core.config import FullStateForm
from accel_precision.errors import PrecisionError
from accel_precision.policy import DTYPES, PrecisionPolicy
from accel_state.enums import BaseEnum
from accel_state.errors import ConfigError, did_you_mean

MixedDtypes = Mapping[str, Any]
E = TypeVar("E", bound=Enum)


class ShardingLevel(BaseEnum):
    """What is sharded, and when parameters are freed; numbered from 1 as torch numbers its strategies."""

    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    NO_SHARD = "NO_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"
    HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"


class BackwardPrefetch(BaseEnum):
    """Time at which backward all-gathers the next unit's parameters."""

    BACKWARD_PRE = "BACKWARD_PRE"
    BACKWARD_POST = "BACKWARD_POST"
    NO_PREFETCH = "NO_PREFETCH"


class StateDictKind(BaseEnum):
    """Forms of a sharded model's state dict."""

    FULL_STATE_DICT = "FULL_STATE_DICT"
    LOCAL_STATE_DICT = "LOCAL_STATE_DICT"
    SHARDED_STATE_DICT = "SHARDED_STATE_DICT"


class AutoWrap(BaseEnum):
    """Rule that selects the units of a model."""

    TRANSFORMER_BASED_WRAP = "TRANSFORMER_BASED_WRAP"
    SIZE_BASED_WRAP = "SIZE_BASED_WRAP"
    NO_WRAP = "NO_WRAP"


# Alternative spellings of AutoWrap members, names of torch's wrap policies among them.
_WRAP_ALIASES = {
    "TRANSFORMER_AUTO_WRAP": AutoWrap.TRANSFORMER_BASED_WRAP,
    "TRANSFORMER_AUTO_WRAP_POLICY": AutoWrap.TRANSFORMER_BASED_WRAP,
    "SIZE_BASED_AUTO_WRAP": AutoWrap.SIZE_BASED_WRAP,
    "SIZE_BASED_AUTO_WRAP_POLICY": AutoWrap.SIZE_BASED_WRAP,
}
_TRUE, _FALSE = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f")
DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")
_MIXED_FIELDS = (*DTYPE_FIELDS, "cast_forward_inputs")


def full_form(name: str, value: object) -> FullStateForm:
    """Returns the form given as a mapping, or as torch's ``FullStateDictConfig`` or ``FullOptimStateDictConfig``.

    Raises:
        ConfigError: an unknown entry; or offloading of sharded states, which stay where their parameters are.
    """
    if value is None or isinstance(value, FullStateForm):
        return value or FullStateForm()
    known = [field.name for field in fields(FullStateForm)]
    if isinstance(value, Mapping):
        for entry in value:
            if entry not in known:
                hint = did_you_mean(str(entry), known)
                raise ConfigError(f"{name} has no {entry!r}; it has {', '.join(known)}{hint}")
        return FullStateForm(**{entry: as_flag(f"{name}: {entry}", flag) for entry, flag in value.items()})
    if not hasattr(value, "offload_to_cpu"):
        raise ConfigError(
            f"{name} is a {type(value).__name__}; expected a mapping of {', '.join(known)}, or torch's "
            "FullStateDictConfig"
        )
    if not hasattr(value, "rank0_only"):
        if value.offload_to_cpu:
            raise ConfigError(
                f"{name}={type(value).__name__}(offload_to_cpu=True): sharded states stay where their parameters are; "
                "nearest: leave it out (checkpoints need no copy on the host), or FullStateDictConfig"
            )
        return FullStateForm()
    return FullStateForm(bool(value.offload_to_cpu), bool(value.rank0_only))


def as_member(name: str, value: object, kind: type[E]) -> E:
    """Returns the member of ``kind`` given as its name in any case, its number from 1, or torch's own member.

    Raises:
        ConfigError: ``value`` is none of these; the message lists the members and the nearest.
    """
    if isinstance(value, kind):
        return value
    members = list(kind)
    text = str(getattr(value, "name", value)).strip().upper().lstrip("_")
    if text.isdecimal() and 1 <= int(text) <= len(members) and not isinstance(value, bool):
        return members[int(text) - 1]
    if text in kind.__members__:
        return kind[text]
    near = get_close_matches(text, kind.__members__, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"{name}={value!r} is not one of {', '.join(kind.__members__)} (or 1 to {len(members)}){hint}")


def as_flag(name: str, value: object) -> bool:
    """Parses a boolean, or a text that means one.

    Raises:
        ConfigError: ``value`` is neither.
    """
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ConfigError(f"{name}={value!r}; expected true or false")


def as_number(name: str, value: object) -> int:
    """Parses a non-negative integer, or a text of one.

    Raises:
        ConfigError: ``value`` is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = str(value).strip()
    if not text.isdecimal():
        raise ConfigError(f"{name}={value!r}; expected a whole number")
    return int(text)


def reshard_value(value: object) -> bool | int:
    """Parses ``reshard_after_forward``: true, false, or the shard degree between forward and backward.

    Raises:
        ConfigError: something else, such as a strategy's name.
    """
    if isinstance(value, int):
        return value
    text = str(getattr(value, "name", value)).strip().lower()
    if text in ("true", "false"):
        return text == "true"
    if text.isdecimal():
        return int(text)
    raise ConfigError(
        f"reshard_after_forward={value!r} is not supported with FSDP2: expected true, false or a number of ranks; "
        f"nearest: sharding_strategy={str(getattr(value, 'name', value))!r}"
        if text.upper().lstrip("_") in ShardingLevel.__members__
        else f"reshard_after_forward={value!r}; expected true, false or a number of ranks"
    )


def wrap_value(value: object) -> "AutoWrap | Callable[..., Any] | None":
    """Parses ``auto_wrap_policy``: a rule that selects units, a function that decides for one module, or None.

    Raises:
        ConfigError: ``value`` is none of these.
    """
    if value is None:
        return None
    name = getattr(value, "__name__", "").upper()
    if name in _WRAP_ALIASES:
        return _WRAP_ALIASES[name]
    if callable(value) and not isinstance(value, Enum):
        return cast(Callable[..., Any], value)
    text = str(getattr(value, "name", value)).strip().upper()
    return _WRAP_ALIASES[text] if text in _WRAP_ALIASES else as_member("auto_wrap_policy", value, AutoWrap)


def offloads(value: object) -> bool:
    """Whether an offload policy of torch (of either FSDP version), or a text, turns offloading on.

    Raises:
        ConfigError: ``value`` is neither.
    """
    flag = getattr(value, "offload_params", None)
    if flag is not None:
        return bool(flag)
    kind = type(value).__name__
    if kind in ("CPUOffloadPolicy", "OffloadPolicy"):
        return kind == "CPUOffloadPolicy"
    return as_flag("cpu_offload", value)


def mixed_dtypes(value: object, *, buffers_wide: bool = False) -> MixedDtypes | None:
    """Parses a mapping of dtypes by role from a precision's name, a mapping, or torch's object of either FSDP version.

    ``buffers_wide``: with a precision's name, buffers are fp32.

    Raises:
        ConfigError: an unknown name, role or dtype.
    """
    if value is None:
        return None
    if isinstance(value, str):
        dtype = _dtype_of_precision(value)
        wide = torch.float32 if buffers_wide else dtype
        return {"param_dtype": dtype, "reduce_dtype": dtype, "output_dtype": dtype, "buffer_dtype": wide}
    if not isinstance(value, Mapping):
        found = {name: getattr(value, name) for name in _MIXED_FIELDS if hasattr(value, name)}
        if "param_dtype" not in found:
            raise ConfigError(
                f"mixed_precision_policy is a {type(value).__name__}; expected a precision's name, a mapping of "
                f"{', '.join(_MIXED_FIELDS)}, or torch's MixedPrecisionPolicy"
            )
        value = {name: entry for name, entry in found.items() if entry is not None}
    for name in value:
        if name not in _MIXED_FIELDS:
            hint = did_you_mean(str(name), _MIXED_FIELDS)
            raise ConfigError(f"mixed_precision_policy has no {name!r}; it has {', '.join(_MIXED_FIELDS)}{hint}")
    return {name: _dtype(name, entry) if name in DTYPE_FIELDS else entry for name, entry in value.items()}


def _dtype_of_precision(text: str) -> torch.dtype:
    try:
        policy = PrecisionPolicy.parse(text)
    except PrecisionError as error:
        raise ConfigError(f"mixed_precision_policy: {error}") from error
    return policy.compute or torch.float32


def _dtype(name: str, value: object) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    text = str(value).lower().removeprefix("torch.")
    if text not in DTYPES:
        hint = did_you_mean(text, DTYPES)
        raise ConfigError(f"{name}={value!r} is no dtype; known: {', '.join(DTYPES)}{hint}")
    return DTYPES[text]
