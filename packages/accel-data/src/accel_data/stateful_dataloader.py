"""torchdata's ``StatefulDataLoader`` for iterable datasets."""

from importlib.util import find_spec
from typing import Any

from torch.utils.data import DataLoader

from accel_data.private import copied
from accel_state.errors import ConfigError


def require_torchdata() -> None:
    """Raises ``ImportError`` if torchdata is not installed, without importing it."""
    if find_spec("torchdata") is None:
        raise ImportError(
            "use_stateful_dataloader=True needs torchdata 0.8.0 or newer (the extra accel-data[torchdata]); without "
            "it prepared loaders still save and load their position"
        )


def stateful(dataloader: "DataLoader[Any]") -> "DataLoader[Any]":
    """Converts a loader to torchdata's, whose workers record the dataset's own state after every batch.

    Raises:
        ConfigError: the loader is of a subclass, which cannot be converted safely.
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
    # Attributes of torchdata's class.
    fields = {"snapshot_every_n_steps": 1, "next_iter_state": None, "_initial_iter_for_state_dict": False}
    other = copied(dataloader, **fields)
    other.__class__ = kept
    return other


def is_torchs_iteration(dataloader: "DataLoader[Any]") -> bool:
    """Whether a loader yields exactly the batches of its sampler, i.e. has torch's or torchdata's ``__iter__``."""
    iterate = type(dataloader).__iter__
    return iterate is DataLoader.__iter__ or iterate.__module__.startswith("torchdata.stateful_dataloader.")
