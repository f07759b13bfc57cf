"""Reductions of logged values over all ranks."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, Literal, get_args

from accel_observe.tracking.values import flatten
from accel_state.errors import ConfigError
from accel_state.session import Session
from accel_state.watchdog.decorator import recorded

Reduction = Literal["mean", "sum", "max", "min", "last"]
"""Reduction of all ranks' values: mean, sum, maximum or minimum; ``last`` is the main process's own value."""

Reductions = Reduction | Mapping[str, Reduction]
"""One reduction for all names, or by name or pattern (``"loss"``, ``"eval/*"``): first match, default ``last``."""


def check_reductions(reductions: Reductions) -> None:
    """Refuses words that are not reductions.

    Raises:
        ConfigError: naming the word and the known reductions.
    """
    words = list(reductions.values()) if isinstance(reductions, Mapping) else [reductions]
    for word in words:
        if word not in get_args(Reduction):
            raise ConfigError(f"there is no reduction {word!r}; there are {', '.join(get_args(Reduction))}")


def reduction_of(name: str, reductions: Reductions) -> Reduction:
    """Reduction of the values of ``name``."""
    if isinstance(reductions, str):
        return reductions
    found = reductions.get(name)
    if found is not None:
        return found
    return next((word for pattern, word in reductions.items() if fnmatchcase(name, pattern)), "last")


def reduced(values: Mapping[str, Any], reductions: Reductions, session: Session) -> dict[str, Any]:
    """Reduces every number of ``values`` over ranks, in one all-reduce, or two if some are maxima or minima.

    All ranks give the same names, in any order; names of nested values are ``outer/inner``. A tensor or list of several
    elements counts as its mean. Values that are no real numbers (texts) stay this rank's.

    Collective: every rank of the group must call this.
    """
    flat = dict(flatten(values))
    result = _reduced(flat, reductions, session)
    return {name: _nested(name, value, result) for name, value in values.items()}


def _nested(name: str, value: Any, flat: Mapping[str, Any]) -> Any:
    """Returns the reduced values in the nesting of ``value``."""
    if not isinstance(value, Mapping):
        return flat[name]
    return {inner: _nested(f"{name}/{inner}", one, flat) for inner, one in value.items()}


def _reduced(values: Mapping[str, Any], reductions: Reductions, session: Session) -> dict[str, Any]:
    import torch

    kinds = {name: reduction_of(name, reductions) for name in sorted(values)}  # in one order on all ranks
    chosen = [name for name, kind in kinds.items() if kind != "last" and _is_reduced(values[name])]
    if not chosen or session.world_size == 1:
        return dict(values)
    device = session.device.own_numbers
    wide = torch.float32 if device.type == "mps" else torch.float64
    result = dict(values)
    for family, over_ranks in ((("mean", "sum"), _sums), (("max", "min"), _maxima)):
        names = [name for name in chosen if kinds[name] in family]
        if not names:
            continue
        sign = {name: -1.0 if kinds[name] == "min" else 1.0 for name in names}
        own = torch.stack([_scalar(values[name], wide, device) * sign[name] for name in names])
        total = over_ranks(names, own, session)
        for position, name in enumerate(names):
            one = total[position] * sign[name]
            result[name] = one / session.world_size if kinds[name] == "mean" else one
    return result


def _sums(names: list[str], own: Any, session: Session) -> Any:
    """Returns the sums over ranks."""
    return _over_ranks(names, own, "sum", session)


def _maxima(names: list[str], own: Any, session: Session) -> Any:
    """Returns the maxima over ranks, nan where a rank has nan; of nan and a number, gloo and NCCL return the number."""
    import torch

    is_nan = own.isnan()
    both = _over_ranks(names, torch.cat([own.masked_fill(is_nan, -torch.inf), is_nan.to(own.dtype)]), "max", session)
    found, any_nan = both.chunk(2)
    return found.masked_fill(any_nan > 0, torch.nan)


@recorded("log", lambda names, *_: ", ".join(names))
def _over_ranks(names: list[str], own: Any, operation: str, session: Session) -> Any:
    """Reduces the values of these names; the watchdog compares the names."""
    return session.reduce(own, reduction=operation)


def _is_reduced(value: Any) -> bool:
    """Whether a value is a number, or numbers, of this rank alone."""
    import torch

    from accel_state.device.device import is_full

    if isinstance(value, torch.Tensor):
        return not (is_full(value) or value.is_complex())
    if isinstance(value, list | tuple):
        return all(isinstance(item, Real) for item in value)
    kind = getattr(getattr(value, "dtype", None), "kind", None)  # of an array, or a scalar of numpy
    return isinstance(value, Real) if kind is None else kind in "biuf"


def _scalar(value: Any, dtype: Any, device: Any) -> Any:
    import torch

    if isinstance(value, Real):  # filled by the device, because a copy from the host would wait for it
        return torch.full((), float(value), dtype=dtype, device=device)
    tensor = torch.as_tensor(value).detach().to(device=device, dtype=dtype)
    return tensor.mean() if tensor.numel() != 1 else tensor.reshape(())
