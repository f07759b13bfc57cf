"""A check that a checkpoint belongs to this run, by names, shapes and options, before a tensor is read."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from accel_backends.states import ASIDE, GROUPS, PARAMS, STATE
from accel_state.errors import CheckpointMismatchError


def check_model(
    name: str, own: Mapping[str, Any], aliases: Mapping[str, str], saved: Mapping[str, Any], *, strict: bool
) -> None:
    """Raises unless a model's saved state fits its own; ``aliases`` gives the name in ``own`` for each of a tied one.

    Raises:
        CheckpointMismatchError: what is missing or unknown (``strict``), or of another shape.
    """
    given = {aliases.get(key, key): value for key, value in saved.items()}
    missing = [key for key in own if key not in given]
    unknown = [key for key in given if key not in own]
    if strict and (missing or unknown):
        raise CheckpointMismatchError(_differences(name, missing, unknown, list(own)))
    misshapen = [
        f"{key} is {tuple(given[key].shape)} there and {tuple(value.shape)} here"
        for key, value in own.items()
        if key in given and _shapes_differ(value, given[key])
    ]
    if misshapen:
        raise CheckpointMismatchError(f"the checkpoint's {name} is that of another model: {_few(misshapen)}")


def check_optimizer(name: str, kind: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises unless an optimizer's saved state has the parameters, groups and options of its own.

    Raises:
        CheckpointMismatchError: says in what they differ.
    """
    here = {frozenset(group[PARAMS]): group for group in own[GROUPS]}
    there = {frozenset(group[PARAMS]): group for group in saved[GROUPS]}
    if set(here) != set(there) or len(own[GROUPS]) != len(saved[GROUPS]):
        ours, theirs = frozenset().union(*here), frozenset().union(*there, saved[STATE])
        if ours != theirs:
            missing, unknown = sorted(ours - theirs), sorted(theirs - ours)
            raise CheckpointMismatchError(_differences(name, missing, unknown, sorted(ours)))
        raise CheckpointMismatchError(
            f"the checkpoint's {name} is that of another {kind}: its groups of parameters differ, "
            f"{len(saved[GROUPS])} there and {len(own[GROUPS])} here"
        )
    for key, group in here.items():
        lacking = sorted(set(group) - set(there[key]) - ASIDE)
        foreign = sorted(set(there[key]) - set(group) - ASIDE)
        if lacking and foreign:
            raise CheckpointMismatchError(
                f"the checkpoint's {name} is that of another optimizer: {kind} has {_few(lacking)}, and the state has "
                f"{_few(foreign)} instead; build the optimizer that was saved"
            )


def check_keys(name: str, own: object, saved: object) -> None:
    """Raises if both are mappings and each has keys that the other has not, as two kinds of schedule have.

    Raises:
        CheckpointMismatchError: names them.
    """
    if not isinstance(own, Mapping) or not isinstance(saved, Mapping):
        return
    lacking, foreign = sorted(map(str, own.keys() - saved.keys())), sorted(map(str, saved.keys() - own.keys()))
    if lacking and foreign:
        raise CheckpointMismatchError(
            f"the checkpoint's {name} is that of another kind: here it has {_few(lacking)}, and there {_few(foreign)}; "
            "build the one that was saved"
        )


def _shapes_differ(own: Any, saved: Any) -> bool:
    if not isinstance(own, torch.Tensor) or is_lazy(own):
        return False
    return not isinstance(saved, torch.Tensor) or own.shape != saved.shape


def _differences(name: str, missing: Sequence[str], unknown: Sequence[str], known: Sequence[str]) -> str:
    parts = []
    if missing:
        parts.append(f"it lacks {_few(missing)}")
    if unknown:
        near = get_close_matches(unknown[0], known, n=1)
        parts.append(f"it holds unknown {_few(unknown)}{f' (nearest: {near[0]})' if near else ''}")
    return f"the checkpoint's {name} is that of another model: {'; '.join(parts)}"


def _few(items: Sequence[str], most: int = 5) -> str:
    more = len(items) - most
    return ", ".join(items[:most]) + (f" and {more} more" if more > 0 else "")
