"""Bytes that several ranks want: who compares them with their digests, and whether one rank reads them for all."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from accel_ckpt.blocks import CheckedFile
from accel_ckpt.peers import Peers, sends_from_host
from accel_ckpt.tensors import byte_view
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    import torch

Place = tuple[str, int]
"""A block: the name of its file and its number there."""
Parts = Sequence[tuple[int, memoryview]]
"""Where bytes of a block belong: from which byte of it on, into which memory."""
# Rounds after which it is decided whether passing on pays; the first also opens connections, and counts for nothing.
_TRIED = 2


@final
@dataclass(frozen=True, slots=True)
class Interest:
    """What a rank wants to read: on which machine it is, and the numbers of the blocks by file."""

    host: str
    blocks: Mapping[str, tuple[int, ...]]


def compared_by(interests: Sequence[Interest], neighbours: Sequence[int]) -> Callable[[int, Place], bool]:
    """Whether a rank compares a block that it reads: of those that read it on one machine one does.

    ``neighbours`` are the ranks that see the same copy. What a machine has read from a file it has read for all of its
    processes, so that one comparison tells for all; on another machine it may be something else.
    """
    wanting = _by_block(interests)

    def compares(rank: int, place: Place) -> bool:
        host = interests[rank].host
        here = [other for other in wanting[place] if other in neighbours and interests[other].host == host]
        return here[place[1] % len(here)] == rank

    return compares


def wanted_by_all(interests: Sequence[Interest]) -> list[Place]:
    """The blocks that every rank wants, in the same order everywhere."""
    return sorted(place for place, ranks in _by_block(interests).items() if len(ranks) == len(interests))


def pays(read: float, exchange: float, *, readers: int, lanes: int) -> bool:
    """Whether blocks that all want come sooner when each is read once and passed on.

    While ``readers``, who do not profit from each other's reading, each read all of so many blocks, ``lanes`` at a time
    with ``read`` seconds for one, together they read one each and take part in an ``exchange`` (seconds).
    """
    return exchange + read / lanes < readers * read / lanes


def read_for_all(peers: Peers, blocks: Sequence[tuple[CheckedFile, int, Parts]], *, readers: int, lanes: int) -> int:
    """Fills ``blocks``, which are the same on all ranks but for their parts: each is read by one, and passed on.

    ``readers`` and ``lanes`` as in ``pays``, which is asked what a few rounds took. Returns how many blocks are
    filled; the others come sooner when everybody reads them. A block that could not be read, or is not what was
    written, is an error on all ranks, but not before the others are done. Collective.

    Raises:
        CheckpointError: names what was damaged.
    """
    if len(blocks) < 2 * _TRIED * peers.size or peers.group is None or not sends_from_host(peers.group):
        return 0
    exchange = _Exchange(peers, blocks)
    done = 0
    with ThreadPoolExecutor(lanes, thread_name_prefix="accel-ckpt") as pool:
        for turn in range(_TRIED):
            read, passed = exchange.timed(turn)
        done, on = _TRIED, exchange.agree(read, passed, readers=readers, lanes=lanes)
        waiting: deque[Future[torch.Tensor]] = deque()
        for turn in range(_TRIED, exchange.rounds) if on else ():
            while len(waiting) < lanes and turn + len(waiting) < exchange.rounds:
                waiting.append(pool.submit(exchange.load, turn + len(waiting)))
            exchange.pass_on(turn, waiting.popleft().result())
            done += 1
    peers.together("reading for all", exchange.raise_problem)
    return min(done * peers.size, len(blocks))


@final
class _Exchange:
    """Rounds in which each rank reads one block, and all get all of them."""

    def __init__(self, peers: Peers, blocks: Sequence[tuple[CheckedFile, int, Parts]]) -> None:
        import torch

        self._peers, self._blocks = peers, blocks
        self.rounds = -(-len(blocks) // peers.size)
        # Behind the bytes of a block one more says whether they are good.
        self._width = max(file.length(number) for file, number, _ in blocks) + 1
        self._every = torch.empty(peers.size, self._width, dtype=torch.uint8)
        self._problems: list[CheckpointError] = []

    def timed(self, turn: int) -> tuple[float, float]:
        """A whole round; the seconds of reading and of passing on."""
        begin = time.perf_counter()
        mine = self.load(turn)
        between = time.perf_counter()
        self.pass_on(turn, mine)
        return between - begin, time.perf_counter() - between

    def load(self, turn: int) -> "torch.Tensor":
        """This rank's block of a round, compared."""
        import torch

        buffer = torch.zeros(self._width, dtype=torch.uint8)
        position = turn * self._peers.size + self._peers.rank
        if position < len(self._blocks):
            file, number, _ = self._blocks[position]
            try:
                file.read_block(number, byte_view(buffer)[: file.length(number)])
                buffer[-1] = 1
            except CheckpointError as error:
                self._problems.append(error)
        return buffer

    def pass_on(self, turn: int, mine: "torch.Tensor") -> None:
        """Gives this rank's block to all, and puts all of them into their places."""
        import torch.distributed as dist

        run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        run(self._every.view(-1), mine, group=self._peers.group)
        first = turn * self._peers.size
        for row, (file, number, parts) in zip(
            self._every, self._blocks[first : first + len(self._every)], strict=False
        ):
            if row[-1]:
                content = byte_view(row)
                for inside, view in parts:
                    view[:] = content[inside : inside + len(view)]
                file.trust([number])

    def agree(self, read: float, passed: float, *, readers: int, lanes: int) -> bool:
        """The same answer on all ranks: what the slowest found counts."""
        told = self._peers.together("measuring", lambda: (read, passed))
        slowest = (max(one[0] for one in told), max(one[1] for one in told))
        return pays(*slowest, readers=readers, lanes=lanes)

    def raise_problem(self) -> None:
        """Raises what this rank could not read."""
        if self._problems:
            raise self._problems[0]


def _by_block(interests: Sequence[Interest]) -> dict[Place, list[int]]:
    wanting: dict[Place, list[int]] = {}
    for rank, interest in enumerate(interests):
        for file, numbers in interest.blocks.items():
            for number in numbers:
                wanting.setdefault((file, number), []).append(rank)
    return wanting
