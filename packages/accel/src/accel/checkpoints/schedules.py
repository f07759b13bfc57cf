"""State of a schedule whose optimizer has its groups of parameters in other places than when the state was saved.

An optimizer's groups are matched by their parameters; a schedule of torch has lists with an entry for each group, by
its number.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from accel_backends.ops.state_dicts import GROUPS
from accel_backends.roles.saved_state_check import matched_groups

# Attributes of torch's schedules with an entry for each group.
_OF_GROUPS = frozenset(["_last_lr", "base_lrs", "base_momentums", "lr_lambdas", "max_lrs", "max_momentums", "min_lrs"])


def saved_places(own: Mapping[str, Any], saved: Mapping[str, Any]) -> list[int | None] | None:
    """The number of the saved group for each group of an optimizer, None for those that have new parameters only.

    None: all groups have the numbers that they had.
    """
    partners = {id(group): there for group, there in matched_groups(own, saved) or ()}
    numbers = {id(group): number for number, group in enumerate(saved[GROUPS])}
    places = [numbers.get(id(partners.get(id(group)))) for group in own[GROUPS]]
    return None if places == list(range(len(numbers))) else places


def regrouped(own: Any, saved: Any, places: Sequence[int | None]) -> Any:
    """Returns a schedule's saved state with the entries of each group at its number now; new groups keep their own."""
    if isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own):  # schedules within a schedule
        return [regrouped(one, value, places) for one, value in zip(own, saved, strict=True)]
    if not (isinstance(saved, Mapping) and isinstance(own, Mapping)):
        return saved
    return {
        key: _moved(own.get(key), value, places) if key in _OF_GROUPS else regrouped(own.get(key), value, places)
        for key, value in saved.items()
    }


def _moved(own: Any, saved: Any, places: Sequence[int | None]) -> Any:
    if not (isinstance(own, list) and isinstance(saved, list)):
        return saved
    if len(own) != len(places) or len(saved) <= max((place for place in places if place is not None), default=-1):
        return saved
    return [own[number] if place is None else saved[place] for number, place in enumerate(places)]
