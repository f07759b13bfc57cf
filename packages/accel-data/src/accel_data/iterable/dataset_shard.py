"""One rank's elements of an iterable dataset, for a loader that is not prepared."""

from collections.abc import Iterable, Iterator
from typing import Any, final

from torch.utils.data import IterableDataset, get_worker_info

from accel_data.iterable.capabilities import choose_epoch
from accel_data.iterable.stride import Stride, check_split, parts


@final
class IterableDatasetShard(IterableDataset[Any]):
    """One rank's elements of an iterable dataset that cannot shard itself, in worker processes too.

    Every reader reads the full source and keeps its stride (see ``Stride``). Give it to a ``DataLoader`` with
    the same ``batch_size`` (divided by ``num_processes`` with ``split_batches``); the elements then come in the same
    order for any number of workers. Raises ``ConfigError`` when ``split_batches`` cannot divide the batch.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        *,
        even_batches: bool = True,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.epoch = 0
        self._stride()

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of this dataset and of its source."""
        self.epoch = epoch
        choose_epoch(self.dataset, epoch)

    def __iter__(self) -> Iterator[Any]:
        if not hasattr(self.dataset, "set_epoch"):  # otherwise the user may have called it
            choose_epoch(self.dataset, self.epoch)
        info = get_worker_info()
        stride = self._stride() if info is None else self._stride(workers=info.num_workers, worker=info.id)
        for part in parts(self.dataset, stride):
            yield from part.elements

    def __len__(self) -> int:
        """Elements this rank gets; raises ``TypeError`` when the source has no length."""
        return self._stride().length(len(self.dataset))  # type: ignore[arg-type]

    def _stride(self, *, workers: int = 1, worker: int = 0) -> Stride:
        split = check_split(self.batch_size, self.num_processes) if self.split_batches else self.batch_size
        return Stride(
            batch_size=split,
            shards=self.num_processes,
            index=self.process_index,
            workers=workers,
            worker=worker,
            drop_last=self.drop_last,
            even=self.even_batches,
        )
