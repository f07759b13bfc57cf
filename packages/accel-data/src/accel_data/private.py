"""Private names of torch that this package uses, read in torch 2.9, 2.13 and 2.15, each with what happens without it.

No other module of the package uses a private name of torch; CI checks that.
"""

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import RandomSampler, get_worker_info
from torch.utils.data._utils import worker as _worker

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from torch.utils.data import DataLoader

LoaderT = TypeVar("LoaderT", bound="DataLoader[Any]")


def copied(dataloader: LoaderT, **changes: Any) -> LoaderT:
    """Copies a loader of any class with other attributes, and without the iterator that it may keep (``_iterator``).

    The copy is not constructed from arguments, so that no attribute is lost and a subclass keeps its type. torch
    refuses to set some of the attributes once a loader exists, because its caches would not follow; the copy has none.
    In a torch whose loaders have no ``_iterator`` the attribute is one more that nothing reads.
    """
    other = copy.copy(dataloader)
    vars(other).update(changes, _iterator=None)
    return other


def kept_iterator(dataloader: "DataLoader[Any]") -> Iterator[Any] | None:
    """Returns the iterator that a loader keeps, with its persistent workers or as torchdata's do; None if none."""
    kept: Iterator[Any] | None = vars(dataloader).get("_iterator")
    return kept


def drop_iterator(dataloader: "DataLoader[Any]") -> None:
    """Drops the iterator that a loader keeps; its workers end with it."""
    vars(dataloader)["_iterator"] = None


def workers_of(iterator: object) -> "list[tuple[BaseProcess, bool]]":
    """Returns the worker processes of a loader's iterator, and whether each still reads (``_workers_status``).

    Empty without ``_workers``: deaths of workers are then reported in torch's words only.
    """
    workers, reading = getattr(iterator, "_workers", None) or [], getattr(iterator, "_workers_status", None)
    return list(zip(workers, [True] * len(workers) if reading is None else reading, strict=False))


def shut_down(iterator: object) -> None:
    """Stops the workers of a loader's iterator (``_shutdown_workers``); they end with the iterator without it.

    A thread that waits for a batch raises RuntimeError within the 5 s of torch's check. torch's own loop has no end
    once the workers are stopped, because it calls ``_try_get_data`` until a batch comes.
    """
    stop = getattr(iterator, "_shutdown_workers", None)
    if stop is not None:
        stop()
        if hasattr(iterator, "_try_get_data"):
            vars(iterator)["_try_get_data"] = _refuse_to_wait


def shut_down_after_pass(iterator: object) -> None:
    """Stops the workers of a loader's iterator that serves one pass only (``_persistent_workers``)."""
    if not getattr(iterator, "_persistent_workers", True):
        shut_down(iterator)


def _refuse_to_wait(*_: object, **__: object) -> None:
    raise RuntimeError("the workers of this DataLoader were stopped while a thread waited for a batch")


def fixed_num_samples(sampler: RandomSampler) -> int | None:
    """Returns the ``num_samples`` that a sampler was given; None if it follows its source (``_num_samples``)."""
    number: int | None = vars(sampler).get("_num_samples", sampler.num_samples)
    return number


def worker_info(number: int, count: int, dataset: Any) -> Any:
    """Returns what ``get_worker_info`` returns in worker ``number`` of ``count``."""
    return _worker.WorkerInfo(id=number, num_workers=count, seed=0, dataset=dataset)


def show_worker_info(info: object) -> None:
    """Makes ``info`` what ``get_worker_info`` returns in this process; None: it is not a worker.

    Raises:
        RuntimeError: this torch keeps it elsewhere than in ``torch.utils.data._utils.worker._worker_info``.
    """
    _worker._worker_info = info  # type: ignore[assignment]
    if get_worker_info() is not info:
        raise RuntimeError(
            "this torch does not read get_worker_info() from torch.utils.data._utils.worker._worker_info, as torch 2.9 "
            "to 2.15 do; read iterable datasets with num_workers=0"
        )
