"""Conversion of logged values: tensors become numbers, nested names become flat ones."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from numbers import Integral, Real
from operator import index
from os import PathLike, fspath
from typing import Any

from accel_state.device.pinned import HostCopy
from accel_state.errors import ConfigError

_PLAIN = (float, int, str, bool, type(None))
_NOT_FINITE = frozenset(map(str, (math.nan, math.inf, -math.inf)))


def named_values(values: Any) -> Mapping[str, Any]:
    """Returns values by name; other names than text become text.

    Raises:
        ConfigError: ``values`` is not a mapping.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"log was given {values!r}, a {type(values).__name__}; expected values by name, like {{'loss': 0.5}}"
        )
    return values if all([type(name) is str for name in values]) else {str(name): one for name, one in values.items()}


def whole_step(step: Any) -> int | None:
    """Returns the step of logged values as an integer, also if it is one of numpy or torch, or a float like 3.0.

    Raises:
        ConfigError: it is no integer.
    """
    if step is None:
        return None
    try:
        return index(step)
    except TypeError:
        if isinstance(step, Real) and float(step).is_integer():
            return int(float(step))
        raise ConfigError(f"step is {step!r}; expected an integer, or None to count calls") from None


def snapshot(value: Any) -> Any:
    """Snapshot of a value: copies what may be changed afterwards, without waiting for a device."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {str(key): snapshot(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(snapshot, value))
    detach = getattr(value, "detach", None)
    if detach is None:
        return value.copy() if hasattr(value, "tolist") and hasattr(value, "copy") else value
    tensor = detach()
    if tensor.device.type == "cpu":
        return tensor.item() if tensor.numel() == 1 else tensor.clone()
    return HostCopy(tensor)


def plain(value: Any) -> Any:
    """Converts a snapshot to numbers, text, lists and dicts; leaves other objects unchanged. Waits for devices."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(plain, value))
    if isinstance(value, HostCopy):
        value = value.read()
    if hasattr(value, "tolist"):  # tensors, arrays and NumPy scalars
        return value.item() if math.prod(getattr(value, "shape", ())) == 1 else value.tolist()
    return value


def from_json(value: Any) -> Any:
    """Converts values of ``as_json``, in which numbers that JSON lacks are texts, to such numbers: ``"nan"`` to nan."""
    if isinstance(value, Mapping):
        return {key: from_json(item) for key, item in value.items()}
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else value


def as_json(value: Any) -> Any:
    """Converts a value to JSON; objects and numbers that JSON cannot represent become text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, _PLAIN):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(asdict(value))
    if isinstance(value, Enum):
        return as_json(value.value)
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(item) for item in value]
    if hasattr(value, "tolist"):
        return as_json(plain(value))
    return str(value)


def pictures(images: Any) -> Iterator[Any]:
    """Yields images as every library accepts them: 8-bit H x W x C or H x W; other objects are yielded unchanged.

    ``images`` are a list, an array or tensor N x H x W x C, N x C x H x W or N x H x W, or a single image. Channels are
    1, 3 or 4. Floating-point values are expected between 0 and 1.
    """
    if hasattr(images, "ndim"):
        one = images.ndim == 2 or (images.ndim == 3 and _channels_first(images.shape) is not None)
        images = [images] if one else images
    elif not isinstance(images, list | tuple):
        images = [images]
    yield from map(_as_picture, images)


def _channels_first(shape: Sequence[int]) -> bool | None:
    """Whether the last three dimensions are C x H x W (True) or H x W x C (False); None: there are no channels.

    Ambiguous shapes count as H x W x C.
    """
    known = (1, 3, 4)
    if shape[-1] in known:
        return False
    return True if shape[-3] in known else None


def _as_picture(image: Any) -> Any:
    array = image.detach().cpu().numpy() if hasattr(image, "detach") else image
    if not hasattr(array, "ndim"):
        return array
    if array.ndim == 3 and _channels_first(array.shape):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.dtype.kind == "f":
        array = (array * 255).round().clip(0, 255)
    return array.astype("uint8")


def image_of(picture: Any) -> Any:
    """Converts an array of ``pictures`` to a Pillow image; needs Pillow."""
    from PIL import Image

    return Image.fromarray(picture)


def flatten(values: Mapping[str, Any], separator: str = "/", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields nested mappings as flat names and values: ``{"a": {"b": 1}}`` yields ``("a/b", 1)``."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, separator, f"{name}{separator}")
        else:
            yield name, value


def numbers(values: Mapping[str, Any], separator: str = "/") -> dict[str, float | int]:
    """Numbers among nested values, by flat name; booleans count as 0 and 1."""
    return {
        name: int(value) if isinstance(value, Integral) else float(value)
        for name, value in flatten(values, separator)
        if isinstance(value, Real)
    }
