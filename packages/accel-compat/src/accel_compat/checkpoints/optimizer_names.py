"""Names of the parameters of an optimizer that was saved by their numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from accel_state.errors import CheckpointError

Shape = tuple[int, ...]
_LIMIT = 2000
"""Partial assignments of as many names that ``ordered`` compares: there are exponentially many in the number of groups."""


@final
@dataclass(frozen=True, slots=True)
class BuiltObjects:
    """Models, and optimizers if any, that a function of the user built, for names and their order.

    Attributes:
        models: in the order in which they were prepared.
        optimizers: likewise; empty: unknown.
    """

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]

    @classmethod
    def of(cls, built: Any) -> "BuiltObjects":
        """Takes a model, or a tuple of models and optimizers.

        Raises:
            CheckpointError: there is something else, or no model.
        """
        every = tuple(built) if isinstance(built, tuple | list) else (built,)
        models = tuple(one for one in every if isinstance(one, nn.Module))
        optimizers = tuple(one for one in every if isinstance(one, torch.optim.Optimizer))
        if not models or len(models) + len(optimizers) != len(every):
            kinds = ", ".join(type(one).__name__ for one in every)
            raise CheckpointError(f"--model built {kinds}; expected a model, or models and optimizers")
        return cls(models, optimizers)

    def groups(self, index: int) -> list[list[str]] | None:
        """Names of the parameters in each group of an optimizer; None if it was not built."""
        if index >= len(self.optimizers):
            return None
        owners = {
            id(one): (place, name)
            for place, model in enumerate(self.models)
            for name, one in model.named_parameters(remove_duplicate=True)
        }
        groups = self.optimizers[index].param_groups
        unknown = [one for group in groups for one in group["params"] if id(one) not in owners]
        if unknown:
            raise CheckpointError(f"optimizer {index} of --model has parameters of none of its models")
        places = {owners[id(one)][0] for group in groups for one in group["params"]}
        return [
            [
                name if len(places) < 2 else f"{place}.{name}"
                for place, name in (owners[id(one)] for one in group["params"])
            ]
            for group in groups
        ]

    def shapes(self, index: int) -> dict[str, Shape]:
        """Shapes of a model's parameters by name, in their order."""
        return {name: tuple(one.shape) for name, one in self.models[index].named_parameters()}


def is_numbered(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state has numbers for its parameters."""
    return any(isinstance(one, int) for group in state["param_groups"] for one in group["params"])


def named(state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Returns the state with the names of ``groups`` in place of numbers.

    Raises:
        CheckpointError: there are other numbers of parameters.
    """
    saved = [list(group["params"]) for group in state["param_groups"]]
    if list(map(len, saved)) != list(map(len, groups)):
        raise CheckpointError(
            f"the optimizer was saved with groups of {', '.join(map(str, map(len, saved)))} parameters, and --model "
            f"builds one with {', '.join(map(str, map(len, groups)))}; build the optimizer that was saved"
        )
    names = {
        number: name
        for here, there in zip(saved, groups, strict=True)
        for number, name in zip(here, there, strict=True)
    }
    return {
        "state": {names[number]: dict(values) for number, values in state["state"].items()},
        "param_groups": [
            {**group, "params": list(there)} for group, there in zip(state["param_groups"], groups, strict=True)
        ],
    }


def saved_shapes(state: Mapping[str, Any]) -> list[list[Shape | None]]:
    """Shapes of the parameters in each group, as their states have them; None: no state says it."""

    def shape(number: int) -> Shape | None:
        values = state["state"].get(number, {})
        found = {tuple(one.shape) for key, one in values.items() if isinstance(one, torch.Tensor) and key != "step"}
        return found.pop() if len(found) == 1 else None

    return [[shape(number) for number in group["params"]] for group in state["param_groups"]]


def ordered(shapes: Sequence[Sequence[Shape | None]], known: Mapping[str, Shape]) -> list[list[list[str]]] | None:
    """Ways (at most two) to give names to groups, each group in the order of ``known``, by their shapes.

    None: more than ``_LIMIT`` partial assignments fit, so the names are ambiguous.
    """
    lengths = tuple(len(group) for group in shapes)
    spare = len(known) - sum(lengths)
    names = list(known)
    # For each number of names that were used or skipped: how many parameters of each group are named, and one or two
    # steps that lead there, a step being the group that took the name (-1: none).
    layers: list[dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]]] = [{(0,) * len(lengths): []}]
    for place, name in enumerate(names):
        following: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for taken in layers[-1]:
            if place - sum(taken) < spare:
                following.setdefault(taken, []).append((taken, -1))
            for group, count in enumerate(taken):
                if count < lengths[group] and shapes[group][count] in (None, known[name]):
                    after = (*taken[:group], count + 1, *taken[group + 1 :])
                    following.setdefault(after, []).append((taken, group))
            if len(following) > _LIMIT:
                return None
        layers.append(following)
    return _ways(layers, lengths, names)


def _ways(layers: Any, lengths: tuple[int, ...], names: Sequence[str]) -> list[list[list[str]]]:
    waiting: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    if lengths in layers[-1]:
        waiting.append((len(names), lengths, ()))
    found: list[list[list[str]]] = []
    while waiting and len(found) < 2:
        place, taken, steps = waiting.pop()
        if place == 0:
            made: list[list[str]] = [[] for _ in lengths]
            for name, group in zip(names, steps, strict=True):
                if group >= 0:
                    made[group].append(name)
            found.append(made)
            continue
        waiting += [(place - 1, before, (group, *steps)) for before, group in layers[place][taken]]
    return found


def unordered(shapes: Sequence[Sequence[Shape | None]], known: Mapping[str, Shape]) -> list[list[str]] | None:
    """Names by shape alone, for weights whose order is unknown; None if a shape is that of several, or of none."""
    by_shape: dict[Shape | None, list[str]] = {}
    for name, shape in known.items():
        by_shape.setdefault(shape, []).append(name)
    wanted = [one for group in shapes for one in group]
    if len(set(wanted)) < len(wanted) or any(len(by_shape.get(one, ())) != 1 for one in wanted):
        return None
    return [[by_shape[one][0] for one in group] for group in shapes]
