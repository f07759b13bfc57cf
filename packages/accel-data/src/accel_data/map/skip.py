"""Plain DataLoaders with something taken away from their front."""

import copy
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, final

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

LoaderT = TypeVar("LoaderT", bound="DataLoader[Any]")


def swapped(dataloader: LoaderT, sampler: object, *, slot: str = "batch_sampler") -> LoaderT:
    """A copy of ``dataloader`` that reads through ``sampler``; every other attribute, known or not, is the same.

    Nothing is rebuilt from arguments, so nothing can be forgotten, and a subclass stays what it is.
    """
    other = copy.copy(dataloader)
    # torch refuses to set these through the object, because its own caches would not follow; there are none yet.
    vars(other)[slot] = sampler
    vars(other)["_iterator"] = None
    return other


def iterated(dataloader: "DataLoader[Any]", generator: "torch.Generator") -> Iterator[Any]:
    """Iterates a DataLoader whose workers are seeded from ``generator`` instead of from the global one.

    Starting a pass then leaves the random state of the process alone, so that a run that starts one more pass because
    it was resumed draws the same numbers as one that was not.
    """
    before = vars(dataloader)["generator"]
    vars(dataloader)["generator"] = generator
    try:
        return iter(dataloader)
    finally:
        vars(dataloader)["generator"] = before


def let_go(dataloader: "DataLoader[Any]") -> None:
    """Drops the iterator that a loader of torchdata's keeps after a pass, with its workers, unless they are to stay."""
    if not dataloader.persistent_workers:
        vars(dataloader)["_iterator"] = None


@final
class SkippedStream:
    """A loader without its first ``skip_batches`` batches, which it reads and forgets: it knows no positions."""

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
