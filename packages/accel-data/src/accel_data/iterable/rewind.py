"""Rewinding of a dataset that keeps its own position, once a loop has left a pass whose lookahead had read past it.

A dataset without workers is read in the process of its loop, and its ``__iter__`` may go on where the last pass left
it. The batch that the loader had read ahead would then be in no pass.
"""

import copy
import pickle
import warnings
from collections import deque
from itertools import islice
from typing import Any

from accel_data.iterable.worker import Snapshot
from accel_data.map.global_rng import unchanged_globals
from accel_data.order.iterators import continuing

_END = object()


def rewind(dataset: Any, snapshot: Snapshot, stop: int, ahead: int) -> bool:
    """Moves ``dataset`` back by ``ahead`` elements, to element ``stop`` of its stream, if it goes on where it stands.

    Returns whether it does; a dataset that begins again in ``__iter__`` is left as it is. ``snapshot``: its state at or
    before ``stop``. If its own methods fail, a warning says how many elements the next pass may lack.
    """
    try:
        with unchanged_globals():
            if not _goes_on(dataset, snapshot):
                return False
            dataset.load_state_dict(copy.deepcopy(snapshot.state))
            deque(islice(continuing(iter(dataset)), stop - snapshot.at), maxlen=0)
    except Exception as error:
        warnings.warn(
            f"a pass was left after {stop} elements, and {ahead} more had been read ahead: {type(dataset).__name__} "
            f"could not be moved back to its saved state ({type(error).__name__}: {error}). If it goes on where it "
            f"stands, the next pass lacks these {ahead} elements",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def own_attributes(dataset: Any) -> Any:
    """Returns a shallow copy with attributes of its own; copies of Hugging Face ``datasets`` share their dict."""
    other = copy.copy(dataset)
    if hasattr(dataset, "__dict__"):
        other.__dict__ = dict(vars(dataset))
    return other


def _goes_on(dataset: Any, snapshot: Snapshot) -> bool:
    """Whether ``__iter__`` goes on where the dataset stands: it then reads what it reads after loading that state.

    Read by copies. False for Hugging Face ``datasets``, which begin again, and for a state that does not change as
    elements are read, which is no position.
    """
    if hasattr(dataset, "_ex_iterable"):
        return False
    now = copy.deepcopy(dataset.state_dict())
    if _alike(now, snapshot.state):
        return False
    as_it_is, loaded = own_attributes(dataset), own_attributes(dataset)
    found = _after_one(as_it_is)
    loaded.load_state_dict(now)
    return _alike(found, _after_one(loaded))


def _after_one(dataset: Any) -> tuple[bool, Any]:
    """Whether there is a next element, and the dataset's state behind it."""
    is_over = next(continuing(iter(dataset)), _END) is _END
    return is_over, copy.deepcopy(dataset.state_dict())


def _alike(one: object, other: object) -> bool:
    return pickle.dumps(one) == pickle.dumps(other)
