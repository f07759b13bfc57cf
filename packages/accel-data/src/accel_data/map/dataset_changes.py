"""A saved position and a dataset that has changed since: the refusal, and what ``allow_changed_data`` makes of it."""

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
"""True in the record of an epoch that is finished over the samples it began with, though the dataset has more."""


@final
@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """What a loader knows of its dataset now.

    Attributes:
        length: samples, or None.
        fingerprint: what the dataset says identifies its content, or None.
        order: the order that is computed over it; None where a sampler of the user's is walked.
        description: of the order, as the record has it.
    """

    length: int | None
    fingerprint: str | None
    order: Order | None
    description: Mapping[str, Json]

    def difference(self, record: Mapping[str, Json]) -> str | None:
        """How the dataset of ``record`` differs from this one, as the end of a sentence; None: it does not."""
        length, mark = record.get(LENGTH_KEY), record.get(FINGERPRINT_KEY)
        if length is not None and self.length is not None and length != self.length:
            return f"of {length} samples, this one has {self.length}"
        if mark is not None and self.fingerprint is not None and mark != self.fingerprint:
            return f"of fingerprint {mark!r}, this one has {self.fingerprint!r}"
        return None


_TOLD = "the loader's state was saved with a dataset"


def check_dataset(facts: DatasetFacts, record: Mapping[str, Json], cursor: Cursor, *, warns: bool) -> None:
    """Refuses a position inside an epoch of other data with ``DataStateError``; warns of an epoch that begins so."""
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
    """The record and position with which a saved run goes on over a dataset that has changed inside an epoch.

    - It has grown, and the order of the epoch can be computed from the record: the epoch is finished over the samples
      that it began with, and the new ones come from the next epoch on.
    - It has shrunk, and is read in sequence: the position stays, and the epoch ends where the dataset ends now.
    - It has another fingerprint and the same length: the position stays.
    - Otherwise: the epoch begins anew, because which of its samples were delivered cannot be known.

    What is done is warned of in numbers. A record of a sampler of another kind is returned as it is, to be refused.
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
    """The order that ``saved`` describes, of the kind of ``order``; None where the description is not all of it."""
    make = _ORDERS.get(type(order))
    return None if make is None else make(saved)


_ORDERS: dict[type, Callable[[Mapping[str, Any]], Order]] = {
    Sequential: lambda saved: Sequential(saved["size"]),
    Shuffled: lambda saved: Shuffled(saved["source"], num_samples=saved["size"]),
    Replacement: lambda saved: Replacement(saved["source"], num_samples=saved["size"]),
    SeededPermutation: lambda saved: SeededPermutation(saved["source"], num_samples=saved["size"]),
}
