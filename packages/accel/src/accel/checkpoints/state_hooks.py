"""Hooks of ``save_state`` and ``load_state``: functions that add files, and change what is saved or loaded."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch import nn

from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from accel_ckpt import Checkpoint
    from accel_ckpt.rank_group import RankGroup

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


def run_load_hooks(
    hooks: Sequence[LoadHook],
    models: Sequence[nn.Module],
    checkpoint: "Checkpoint",
    peers: "RankGroup",
    files: ExitStack,
) -> list[nn.Module]:
    """Runs ``hooks`` on the models, and returns those that they leave in their list; ``files`` closes their files.

    Collective: every rank of the group must call this, also without hooks.

    Raises:
        CheckpointError: a hook failed on a rank, or the hooks of one rank leave other models than those of another.
    """
    kept = list(models)

    def run() -> tuple[bool, ...]:
        folder = str(checkpoint.path)
        if hooks and not isinstance(checkpoint.path, Path):
            from accel_ckpt.saving.extra_files import download

            folder = files.enter_context(TemporaryDirectory(prefix="accel-load-"))
            download(checkpoint, Path(folder))
        for hook in hooks:
            hook(kept, folder)
        return tuple(any(model is one for one in kept) for model in models)

    told = peers.run_on_all("hooks before loading", run)
    if other := [rank for rank, one in enumerate(told) if one != told[0]]:
        left = [str([number for number, stays in enumerate(told[rank]) if stays]) for rank in (0, other[0])]
        raise CheckpointError(
            f"the load hooks leave models {left[0]} to load on rank 0 and {left[1]} on rank {other[0]}; take the same "
            "from the list on all processes"
        )
    return kept
