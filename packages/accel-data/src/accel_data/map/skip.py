"""Skipping in plain DataLoaders, and copies of DataLoaders with another sampler."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, final

from accel_data.order.cursor import as_integer
from accel_data.private import LoaderT, copied, drop_iterator

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader


def swapped(dataloader: LoaderT, sampler: object, *, slot: str = "batch_sampler") -> LoaderT:
    """Copies ``dataloader`` with ``sampler`` as its ``slot``; every other attribute is the same."""
    return copied(dataloader, **{slot: sampler})


def iterated(dataloader: "DataLoader[Any]", generator: "torch.Generator") -> Iterator[Any]:
    """Iterates over a DataLoader whose workers are seeded from ``generator`` instead of from the global generator.

    The start of a pass then leaves the random state of the process unchanged, so that a resumed run, which starts one
    more pass, draws the same numbers as an uninterrupted one. torch draws the seed on the default device, where
    ``generator`` may not be, so the CPU is the default meanwhile.
    """
    import torch

    before = vars(dataloader)["generator"]
    vars(dataloader)["generator"] = generator
    try:
        with nullcontext() if torch.get_default_device() == generator.device else generator.device:
            return iter(dataloader)
    finally:
        vars(dataloader)["generator"] = before


def let_go(dataloader: "DataLoader[Any]") -> None:
    """Drops the iterator that torchdata's loader keeps after a pass, with its workers, unless they are persistent."""
    if not dataloader.persistent_workers:
        drop_iterator(dataloader)


def whole_batches(number: object) -> int:
    """Returns a number of batches to skip as an int.

    Raises:
        ValueError: ``number`` is not an integer >= 0.
    """
    batches = as_integer(number)
    if batches is None or batches < 0:
        raise ValueError(f"cannot skip {number!r} batches; the number must be a whole number of at least 0")
    return batches


@final
class SkippedStream:
    """A loader that reads and drops its first ``skip_batches`` batches, because a stream cannot seek."""

    def __init__(self, dataloader: "DataLoader[Any]", skip_batches: int) -> None:
        self._dataloader, self.skip_batches = dataloader, skip_batches

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._dataloader), self.skip_batches, None)

    def __len__(self) -> int:
        return max(len(self._dataloader) - self.skip_batches, 0)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataloader":
            raise AttributeError(name)
        return getattr(self._dataloader, name)
