"""Memory that an optimizer keeps and temporarily uses in a step, measured by stepping on tiny parameters."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import prod
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_planner.profile.memory_tracker import StorageWatch
from accel_planner.profile.profile import ParameterFact
from accel_state.errors import ConfigError, did_you_mean

Factory = Callable[[Iterable[nn.Parameter]], Optimizer]

# Sizes are distinct primes, so the size of a state's dimension identifies the parameter's dimension that it follows.
_PRIMES = (11, 13, 17, 19, 23, 29)
_ALIASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {"momentum": ("SGD", {"momentum": 0.9})}


@final
@dataclass(frozen=True, slots=True)
class StateShape:
    """Shape of one tensor of an optimizer's state, relative to its parameter.

    Attributes:
        dims: each of its dimensions, as the parameter's dimensions whose sizes are multiplied, or a constant size.
        itemsize: bytes of an element; None: that of the parameter.
        like: the state has the parameter's shape, so it is sharded like the parameter.
    """

    dims: tuple[tuple[int, ...] | int, ...]
    itemsize: int | None
    like: bool

    def numel(self, shape: tuple[int, ...]) -> int:
        """Number of elements for a parameter of that shape."""
        return prod(prod(shape[at] for at in dim) if isinstance(dim, tuple) else dim for dim in self.dims)


@final
@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """Memory of an optimizer.

    Attributes:
        name: name of its class.
        states: state tensors of a parameter, keyed by the parameter's number of dimensions and itemsize.
        scratch: temporary memory of a step, as a multiple of the parameter's bytes, keyed likewise.
        carried: part of ``scratch`` that is still allocated when the next parameter is stepped, keyed likewise.
        together: scratch is allocated for all parameters at once (foreach) instead of one after the other.
    """

    name: str
    states: Mapping[tuple[int, int], tuple[StateShape, ...]]
    scratch: Mapping[tuple[int, int], float]
    carried: Mapping[tuple[int, int], float]
    together: bool

    def state_bytes(self, parameter: ParameterFact, shards: int) -> int:
        """Bytes of a parameter's state on the rank with the most, sharded over ``shards`` ranks."""
        key = (len(parameter.shape), parameter.dtype.itemsize)
        total = 0
        for state in self.states[key]:
            numel = parameter.shard_numel(shards) if state.like else state.numel(parameter.shape)
            total += numel * (state.itemsize or parameter.dtype.itemsize)
        return total

    def scratch_bytes(self, parameters: Iterable[tuple[ParameterFact, int]]) -> int:
        """Temporary bytes of a step, given the number of updated elements of each parameter."""
        most = before = total = 0.0
        for parameter, numel in parameters:
            key, size = (len(parameter.shape), parameter.dtype.itemsize), numel * parameter.dtype.itemsize
            most = max(most, before + size * self.scratch[key])
            before = size * self.carried[key]
            total += size * self.scratch[key]
        return round(total if self.together else most)


def optimizer_facts(
    kind: "str | Factory | Optimizer", parameters: Iterable[ParameterFact], *, foreach: bool = False
) -> OptimizerFacts:
    """Measures the memory that an optimizer keeps and temporarily uses for parameters like these.

    Args:
        kind: a name ("adamw", any class of ``torch.optim``, "momentum", or "module:Class"), a function of parameters,
            or an optimizer, whose class and options are used to make another one.
        parameters: only their numbers of dimensions and dtypes matter.
        foreach: torch uses its foreach implementations on this device.

    Raises:
        ConfigError: there is no such optimizer, or it needs more than parameters, or fails to step on tiny ones.
    """
    name, factory = _factory(kind)
    if foreach:
        factory = _over_lists(factory)
    kinds = sorted({(len(p.shape), p.dtype) for p in parameters if p.trainable}, key=str)
    states: dict[tuple[int, int], tuple[StateShape, ...]] = {}
    scratch: dict[tuple[int, int], float] = {}
    carried: dict[tuple[int, int], float] = {}
    together = foreach
    for dims, dtype in kinds:
        if dims > len(_PRIMES):
            raise ConfigError(f"a parameter has {dims} dimensions; the planner knows up to {len(_PRIMES)}")
        shape = _PRIMES[:dims]
        try:
            found, one = _step(factory, [shape], dtype)
            _, two = _step(factory, [shape] * 2, dtype)
            _, four = _step(factory, [shape] * 4, dtype)
        except Exception as error:
            raise ConfigError(
                f"optimizer {name} cannot step on a small {dims}-dimensional {dtype} parameter to see what it keeps "
                f"({type(error).__name__}: {error}); give a function of parameters that makes one that can"
            ) from error
        key = (dims, dtype.itemsize)
        states[key] = tuple(_shape_of(tensor, shape, dtype) for tensor in found)
        size = max(1, prod(shape)) * dtype.itemsize
        scratch[key], carried[key] = one / size, (two - one) / size
        together = together or four > 1.5 * two > 0
    return OptimizerFacts(name, states, scratch, carried, together)


def _factory(kind: "str | Factory | Optimizer") -> tuple[str, Factory]:
    if isinstance(kind, Optimizer):
        return type(kind).__name__, _same_options(kind)
    if not isinstance(kind, str):
        return getattr(kind, "__name__", type(kind).__name__), kind
    if ":" in kind:
        module, _, attribute = kind.partition(":")
        try:
            return attribute, getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"optimizer {kind!r} cannot be imported: {error}") from error
    known = {
        name.lower(): getattr(torch.optim, name)
        for name in vars(torch.optim)
        if isinstance(getattr(torch.optim, name), type) and issubclass(getattr(torch.optim, name), Optimizer)
    }
    known.pop("optimizer", None)
    text = kind.strip().lower()
    if text in _ALIASES:
        base, options = _ALIASES[text]
        return text, partial(known[base.lower()], lr=0.1, **options)
    if text not in known:
        names = [*known, *_ALIASES]
        hint = did_you_mean(text, names)
        raise ConfigError(f"no optimizer {kind!r}; known: {', '.join(sorted(names))}, or module:Class{hint}")
    return text, partial(known[text], lr=0.1) if text == "sgd" else known[text]


def _same_options(optimizer: Optimizer) -> Factory:
    """Returns a factory of optimizers of the same class and defaults."""
    import inspect

    taken = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in taken}
    return partial(type(optimizer), **options)


def _over_lists(factory: Factory) -> Factory:
    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = factory(parameters)
        for group in optimizer.param_groups:
            if group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True
        return optimizer

    return make


def _step(factory: Factory, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> tuple[list[torch.Tensor], int]:
    """Takes two steps on zeros; returns the first parameter's state, and the temporary bytes of the second step."""
    with torch.random.fork_rng(devices=[]):
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer = factory(parameters)
        optimizer.step()
        state = [value for value in optimizer.state.get(parameters[0], {}).values() if isinstance(value, torch.Tensor)]
        held = [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
        with StorageWatch([*parameters, *(p.grad for p in parameters if p.grad is not None), *held]) as watch:
            optimizer.step()
    return state, watch.peak


def _shape_of(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> StateShape:
    """Derives a state's shape from the parameter's shape, whose sizes are all different."""
    itemsize = None if tensor.dtype == dtype else tensor.dtype.itemsize
    if tuple(tensor.shape) == shape and shape:
        return StateShape(tuple((at,) for at in range(len(shape))), itemsize, like=True)
    dims = tuple(_dim_of(size, shape) for size in tensor.shape)
    return StateShape(dims, itemsize, like=False)


def _dim_of(size: int, shape: tuple[int, ...]) -> tuple[int, ...] | int:
    if size in shape:
        return (shape.index(size),)
    factors = tuple(at for at, prime in enumerate(shape) if size % prime == 0)
    return factors if factors and prod(shape[at] for at in factors) == size else size
