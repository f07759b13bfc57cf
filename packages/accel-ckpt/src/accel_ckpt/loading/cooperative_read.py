"""Cooperative reads: of blocks that several ranks read, one rank verifies each, or reads it and sends it to all."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from accel_ckpt.format.blocks import CheckedFile
from accel_ckpt.format.tensors import byte_view
from accel_ckpt.io.thread_pool import Seat
from accel_ckpt.rank_group import RankGroup
from accel_state.errors import CheckpointError
from accel_state.process_group.group import sends_from_host

if TYPE_CHECKING:
    import torch

Place = tuple[str, int]
"""A block: the name of its file and its number there."""
Parts = Sequence[tuple[int, memoryview]]
"""Memory to fill from a block: pairs of first byte in the block and memory."""
# Rounds that measure whether all-gathering blocks is faster. A rank reads its blocks of these rounds concurrently.
_TRIED = 2
# Bytes of all ranks in one collective; larger rounds are split into slices of their blocks.
_AT_ONCE = 2**28


@final
@dataclass(frozen=True, slots=True)
class RankReads:
    """Blocks that a rank will read, by file, and its machine and CPUs."""

    seat: Seat
    blocks: Mapping[str, tuple[int, ...]]
    besides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Blocks that the rank verifies itself, whichever other ranks do."""


def assign_verifiers(rank_reads: Sequence[RankReads], neighbours: Sequence[int]) -> Callable[[int, Place], bool]:
    """Returns whether a rank verifies a block that it reads: of the ranks of one machine that read it, one does.

    ``neighbours`` are the ranks that see the same copy. A file that a machine has read is in the page cache for all of
    its processes, so one verification covers all of them; another machine may read other bytes.
    """
    wanting = _by_block(rank_reads)

    def compares(rank: int, place: Place) -> bool:
        host = rank_reads[rank].seat.host
        here = [other for other in wanting[place] if other in neighbours and rank_reads[other].seat.host == host]
        return here[place[1] % len(here)] == rank

    return compares


def covered(rank_reads: Sequence[RankReads], neighbours: Sequence[int]) -> dict[str, set[int]]:
    """Returns the blocks, by file, that a rank with the same copy has verified once all ranks have done their reads."""
    found: dict[str, set[int]] = {}
    for rank in neighbours:
        for wanted in (rank_reads[rank].blocks, rank_reads[rank].besides):
            for file, numbers in wanted.items():
                found.setdefault(file, set()).update(numbers)
    return found


def wanted_by_all(rank_reads: Sequence[RankReads]) -> list[Place]:
    """Returns the blocks that every rank reads, in the same order on all ranks."""
    return sorted(place for place, ranks in _by_block(rank_reads).items() if len(ranks) == len(rank_reads))


def broadcast_is_cheaper(read: float, exchange: float, *, readers: int) -> bool:
    """Whether blocks that all ranks read are available sooner if one rank reads each and all-gathers it.

    ``read`` is the time per block while all ranks read (seconds of reading / blocks read by one rank), ``exchange``
    that of a round that all-gathers one block of each rank. Without the exchange, each of ``readers`` (which share no
    cache) reads that many blocks; with it, one block.
    """
    return exchange + read < readers * read


def read_for_all(
    peers: RankGroup, blocks: Sequence[tuple[CheckedFile, int, Parts]], *, readers: int, lanes: int
) -> int:
    """Fills ``blocks``, which are the same on all ranks except for their parts: one rank reads each and all-gathers it.

    Collective: every rank of the group must call this. ``lanes`` is the number of concurrent reads of a rank,
    ``readers`` as in ``broadcast_is_cheaper``, which decides from the time of the first rounds. Returns the number of
    filled blocks; the rest is read faster by every rank itself. A block that could not be read, or does not match its
    digest, raises on all ranks, but only after the other blocks are done.

    Raises:
        CheckpointError: names the damaged bytes.
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
    peers.run_on_all("reading for all", exchange.raise_problem)
    return min(last * peers.size, len(blocks))


@final
class _Exchange:
    """Rounds in which each rank reads one block and all ranks receive all of them."""

    def __init__(self, peers: RankGroup, blocks: Sequence[tuple[CheckedFile, int, Parts]]) -> None:
        import torch

        self._peers, self._blocks = peers, blocks
        self.rounds = -(-len(blocks) // peers.size)
        self._width = max(file.length(number) for file, number, _ in blocks)
        self._slice = min(self._width, max(1, _AT_ONCE // peers.size))
        self._every = torch.empty(peers.size * self._slice, dtype=torch.uint8, device="cpu")
        self._problems: list[CheckpointError] = []

    def load(self, turn: int) -> "torch.Tensor | None":
        """Reads and verifies this rank's block of a round; None if there is none, or if it is damaged."""
        import torch

        position = turn * self._peers.size + self._peers.rank
        if position >= len(self._blocks):
            return None
        file, number, _ = self._blocks[position]
        buffer = torch.empty(self._width, dtype=torch.uint8, device="cpu")
        try:
            file.read_block(number, byte_view(buffer)[: file.length(number)])
        except CheckpointError as error:
            self._problems.append(error)
            return None
        return buffer

    def pass_on(self, turn: int, mine: "torch.Tensor | None") -> float:
        """All-gathers the ranks' blocks and copies them into their targets. Returns the seconds that this took.

        Collective: every rank of the group must call this.
        """
        import torch

        started = time.perf_counter()
        good = self._gathered(torch.tensor([mine is not None], dtype=torch.uint8, device="cpu")).tolist()
        sent = torch.empty(self._width, dtype=torch.uint8, device="cpu") if mine is None else mine
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
        """Decides by the slowest rank's times, so that the result is the same on all ranks.

        Collective: every rank of the group must call this.
        """
        told = self._peers.run_on_all("measuring", lambda: (read, passed))
        slowest = (max(one[0] for one in told), max(one[1] for one in told))
        return broadcast_is_cheaper(*slowest, readers=readers)

    def raise_problem(self) -> None:
        """Raises the first error of this rank's reads."""
        if self._problems:
            raise self._problems[0]


def _deliver(content: memoryview, begin: int, parts: Parts) -> None:
    """Copies ``content``, the bytes of a block from ``begin`` on, into the targets of its parts."""
    for inside, view in parts:
        first, last = max(inside, begin), min(inside + len(view), begin + len(content))
        if first < last:
            view[first - inside : last - inside] = content[first - begin : last - begin]


def _by_block(rank_reads: Sequence[RankReads]) -> dict[Place, list[int]]:
    wanting: dict[Place, list[int]] = {}
    for rank, reads in enumerate(rank_reads):
        for file, numbers in reads.blocks.items():
            for number in numbers:
                wanting.setdefault((file, number), []).append(rank)
    return wanting
