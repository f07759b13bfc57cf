"""Equally many steps on every rank, where each reads a stream of its own of unknown length."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, final

import torch

from accel_data.iterable.worker import Delivered
from accel_data.peers import Peers
from accel_state.errors import CollectiveError, DataError

_ENDED = -1
_EMPTY = -2
_NOTHING = (_EMPTY, 0, 0)
_SETTLING = 5.0
"""Seconds a rank that leaves waits for the others to have got as far as it has."""


class Agreed(NamedTuple):
    """One step: this rank's item, or its first one again after its end.

    By data rank, the real rows (-1: ended), and the worker that read them with its position behind them.
    """

    item: Delivered
    is_new: bool
    counts: tuple[int, ...]
    places: tuple[tuple[int, int], ...]


@final
class Lockstep:
    """Exchanges, one step ahead, how many real rows each rank has, and where its stream stands behind them.

    The exchange of a step is started when its batch has been read and waited for when the batch before is due, so the
    loop does not wait for the wire. Each carries the number of its pass: a rank that left a loop alone is found out by
    the others instead of being answered with numbers of another pass.
    """

    def __init__(self, peers: Peers) -> None:
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
                said = self._wait(due)
                counts = tuple(rows for rows, _, _ in said)
                if max(counts) < 0:
                    return
                if filling is None or _EMPTY in counts:
                    empty = ", ".join(str(share) for share, rows in enumerate(counts) if rows == _EMPTY)
                    raise DataError(
                        f"the streams of data ranks {empty} are empty and others are not: use fewer ranks, cut the "
                        "dataset into more shards, or set even_batches=False and join_uneven_inputs"
                    )
                places = tuple((worker, stop) for _, worker, stop in said)
                yield Agreed(filling if item is None else item, item is not None, counts, places)
                item = following
        finally:
            # Every rank has started it: nothing stays under way, whether the loop ended or was left by all.
            self._settle(pending)

    def _start(self, facts: tuple[int, int, int]) -> tuple[Any, torch.Tensor]:
        import torch.distributed as dist

        said = torch.tensor([self._passes, *facts])
        heard = torch.empty(len(self._peers.parts), len(said), dtype=torch.int64)
        work = dist.all_gather(list(heard), said, group=self._peers.group, async_op=True)
        return work, heard

    def _wait(self, exchange: tuple[Any, torch.Tensor]) -> list[tuple[int, int, int]]:
        """Rows, worker and position by data rank."""
        work, heard = exchange
        if self._peers.patience is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=self._peers.patience))
        said = heard.tolist()
        strays = [str(rank) for rank, (number, *_) in enumerate(said) if number != self._passes]
        if strays:
            raise CollectiveError(
                f"ranks {', '.join(strays)} are in another pass of this loader than rank {self._peers.rank}: all ranks "
                "must leave a loop over sharded streams at the same batch"
            )
        by_share = {share: (*facts,) for share, (_, *facts) in zip(self._peers.parts, said, strict=True)}
        return [by_share[share] for share in range(len(by_share))]

    def _settle(self, exchange: tuple[Any, torch.Tensor]) -> None:
        try:
            exchange[0].wait(timedelta(seconds=_SETTLING))
        except RuntimeError:
            return


def _facts(item: Delivered | None) -> tuple[int, int, int]:
    return (_ENDED, 0, 0) if item is None else (item.part[0], item.worker, item.part[2])
