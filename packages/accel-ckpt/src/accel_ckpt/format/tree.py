"""State trees as JSON: exact numbers, containers of the same type, tensors by reference.

JSON lacks tuples, NaN and keys other than strings, and some parsers keep only 53 bits of an integer. Such values are
written as an object with one ``$`` key; ``docs/reference/checkpoint-format.md`` lists them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch.nn.parameter import is_lazy

from accel_state.errors import CheckpointCorruptError, CheckpointError

Tree = Any
Json = Any
Path = tuple[Any, ...]
MAX_DEPTH = 200
# Larger integers are written as hexadecimal text, because a JSON parser that stores doubles would round them.
_MAX_PLAIN = 2**53
_SCALARS = (str, int, float, bool, type(None))
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@final
class TensorTable:
    """Tensors found during encoding, each stored once, under the name of its first occurrence."""

    def __init__(self, prefix: str = "") -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._prefix = prefix
        self._known: dict[object, str] = {}

    def add(self, path: Path, tensor: torch.Tensor) -> str:
        """Returns the name under which ``tensor`` is stored: that of its path, or of a tied earlier tensor."""
        key = self._prefix + tensor_name(path)
        if is_lazy(tensor):
            raise CheckpointError(f"{show_path(path)} has no shape yet; call the model once before it is saved")
        identity = _identity(tensor)
        known = self._known.setdefault(identity, key) if identity is not None else key
        self.tensors.setdefault(known, tensor)
        return known


def encode(tree: Tree, name: str, table: TensorTable | None) -> Json:
    """Encodes ``tree`` as JSON; its tensors are added to ``table`` under names that start with ``name``.

    Raises:
        CheckpointError: a leaf is not a tensor, text, number, bool or None (or is a tensor although ``table`` is None);
            names its path in the tree and its type.
    """
    return _encode(tree, (plain_text(name),), table)


def decode(document: Json, tensor: Callable[[str, Path], Tree]) -> Tree:
    """Rebuilds the tree of ``encode``; ``tensor(name, path)`` returns the value for each tensor.

    Raises:
        CheckpointCorruptError: the document is not a state tree.
    """
    try:
        return _decode(document, (), tensor)
    except RecursionError:
        raise CheckpointCorruptError(f"a tree is nested more than {MAX_DEPTH} deep") from None


def leaves(tree: Tree) -> dict[Path, Any]:
    """Returns the leaves of ``tree`` by path (the keys and indices that lead to a leaf)."""
    return dict(_leaves(tree, ()))


def plain_text(text: str) -> str:
    """Returns the text itself of an instance of a subclass, whose ``str`` may differ (string enumerations)."""
    return str.__str__(text)


def tensor_name(path: Path) -> str:
    """Returns a unique text for a path in a tree."""
    return "/".join(_escape(part) for part in path)


def show_path(path: Path) -> str:
    """Formats a path in a tree for messages: ``optimizer/state/0/exp_avg``."""
    return "/".join(str(part) for part in path) or "the top"


def _encode(value: Any, path: Path, table: TensorTable | None) -> Json:
    if len(path) > MAX_DEPTH:
        raise CheckpointError(
            f"{show_path(path[:5])}/... is nested more than {MAX_DEPTH} deep; does the state contain itself?"
        )
    if isinstance(value, torch.Tensor):
        if table is None:
            raise CheckpointError(f"{show_path(path)} is a tensor, which is no JSON; put tensors into the state")
        return {"$tensor": table.add(path, value)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, table)
    if isinstance(value, list | tuple):
        items = [_encode(item, (*path, index), table) for index, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    plain = value if isinstance(value, _SCALARS) else _number_of(value)
    if plain is None and value is not None:
        raise CheckpointError(
            f"{show_path(path)} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint does not "
            f"hold{_hint(value)}. It holds tensors, str, int, float, bool, None, and dicts, lists and tuples of them"
        )
    return _encode_scalar(plain)


def _encode_scalar(value: Any) -> Json:
    """Encodes a scalar; subclasses (string enumerations, numpy's float64) are restored as the plain type."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, int):
        number = int(value)
        return number if abs(number) <= _MAX_PLAIN else {"$int": hex(number)}
    real = float(value)
    return real if math.isfinite(real) else {"$float": str(real)}


def _encode_mapping(value: Mapping[Any, Any], path: Path, table: TensorTable | None) -> Json:
    for key in value:
        if not isinstance(key, _SCALARS) and _number_of(key) is None:
            raise CheckpointError(
                f"{show_path(path)} has the key {key!r} of type {type(key).__qualname__}; keys can be str, int, float, "
                "bool and None"
            )
    items = [(plain_text(key) if isinstance(key, str) else key, item) for key, item in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
        return {key: _encode(item, (*path, key), table) for key, item in items}
    pairs = ((key if isinstance(key, _SCALARS) else _number_of(key), item) for key, item in items)
    return {"$dict": [[_encode(key, path, None), _encode(item, (*path, key), table)] for key, item in pairs]}


def _number_of(value: Any) -> Any:
    """Returns the Python value of a numpy scalar (or of a library with the same interface); None for other objects.

    Dates and durations are other objects: some units have a number as ``item()``, without the unit.
    """
    if getattr(value, "shape", None) != () or not callable(getattr(value, "item", None)):
        return None
    if getattr(getattr(value, "dtype", None), "kind", "") in ("M", "m"):
        return None
    plain = value.item()
    return plain if isinstance(plain, bool | int | float | str) else None


def _hint(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return " (bytes can hide code; store torch.frombuffer(..., dtype=torch.uint8))"
    if type(value).__module__ == "numpy":
        return " (use torch.from_numpy)"
    if callable(getattr(value, "state_dict", None)):
        return " (store its state_dict())"
    if isinstance(value, set | frozenset):
        return " (store sorted(...))"
    return ""


def _decode(document: Json, path: Path, tensor: Callable[[str, Path], Tree]) -> Tree:
    if len(path) > MAX_DEPTH:
        raise CheckpointCorruptError(f"{show_path(path[:5])}/... is nested more than {MAX_DEPTH} deep")
    if isinstance(document, list):
        return [_decode(item, (*path, index), tensor) for index, item in enumerate(document)]
    if not isinstance(document, dict):
        return document
    mark = next(iter(document)) if len(document) == 1 else ""
    if not mark.startswith("$"):
        return {key: _decode(item, (*path, key), tensor) for key, item in document.items()}
    content = document[mark]
    if mark == "$tensor" and isinstance(content, str):
        return tensor(content, path)
    try:
        return _decode_marked(mark, content, path, tensor)
    except (TypeError, ValueError, KeyError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointCorruptError(f"{show_path(path)} has an ill-formed {mark}: {content!r:.80}") from error


def _decode_marked(mark: str, content: Json, path: Path, tensor: Callable[[str, Path], Tree]) -> Tree:
    if mark == "$int":
        return int(content, 16)
    if mark == "$float":
        return _FLOATS[content]
    if mark == "$tuple":
        return tuple(_decode(item, (*path, index), tensor) for index, item in enumerate(content))
    if mark == "$dict":
        pairs = [(_decode(key, (*path, "key"), tensor), item) for key, item in content]
        return {key: _decode(item, (*path, key), tensor) for key, item in pairs}
    raise CheckpointCorruptError(f"{show_path(path)} is marked {mark!r}, which this version does not know")


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _escape(part: Any) -> str:
    """Escapes one key: ``/`` separates keys, ``@`` starts the offset of a part, ``~`` escapes and marks other types."""
    if isinstance(part, str):
        return part.replace("~", "~0").replace("/", "~1").replace("@", "~2")
    return f"~{type(part).__name__[0]}{part}" if not isinstance(part, int) or isinstance(part, bool) else f"~i{part}"


def _identity(tensor: torch.Tensor) -> object | None:
    """Returns a key that is equal for views of the same memory with the same strides; None without memory."""
    from accel_ckpt.format.tensors import local_tensor, placement_key

    local = local_tensor(tensor)
    if local.device.type == "meta" or local.is_nested or local.layout != torch.strided or local.numel() == 0:
        return None
    reading = (local.dtype, tuple(local.shape), local.stride(), local.is_conj(), local.is_neg())
    memory = (local.device, local.data_ptr(), *reading)
    return (*memory, tuple(tensor.shape), placement_key(tensor))
