"""Structure of nested values: containers and their leaves.

A *container* is a dict or another ``Mapping``, a list, a tuple, a namedtuple, or an instance of a dataclass; subclasses
are containers too and are rebuilt with their own type. Every other object is a *leaf*, including ``None``, strings,
sets, modules and dataclass types.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeGuard, final

import torch

_SEQUENCES = (list, tuple)


def is_torch_tensor(tensor: object) -> TypeGuard[torch.Tensor]:
    """Whether ``tensor`` is a tensor, including parameters and other subclasses."""
    return isinstance(tensor, torch.Tensor)


def is_namedtuple(data: object) -> bool:
    """Whether ``data`` is an instance of a ``collections.namedtuple`` or ``typing.NamedTuple`` class, or a subclass."""
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def is_dataclass_instance(data: object) -> bool:
    """Whether ``data`` is an instance of a dataclass; dataclass types and modules that are dataclasses are not."""
    return is_dataclass(data) and not isinstance(data, (type, torch.nn.Module))


def is_container(data: object) -> bool:
    """Whether the functions of this package search ``data`` for leaves."""
    return isinstance(data, (list, tuple, Mapping)) or is_dataclass_instance(data)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Builds a sequence of ``obj``'s type from the items of ``generator``; a namedtuple takes them by position."""
    if type(obj) is list:
        return list(generator)
    if type(obj) is tuple:
        return tuple(generator)
    if is_namedtuple(obj):
        return type(obj)(*generator)
    return type(obj)(generator)


def rebuild_mapping(data: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Builds a mapping of ``data``'s type with ``values``, which has the same keys.

    A ``dict`` with attributes that are not items, and a type that cannot be constructed from a dict alone, are copied
    and their items are set, which keeps the attributes (a ``defaultdict`` keeps its factory).
    """
    cls = type(data)
    if cls is dict:
        return values
    if cls is OrderedDict:
        return OrderedDict(values)
    if isinstance(data, defaultdict) or _has_attributes(data):
        return _copy_with_items(data, values)
    try:
        built = cls(**values) if is_dataclass_instance(data) else cls(values)  # type: ignore[call-arg]
    except TypeError:
        return _copy_with_items(data, values)
    # a constructor may understand something else by its first argument
    return built if built.keys() == values.keys() else _copy_with_items(data, values)


def _has_attributes(data: Mapping[Any, Any]) -> bool:
    """Whether a subclass of dict has attributes beside its items; items may be attributes too."""
    own = getattr(data, "__dict__", None)
    if not own or not isinstance(data, dict) or is_dataclass_instance(data):
        return False
    return not own.keys() <= data.keys()


def _copy_with_items(data: Any, values: dict[Any, Any]) -> Any:
    clone = copy.copy(data)
    for key, value in values.items():
        clone[key] = value
    return clone


def rebuild_dataclass(data: Any, values: Iterable[Any]) -> Any:
    """Copies a dataclass instance with other field values, in the order of its fields.

    ``__init__`` and ``__post_init__`` do not run again, because they may compute fields, register the instance or
    raise.
    """
    named = dict(zip(field_names(data), values, strict=True))
    if torch.compiler.is_compiling():  # Dynamo traces the constructor, but not a copy of a frozen instance
        return type(data)(**named)
    clone = copy.copy(data)
    for name, value in named.items():
        object.__setattr__(clone, name, value)
    return clone


def field_names(data: Any) -> tuple[str, ...]:
    """Returns the names of the fields that are set on a dataclass instance, in order of declaration."""
    return tuple(one.name for one in fields(data) if hasattr(data, one.name))


def rebuild(data: Any, keys: Iterable[Any], values: Iterable[Any]) -> Any:
    """Builds a container of ``data``'s type from ``values``; ``keys`` are used if the container is a mapping."""
    if isinstance(data, Mapping):
        return rebuild_mapping(data, dict(zip(keys, values, strict=True)))
    if isinstance(data, _SEQUENCES):
        return honor_type(data, values)
    return rebuild_dataclass(data, values)


def children(data: Any) -> Iterable[tuple[Any, Any]] | None:
    """Returns ``(key, value)`` of each child of a container, in the container's order; None for a leaf."""
    if isinstance(data, Mapping):
        return data.items()
    if isinstance(data, _SEQUENCES):
        return enumerate(data)
    if is_dataclass_instance(data):
        return [(name, getattr(data, name)) for name in field_names(data)]
    return None


def map_leaves(fn: Callable[[Any], Any], data: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Applies ``fn`` to each leaf, in new containers of the same types.

    ``is_leaf`` may return True for a container to treat it as a leaf.
    """
    if isinstance(data, torch.Tensor) or (is_leaf is not None and is_leaf(data)):
        return fn(data)
    parts = children(data)
    if parts is None:
        return fn(data)
    keys, values = [], []
    for key, value in parts:
        keys.append(key)
        values.append(map_leaves(fn, value, is_leaf=is_leaf))
    return rebuild(data, keys, values)


@final
@dataclass(frozen=True, slots=True)
class Structure:
    """Containers of a nested value without the leaves.

    Two structures are equal if their containers have the same types, keys and nesting; the insertion order of a mapping
    does not matter, because ``flatten`` visits keys in sorted order. ``num_leaves`` is the number of leaves that
    ``unflatten`` needs. ``like`` is the original container, which keeps its leaves alive, so a structure should not be
    kept for long.
    """

    kind: type | None
    keys: tuple[Any, ...] = ()
    parts: tuple["Structure", ...] = ()
    num_leaves: int = 1
    like: Any = field(default=None, compare=False, repr=False)


LEAF = Structure(None)


def flatten(data: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Structure]:
    """Returns the leaves of ``data`` in a canonical order, and the structure for ``unflatten``.

    Mappings are visited in order of their sorted keys (if the keys can be sorted), so that ranks which filled a dict in
    different orders have the same order of leaves.
    """
    leaves: list[Any] = []
    return leaves, _flatten(data, leaves, is_leaf)


def _flatten(data: Any, leaves: list[Any], is_leaf: Callable[[Any], bool] | None) -> Structure:
    if isinstance(data, torch.Tensor) or (is_leaf is not None and is_leaf(data)):
        leaves.append(data)
        return LEAF
    before = len(leaves)
    keys: tuple[Any, ...] = ()
    values: Iterable[Any]
    if isinstance(data, Mapping):
        keys = canonical_order(data)
        values = [data[key] for key in keys]
    elif isinstance(data, _SEQUENCES):
        values = data
    elif is_dataclass_instance(data):
        keys = field_names(data)
        values = [getattr(data, name) for name in keys]
    else:
        leaves.append(data)
        return LEAF
    parts = tuple([_flatten(value, leaves, is_leaf) for value in values])
    return Structure(type(data), keys, parts, len(leaves) - before, data)


def canonical_order(data: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Returns the sorted keys of a mapping, or the keys in insertion order if they cannot be compared."""
    try:
        return tuple(sorted(data))
    except TypeError:
        return tuple(data)


def unflatten(leaves: Iterable[Any], structure: Structure) -> Any:
    """Rebuilds a nested value from its structure and leaves: the inverse of ``flatten``.

    Raises ValueError if the number of leaves is not that of the structure.
    """
    given = list(leaves)
    if len(given) != structure.num_leaves:
        raise ValueError(f"{len(given)} leaves given for a structure with {structure.num_leaves} places")
    return _unflatten(iter(given), structure)


def _unflatten(leaves: Iterable[Any], structure: Structure) -> Any:
    if structure.kind is None:
        return next(leaves)  # type: ignore[call-overload]
    values = [_unflatten(leaves, part) for part in structure.parts]
    like = structure.like
    if structure.kind is dict:
        built = dict(zip(structure.keys, values, strict=True))
        return built if structure.keys == tuple(like) else {key: built[key] for key in like}
    if isinstance(like, Mapping):
        built = dict(zip(structure.keys, values, strict=True))
        return rebuild_mapping(like, {key: built[key] for key in like})
    return rebuild(like, structure.keys, values)


def leaves_of(data: Any) -> list[Any]:
    """Returns the leaves of ``data`` in ``flatten``'s order, without the structure."""
    leaves: list[Any] = []
    _collect(data, leaves)
    return leaves


def _collect(data: Any, leaves: list[Any]) -> None:
    values: Iterable[Any]
    if type(data) is dict or isinstance(data, Mapping):
        values = [data[key] for key in canonical_order(data)]
    elif isinstance(data, _SEQUENCES):
        values = data
    elif is_dataclass_instance(data):
        values = [getattr(data, name) for name in field_names(data)]
    else:
        leaves.append(data)
        return
    for value in values:
        if isinstance(value, torch.Tensor):
            leaves.append(value)
        else:
            _collect(value, leaves)


def refill(data: Any, leaves: Iterator[Any]) -> Any:
    """Rebuilds ``data`` in new containers; the items of ``leaves`` replace its leaves in ``flatten``'s order."""
    if isinstance(data, torch.Tensor):
        return next(leaves)
    if type(data) is dict or isinstance(data, Mapping):
        keys = canonical_order(data)
        found = {
            key: next(leaves) if isinstance(data[key], torch.Tensor) else refill(data[key], leaves) for key in keys
        }
        return rebuild_mapping(data, found if keys == tuple(data) else {key: found[key] for key in data})
    if isinstance(data, _SEQUENCES):
        return honor_type(data, [refill(value, leaves) for value in data])
    if is_dataclass_instance(data):
        return rebuild_dataclass(data, [refill(getattr(data, name), leaves) for name in field_names(data)])
    return next(leaves)


def walk(data: Any, path: str = "") -> Generator[tuple[str, Any], None, None]:
    """Yields each leaf with its path as an index expression (``['labels'][0].mask``), in ``flatten``'s order."""
    if isinstance(data, Mapping):
        for key in canonical_order(data):
            yield from walk(data[key], f"{path}[{key!r}]")
    elif isinstance(data, _SEQUENCES):
        names = data._fields if is_namedtuple(data) else None  # type: ignore[union-attr]
        for index, value in enumerate(data):
            yield from walk(value, f"{path}.{names[index]}" if names else f"{path}[{index}]")
    elif is_dataclass_instance(data):
        for name in field_names(data):
            yield from walk(getattr(data, name), f"{path}.{name}")
    else:
        yield path, data


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Replaces each leaf that ``test_type`` accepts by ``func(leaf, *args, **kwargs)``.

    Other leaves stay as they are, or raise TypeError with ``error_on_other_type``.
    """

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise unsupported_leaf(leaf, _name(func), _name(test_type))
        return leaf

    return map_leaves(apply, data, is_leaf=test_type)


def unsupported_leaf(leaf: object, operation: str, predicate: str = "is_torch_tensor") -> TypeError:
    """Returns the TypeError for a leaf that an operation on tensors does not support."""
    return TypeError(
        f"Unsupported types ({type(leaf)}) passed to `{operation}`. Only nested list/tuple/dicts of objects that are "
        f"valid for `{predicate}` should be passed."
    )


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__name__", fn))
