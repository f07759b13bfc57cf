"""Hooks of ``save_state`` and ``load_state``: functions that add files, and change what is saved or loaded."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from accel_state.errors import CheckpointError

SaveHook = Callable[[list[nn.Module], list[Any], str], object]
LoadHook = Callable[[list[nn.Module], str], object]


def run_save_hooks(
    hooks: Sequence[SaveHook], models: list[nn.Module], names: Sequence[str], state: dict[str, Any], folder: str
) -> None:
    """Runs ``hooks`` on the weights of the models ``names`` in ``state``, and puts there what they leave in their list.

    A hook may remove weights from the list, or replace them in their places.

    Raises:
        CheckpointError: an entry of the list belongs to no model, or is no state dict.
    """
    weights = [state[name] for name in names]
    kept = list(weights)
    for hook in hooks:
        hook(models, kept, folder)
    if all(any(one is other for other in weights) for one in kept):
        left = {name: one for name, one in zip(names, weights, strict=True) if any(one is other for other in kept)}
    elif len(kept) == len(names):
        left = dict(zip(names, kept, strict=True))
    else:
        raise CheckpointError(
            f"the save hooks left {len(kept)} state dicts for {len(names)} models ({', '.join(names)}), and replaced "
            "some of them, so that it is unknown whose they are; replace weights in their places (weights[0] = ...), "
            "or remove some and replace none"
        )
    for name in names:
        if name not in left:
            del state[name]
        elif isinstance(left[name], Mapping):
            state[name] = left[name]
        else:
            raise CheckpointError(
                f"a save hook replaced the weights of {name} by a {type(left[name]).__name__}; expected a state dict "
                "(remove the entry to save no weights)"
            )
