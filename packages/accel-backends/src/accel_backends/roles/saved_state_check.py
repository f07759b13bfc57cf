"""Check that saved states of models and optimizers fit, by names, shapes and options, before any tensor is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from accel_backends.ops.fqn import few
from accel_backends.ops.state_dicts import ASIDE, GROUPS, PARAMS, STATE, differences
from accel_state.errors import CheckpointMismatchError
from accel_state.pytree.saved_shapes import shape_text, shapes_differ


@final
@dataclass(frozen=True, slots=True)
class PartReport:
    """Names within one part; only models and optimizers have any.

    Attributes:
        loaded: parameters and buffers whose values, or whose optimizer states, were loaded.
        missing: those that the checkpoint lacks; they keep what they had (an optimizer's state begins anew).
        left_over: those of the checkpoint that the run does not have; they were ignored.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    left_over: tuple[str, ...] = ()


def check_model(
    name: str, own: Mapping[str, Any], aliases: Mapping[str, str], saved: Mapping[str, Any], *, strict: bool
) -> PartReport:
    """Refuses a saved model state that does not fit the model; ``aliases`` maps tied names to the name in ``own``.

    ``saved`` has tensors without values, but for those that ``is_packed`` names.

    Raises:
        CheckpointMismatchError: parameters are missing or unknown (``strict``), or have other shapes.
    """
    given = {aliases.get(key, key): value for key, value in saved.items()}
    missing = [key for key in own if key not in given]
    unknown = [key for key in given if key not in own]
    if strict and (missing or unknown):
        raise CheckpointMismatchError(differences(_of_another_model(name), missing, unknown, list(own)))
    misshapen = [
        f"{key} is {shape_text(key, given[key])} there and {shape_text(key, value)} here"
        for key, value in own.items()
        if key in given and shapes_differ(key, value, given[key])
    ]
    if misshapen:
        raise CheckpointMismatchError(f"{_of_another_model(name)}: {few(misshapen)}")
    return PartReport(tuple(key for key in own if key in given), tuple(missing), tuple(unknown))


def check_optimizer(
    name: str, kind: str, own: Mapping[str, Any], saved: Mapping[str, Any], *, strict: bool
) -> PartReport:
    """Refuses a saved optimizer state whose parameters, groups or options are not those of the optimizer.

    Without ``strict``, parameters may be new or missing, if the common ones are grouped alike.

    Raises:
        CheckpointMismatchError: names the differences.
    """
    ours = [parameter for group in own[GROUPS] for parameter in group[PARAMS]]
    theirs = dict.fromkeys([parameter for group in saved[GROUPS] for parameter in group[PARAMS]] + [*saved[STATE]])
    known = set(ours)
    missing = [parameter for parameter in ours if parameter not in theirs]
    unknown = [parameter for parameter in theirs if parameter not in known]
    if strict and (missing or unknown):
        raise CheckpointMismatchError(
            differences(_of_another_model(name), sorted(missing), sorted(unknown), sorted(ours))
        )
    pairs = matched_groups(own, saved)
    if pairs is None or (strict and len(own[GROUPS]) != len(saved[GROUPS])):
        shared = " of the parameters that both have" if missing or unknown else ""
        raise CheckpointMismatchError(
            f"the checkpoint's {name} is that of another {kind}: its groups of parameters differ{shared}, "
            f"{len(saved[GROUPS])} there and {len(own[GROUPS])} here"
        )
    for group, there in pairs:
        lacking = sorted(set(group) - set(there) - ASIDE)
        foreign = sorted(set(there) - set(group) - ASIDE)
        if lacking and foreign:
            raise CheckpointMismatchError(
                f"the checkpoint's {name} is that of another optimizer: {kind} has {few(lacking)}, and the state has "
                f"{few(foreign)} instead; build the optimizer that was saved"
            )
    return PartReport(tuple(one for one in ours if one in theirs), tuple(missing), tuple(unknown))


def matched_groups(
    own: Mapping[str, Any], saved: Mapping[str, Any]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]] | None:
    """Pairs an optimizer's groups with the saved groups of the same parameters, among those in both states.

    A group that has new parameters only is left out; a group without parameters is paired with the next saved one
    without parameters. None: the common parameters are grouped differently.
    """
    ours = {parameter for group in own[GROUPS] for parameter in group[PARAMS]}
    theirs = {parameter for group in saved[GROUPS] for parameter in group[PARAMS]}
    partners: dict[frozenset[str], list[Mapping[str, Any]]] = {}
    for group in saved[GROUPS]:
        shared = frozenset(group[PARAMS]) & ours
        if shared or not group[PARAMS]:
            partners.setdefault(shared, []).append(group)
    pairs = []
    for group in own[GROUPS]:
        shared = frozenset(group[PARAMS]) & theirs
        if group[PARAMS] and not shared:
            continue
        waiting = partners.get(shared, [])
        if waiting:
            pairs.append((group, waiting.pop(0)))
        elif shared:
            return None
    return pairs


def fitted_optimizer(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a saved state that passed ``check_optimizer`` to exactly the parameters and groups of ``own``.

    States of new parameters, and options of groups that have new parameters only, are those of ``own``.
    """
    options = {id(group): there for group, there in matched_groups(own, saved) or ()}
    theirs = {parameter for group in saved[GROUPS] for parameter in group[PARAMS]}
    ours = [parameter for group in own[GROUPS] for parameter in group[PARAMS]]
    sources = {parameter: saved if parameter in theirs else own for parameter in ours}
    return {
        STATE: {
            parameter: source[STATE][parameter] for parameter, source in sources.items() if parameter in source[STATE]
        },
        GROUPS: [{**options.get(id(group), group), PARAMS: group[PARAMS]} for group in own[GROUPS]],
    }


def check_keys(name: str, own: object, saved: object) -> None:
    """Refuses two mappings each of which has keys that the other lacks, as the states of two kinds of schedule do.

    Raises:
        CheckpointMismatchError: names the keys.
    """
    if not isinstance(own, Mapping) or not isinstance(saved, Mapping):
        return
    lacking, foreign = sorted(map(str, own.keys() - saved.keys())), sorted(map(str, saved.keys() - own.keys()))
    if lacking and foreign:
        raise CheckpointMismatchError(
            f"the checkpoint's {name} is that of another kind: here it has {few(lacking)}, and there {few(foreign)}; "
            "build the one that was saved"
        )


def _of_another_model(name: str) -> str:
    return f"the checkpoint's {name} is that of another model"
