"""Registry of cost models: the entry-point group ``accel.cost_models``, by name of the backend."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points

from accel_planner.cost.model import CostModel
from accel_state.entry_points import find_entry_point
from accel_state.errors import BackendError, did_you_mean
from accel_state.logging import get_logger

_log = get_logger(__name__)
GROUP = "accel.cost_models"
# In the order in which candidates of equal cost are preferred. The entries of this distribution say the same.
_OWN = {
    "single": "accel_planner.cost.replicated:SingleCost",
    "ddp": "accel_planner.cost.replicated:DDPCost",
    "fsdp": "accel_planner.cost.fsdp:FSDPCost",
    "deepspeed": "accel_planner.cost.zero:ZeroCost",
    "xla": "accel_planner.cost.xla:XLACost",
}


def cost_models() -> dict[str, CostModel]:
    """Returns the cost models of all backends that have one: those of this package first, others by name.

    One that cannot be loaded is left out with a warning, so that the strategies of other backends can be planned.
    """
    models: dict[str, CostModel] = {}
    for point in _points():
        try:
            models[point.name] = load_cost_model(point.name)
        except BackendError as error:
            _log.warning("%s; its strategies are not considered", error)
    return models


def load_cost_model(backend: str) -> CostModel:
    """Returns the cost model of one backend.

    Raises:
        BackendError: there is none, and the message names the backends that have one; two packages have one; it cannot
            be imported, or is none.
    """
    if backend in _OWN:
        return _load(_own(backend))
    point = find_entry_point(GROUP, backend, BackendError)
    if point is None:
        known = [point.name for point in _points()]
        hint = did_you_mean(backend, known)
        raise BackendError(f"no cost model for the backend {backend!r}; there are some for {', '.join(known)}{hint}")
    return _load(point)


def _points() -> Iterator[EntryPoint]:
    yield from map(_own, _OWN)
    others = {point.name: point for point in entry_points(group=GROUP) if point.name not in _OWN}
    yield from (others[name] for name in sorted(others))


def _own(backend: str) -> EntryPoint:
    return EntryPoint(backend, _OWN[backend], GROUP)


def _load(point: EntryPoint) -> CostModel:
    try:
        kind = point.load()
    except (ImportError, AttributeError) as error:
        raise BackendError(f"cost model {point.name!r} ({point.value}) cannot be imported: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, CostModel)):
        raise BackendError(f"cost model {point.name!r} ({point.value}) is {kind!r}; expected a subclass of CostModel")
    try:
        return kind()
    except TypeError as error:  # abstract methods are missing
        raise BackendError(f"cost model {point.name!r} ({point.value}) cannot be used: {error}") from error
