"""Saved positions and a dataset that has changed since: refusal, or adaptation with ``allow_changed_data``."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from accel_data.order.cursor import Cursor
from accel_data.order.orders import Order, Replacement, Sequential, Shuffled
from accel_data.order.special_orders import SeededPermutation
from accel_data.source import Json
from accel_state.errors import DataStateError

ORDER_KEY = "order"
LENGTH_KEY = "length"
FINGERPRINT_KEY = "fingerprint"
BEGUN_KEY = "begun"
"""True in the record of an epoch that is finished over its original samples, although the dataset has grown."""


@final
@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """Current facts of a loader's dataset.

    Attributes:
        length: number of samples, or None.
        fingerprint: the dataset's own identification of its content, or None.
        order: the order that is computed over it; None if a sampler of the user is iterated.
        description: description of the order, as in the record.
    """

    length: int | None
    fingerprint: str | None
    order: Order | None
    description: Mapping[str, Json]

    def difference(self, record: Mapping[str, Json]) -> str | None:
        """Describes how the dataset of ``record`` differs, as the end of a sentence; None if it does not."""
        length, mark = record.get(LENGTH_KEY), record.get(FINGERPRINT_KEY)
        if length is not None and self.length is not None and length != self.length:
            return f"of {length} samples, this one has {self.length}"
        if mark is not None and self.fingerprint is not None and mark != self.fingerprint:
            return f"of fingerprint {mark!r}, this one has {self.fingerprint!r}"
        return None


_TOLD = "the loader's state was saved with a dataset"


def check_dataset(facts: DatasetFacts, record: Mapping[str, Json], cursor: Cursor, *, warns: bool) -> None:
    """Raises ``DataStateError`` for a position inside an epoch of other data; warns at the start of an epoch."""
    difference = facts.difference(record)
    if difference is None:
        return
    if cursor.samples:
        raise DataStateError(
            f"{_TOLD} {difference}: it shrank, grew or is another one, and position {cursor.samples} means another "
            f"sample in it. Use the dataset of the saved run, begin epoch {cursor.epoch + 1} with set_epoch, or load "
            "with allow_changed_data=True"
        )
    if warns:
        warnings.warn(f"{_TOLD} {difference}; epoch {cursor.epoch} begins with this one", RuntimeWarning, stacklevel=3)


def adapted(
    facts: DatasetFacts, record: Mapping[str, Json], cursor: Cursor, *, warns: bool
) -> tuple[Mapping[str, Json], Cursor]:
    """Returns the record and position with which a run continues over a dataset that has changed inside an epoch.

    - The dataset has grown, and the order of the epoch can be computed from the record: the epoch is finished over its
      original samples, and the new samples are read from the next epoch on.
    - It has shrunk and is read sequentially: the position stays, and the epoch ends at the current end of the dataset.
    - It has another fingerprint and the same length: the position stays.
    - Otherwise the epoch starts again, because it is unknown which of its samples were delivered.

    A warning reports the change in numbers. A record of another kind of sampler is returned unchanged and refused
    later.
    """
    difference, saved = facts.difference(record), record.get(ORDER_KEY, facts.description)
    if difference is None or not cursor.samples or saved.get("kind") != facts.description.get("kind"):
        return record, cursor
    length, before, done = facts.length, record.get(LENGTH_KEY), cursor.samples
    here = {**record, LENGTH_KEY: length, FINGERPRINT_KEY: facts.fingerprint, ORDER_KEY: dict(facts.description)}
    epoch = f"epoch {cursor.epoch}"
    if length == before and saved == facts.description:
        told = f"position {done} of {epoch} is kept"
    elif length is not None and before is not None and length > before and order_begun(facts.order, saved) is not None:
        left = saved["size"] - done
        told = (
            f"{epoch} is finished over the {before} that it began with, of which {left} are left to deliver; the "
            f"{length - before} new ones come from epoch {cursor.epoch + 1} on"
        )
        here |= {ORDER_KEY: saved, BEGUN_KEY: True}
    elif type(facts.order) is Sequential and done <= len(facts.order):
        told = f"position {done} of {epoch} is kept, and {len(facts.order) - done} are left to deliver"
    else:
        told = f"{epoch} begins anew: the {done} that were delivered of it may come again"
        cursor = Cursor(cursor.epoch)
    if warns:
        warnings.warn(f"{_TOLD} {difference}; {told}", RuntimeWarning, stacklevel=4)
    return here, cursor


def order_begun(order: Order | None, saved: Mapping[str, Any]) -> Order | None:
    """Rebuilds the order that ``saved`` describes, of the class of ``order``; None if the description is incomplete."""
    make = _ORDERS.get(type(order))
    return None if make is None else make(saved)


_ORDERS: dict[type, Callable[[Mapping[str, Any]], Order]] = {
    Sequential: lambda saved: Sequential(saved["size"]),
    Shuffled: lambda saved: Shuffled(saved["source"], num_samples=saved["size"]),
    Replacement: lambda saved: Replacement(saved["source"], num_samples=saved["size"]),
    SeededPermutation: lambda saved: SeededPermutation(saved["source"], num_samples=saved["size"]),
}
