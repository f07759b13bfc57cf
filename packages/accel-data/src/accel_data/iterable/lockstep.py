"""Equally many steps on every rank, where each reads a stream of its own of unknown length."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, final

import torch

from accel_data.iterable.worker import Delivered
from accel_data.loader_group import LoaderGroup
from accel_state.errors import CollectiveError, DataError

_ENDED = -1
_EMPTY = -2
_NOTHING = (_EMPTY, 0, 0)
_SETTLING = 5.0
"""Seconds that a rank which leaves waits for the others to reach the same exchange."""


class Agreed(NamedTuple):
    """One step: this rank's item, or (``is_new`` is false) its first one again after its end.

    ``facts``, by data rank: the real rows (-1: ended), the worker that read them, and its position behind them. None
    where ranks do not exchange them.
    """

    item: Delivered
    is_new: bool
    facts: list[tuple[int, int, int]] | None


def alone(items: Iterator[Delivered]) -> Iterator[Agreed]:
    """The steps of a rank that exchanges nothing."""
    return (Agreed(item, True, None) for item in items)


@final
class Lockstep:
    """Exchanges, one step ahead, how many real rows each rank has, and where its stream stands behind them.

    The exchange of a step is started when its batch has been read and waited for when the batch before is due, so the
    loop does not wait for the network. Each carries the number of its pass, so that a rank which left a loop alone is
    an error instead of an exchange with another pass.
    """

    def __init__(self, peers: LoaderGroup) -> None:
        self._peers = peers
        self._passes = 0

    def run(self, items: Iterator[Delivered], again: Callable[[], Delivered | None]) -> Iterator[Agreed]:
        """The steps of one pass over ``items``, until all ranks have ended.

        ``again`` reads the first item of this rank's stream, for a pass that begins behind its end. Raises
        ``DataError`` on every rank when the stream of one of them is empty, and ``CollectiveError`` when a rank is in
        another pass.
        """
        self._passes += 1
        item = next(items, None)
        filling = item if item is not None else again()
        pending = self._start(_facts(item) if filling is not None else _NOTHING)
        try:
            while True:
                following = next(items, None) if item is not None else None
                due, pending = pending, self._start(_facts(following) if filling is not None else _NOTHING)
                facts = self._wait(due)
                counts = [rows for rows, _, _ in facts]
                if max(counts) < 0:
                    return
                if filling is None or _EMPTY in counts:
                    empty = ", ".join(str(share) for share, rows in enumerate(counts) if rows == _EMPTY)
                    raise DataError(
                        f"the streams of data ranks {empty} are empty and others are not: use fewer ranks, cut the "
                        "dataset into more shards, or set even_batches=False and join_uneven_inputs"
                    )
                yield Agreed(filling if item is None else item, item is not None, facts)
                item = following
        finally:
            # Every rank has started it: nothing stays under way, whether the loop ended or was left by all.
            with suppress(RuntimeError):
                pending[0].wait(timedelta(seconds=_SETTLING))

    def _start(self, facts: tuple[int, int, int]) -> tuple[Any, torch.Tensor]:
        import torch.distributed as dist

        own = torch.tensor([self._passes, *facts], device="cpu")
        heard = torch.empty(len(self._peers.parts), len(own), dtype=torch.int64, device="cpu")
        work = dist.all_gather(list(heard), own, group=self._peers.group, async_op=True)
        return work, heard

    def _wait(self, exchange: tuple[Any, torch.Tensor]) -> list[tuple[int, int, int]]:
        """Rows, worker and position by data rank."""
        work, heard = exchange
        patience = self._peers.patience
        work.wait(*(() if patience is None else (timedelta(seconds=patience),)))
        rows = heard.tolist()
        strays = [str(rank) for rank, (number, *_) in enumerate(rows) if number != self._passes]
        if strays:
            raise CollectiveError(
                f"ranks {', '.join(strays)} are in another pass of this loader than rank {self._peers.rank}: all ranks "
                "must leave a loop over sharded streams at the same batch"
            )
        by_share = {share: (*facts,) for share, (_, *facts) in zip(self._peers.parts, rows, strict=True)}
        return [by_share[share] for share in range(len(by_share))]


def _facts(item: Delivered | None) -> tuple[int, int, int]:
    return (_ENDED, 0, 0) if item is None else (item.part[0], item.worker, item.part[2])
