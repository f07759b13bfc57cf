"""torchdata's ``StatefulDataLoader`` as a source, with replacements for torch's samplers in it."""

import copy
from importlib.util import find_spec
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from accel_state.errors import ConfigError

_SAMPLERS = {
    "RandomSampler": RandomSampler,
    "BatchSampler": BatchSampler,
    "StatefulDistributedSampler": DistributedSampler,
}


def require_torchdata() -> None:
    """Raises ``ImportError`` where torchdata is not installed; does not import it."""
    if find_spec("torchdata") is None:
        raise ImportError(
            "use_stateful_dataloader=True needs torchdata 0.8.0 or newer (the extra accel-data[torchdata]); without "
            "it prepared loaders still save and load their position"
        )


def stateful(dataloader: "DataLoader[Any]") -> "DataLoader[Any]":
    """The same loader as one of torchdata's, whose workers then note a dataset's own state after every batch.

    Raises:
        ConfigError: the loader is of a class of its own, which may be anything.
    """
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped, unused-ignore]

    kept: type[DataLoader[Any]] = StatefulDataLoader
    if isinstance(dataloader, kept):
        return dataloader
    if type(dataloader) is not DataLoader:
        raise ConfigError(
            f"use_stateful_dataloader=True cannot make a StatefulDataLoader of a {type(dataloader).__name__}; derive "
            "that class from torchdata's StatefulDataLoader, or drop the option: prepared loaders save their position "
            "without it"
        )
    other: Any = copy.copy(dataloader)
    other.__class__ = kept
    vars(other).update(
        _iterator=None, snapshot_every_n_steps=1, next_iter_state=None, _initial_iter_for_state_dict=False
    )
    made: DataLoader[Any] = other
    return made


def is_torchs_iteration(dataloader: "DataLoader[Any]") -> bool:
    """Whether a loader gives exactly the batches of its sampler: its class iterates as torch's or torchdata's does."""
    iterate = type(dataloader).__iter__
    return iterate is DataLoader.__iter__ or iterate.__module__.startswith("torchdata.stateful_dataloader.")


def torchs_class(sampler: object) -> type:
    """The class of a sampler; for one of torchdata's that does the same as one of torch's, that one."""
    kind = type(sampler)
    same = _SAMPLERS.get(kind.__name__) if kind.__module__ == "torchdata.stateful_dataloader.sampler" else None
    return kind if same is None else same
