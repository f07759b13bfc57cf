"""Bytes that several ranks read: the rank that compares them with their digests, or reads them for all."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from accel_ckpt.format.blocks import CheckedFile
from accel_ckpt.format.tensors import byte_view
from accel_ckpt.io.thread_pool import Seat
from accel_ckpt.rank_group import RankGroup, sends_from_host
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    import torch

Place = tuple[str, int]
"""A block: the name of its file and its number there."""
Parts = Sequence[tuple[int, memoryview]]
"""Where bytes of a block belong: from which byte of it on, into which memory."""
# Rounds by which it is decided whether passing on pays. A rank reads its blocks of them at the same time.
_TRIED = 2
# Bytes of all ranks that are passed on in one collective; more of them take turns with parts of their blocks.
_AT_ONCE = 2**28


@final
@dataclass(frozen=True, slots=True)
class Interest:
    """What a rank wants to read: where it runs, and the numbers of the blocks by file."""

    seat: Seat
    blocks: Mapping[str, tuple[int, ...]]
    besides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Blocks that it compares itself, whoever else does."""


def compared_by(interests: Sequence[Interest], neighbours: Sequence[int]) -> Callable[[int, Place], bool]:
    """Whether a rank compares a block that it reads: of those that read it on one machine one does.

    ``neighbours`` are the ranks that see the same copy. What a machine has read from a file it has read for all of its
    processes, so that one comparison tells for all; on another machine it may be something else.
    """
    wanting = _by_block(interests)

    def compares(rank: int, place: Place) -> bool:
        host = interests[rank].seat.host
        here = [other for other in wanting[place] if other in neighbours and interests[other].seat.host == host]
        return here[place[1] % len(here)] == rank

    return compares


def covered(interests: Sequence[Interest], neighbours: Sequence[int]) -> dict[str, set[int]]:
    """The blocks, by file, that are compared by a rank that sees the same copy once all have read what they want."""
    found: dict[str, set[int]] = {}
    for rank in neighbours:
        for wanted in (interests[rank].blocks, interests[rank].besides):
            for file, numbers in wanted.items():
                found.setdefault(file, set()).update(numbers)
    return found


def wanted_by_all(interests: Sequence[Interest]) -> list[Place]:
    """The blocks that every rank wants, in the same order everywhere."""
    return sorted(place for place, ranks in _by_block(interests).items() if len(ranks) == len(interests))


def pays(read: float, exchange: float, *, readers: int) -> bool:
    """Whether blocks that all want come sooner when each is read once and passed on.

    ``read`` is what a block takes while all ranks read (seconds of reading over blocks read by one rank), ``exchange``
    a round in which all get a block of each. Alone, each of ``readers`` who do not profit from each other's reading
    reads all of so many blocks; together, one of them.
    """
    return exchange + read < readers * read


def read_for_all(
    peers: RankGroup, blocks: Sequence[tuple[CheckedFile, int, Parts]], *, readers: int, lanes: int
) -> int:
    """Fills ``blocks``, which are the same on all ranks but for their parts: each is read by one, and passed on.

    ``lanes`` is how many a rank reads at a time, ``readers`` as in ``pays``, which is asked what a few rounds took.
    Returns how many blocks are filled; the others come sooner when everybody reads them. A block that could not be
    read, or is not what was written, is an error on all ranks, but not before the others are done. Collective.

    Raises:
        CheckpointError: names what was damaged.
    """
    if len(blocks) < 2 * _TRIED * peers.size or peers.group is None or not sends_from_host(peers.group):
        return 0
    exchange = _Exchange(peers, blocks)
    with ThreadPoolExecutor(max(lanes, _TRIED), thread_name_prefix="accel-ckpt") as pool:
        begin = time.perf_counter()
        tried = [one.result() for one in [pool.submit(exchange.load, turn) for turn in range(_TRIED)]]
        read = (time.perf_counter() - begin) / _TRIED
        passed = min(exchange.pass_on(turn, mine) for turn, mine in enumerate(tried))
        last = exchange.rounds if exchange.agree(read, passed, readers=readers) else _TRIED
        waiting: deque[Future[torch.Tensor | None]] = deque()
        for turn in range(_TRIED, last):
            while len(waiting) < lanes and turn + len(waiting) < last:
                waiting.append(pool.submit(exchange.load, turn + len(waiting)))
            exchange.pass_on(turn, waiting.popleft().result())
    peers.together("reading for all", exchange.raise_problem)
    return min(last * peers.size, len(blocks))


@final
class _Exchange:
    """Rounds in which each rank reads one block, and all get all of them."""

    def __init__(self, peers: RankGroup, blocks: Sequence[tuple[CheckedFile, int, Parts]]) -> None:
        import torch

        self._peers, self._blocks = peers, blocks
        self.rounds = -(-len(blocks) // peers.size)
        self._width = max(file.length(number) for file, number, _ in blocks)
        self._slice = min(self._width, max(1, _AT_ONCE // peers.size))
        self._every = torch.empty(peers.size * self._slice, dtype=torch.uint8)
        self._problems: list[CheckpointError] = []

    def load(self, turn: int) -> "torch.Tensor | None":
        """This rank's block of a round, compared; None if it has none, or it is damaged."""
        import torch

        position = turn * self._peers.size + self._peers.rank
        if position >= len(self._blocks):
            return None
        file, number, _ = self._blocks[position]
        buffer = torch.empty(self._width, dtype=torch.uint8)
        try:
            file.read_block(number, byte_view(buffer)[: file.length(number)])
        except CheckpointError as error:
            self._problems.append(error)
            return None
        return buffer

    def pass_on(self, turn: int, mine: "torch.Tensor | None") -> float:
        """Gives this rank's block to all, and puts all of them into their places. Returns the seconds that took."""
        import torch

        started = time.perf_counter()
        good = self._gathered(torch.tensor([mine is not None], dtype=torch.uint8)).tolist()
        sent = torch.empty(self._width, dtype=torch.uint8) if mine is None else mine
        blocks = self._blocks[turn * self._peers.size : (turn + 1) * self._peers.size]
        for begin in range(0, self._width, self._slice):
            rows = self._gathered(sent[begin : begin + self._slice]).view(self._peers.size, -1)
            for (_, _, parts), row, is_good in zip(blocks, rows, good, strict=False):
                if is_good:
                    _deliver(byte_view(row), begin, parts)
        for (file, number, _), is_good in zip(blocks, good, strict=False):
            file.trust([number] if is_good else [])
        return time.perf_counter() - started

    def _gathered(self, mine: "torch.Tensor") -> "torch.Tensor":
        import torch.distributed as dist

        run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        every = self._every[: self._peers.size * mine.numel()]
        run(every, mine, group=self._peers.group)
        return every

    def agree(self, read: float, passed: float, *, readers: int) -> bool:
        """The same answer on all ranks: what the slowest found counts."""
        told = self._peers.together("measuring", lambda: (read, passed))
        slowest = (max(one[0] for one in told), max(one[1] for one in told))
        return pays(*slowest, readers=readers)

    def raise_problem(self) -> None:
        """Raises what this rank could not read."""
        if self._problems:
            raise self._problems[0]


def _deliver(content: memoryview, begin: int, parts: Parts) -> None:
    """Puts what lies from byte ``begin`` of a block on into the places of its parts."""
    for inside, view in parts:
        first, last = max(inside, begin), min(inside + len(view), begin + len(content))
        if first < last:
            view[first - inside : last - inside] = content[first - begin : last - begin]


def _by_block(interests: Sequence[Interest]) -> dict[Place, list[int]]:
    wanting: dict[Place, list[int]] = {}
    for rank, interest in enumerate(interests):
        for file, numbers in interest.blocks.items():
            for number in numbers:
                wanting.setdefault((file, number), []).append(rank)
    return wanting
