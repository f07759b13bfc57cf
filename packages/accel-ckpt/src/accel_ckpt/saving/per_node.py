"""Full copies of a checkpoint on every machine: files that the ranks of a machine did not write are sent to it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, final

from accel_ckpt.format.blocks import BLOCK, ByteSource, Content, Digest, FileRecord
from accel_ckpt.format.tensors import byte_view
from accel_ckpt.io.storage import Location, Storage
from accel_ckpt.rank_group import RankGroup
from accel_state.errors import CheckpointError


def complete(
    peers: RankGroup, storage: Storage, folder: Location, written: Sequence[Mapping[str, FileRecord]], digest: Digest
) -> None:
    """Sends the files that each rank has ``written`` into the ``folder`` of every machine.

    Collective: every rank of the group must call this. Each file is sent from its writer directly to the keepers of the
    other copies, block by block, and its digests are compared on arrival. A rank with an error continues to send or
    receive until the others are done, and raises then.

    Raises:
        CheckpointError: a file could not be read or written, or differs from what was sent; or a rank has ended.
    """
    problems: list[Exception] = []
    for writer, records in enumerate(written):
        takers = [rank for rank in peers.keepers if peers.nodes[rank] != peers.nodes[writer]]
        for name, record in sorted(records.items()):
            place = folder / name
            try:
                if peers.rank == writer:
                    _send(peers, storage, place, record, takers)
                elif peers.rank in takers:
                    _take(peers, storage, place, record, writer, digest)
            except CheckpointError as error:
                problems.append(error)
            except RuntimeError as lost:  # the connection is broken, so the rank cannot continue
                raise CheckpointError(f"copying {place}: a rank is gone or does not answer: {lost}") from lost
    if problems:
        raise problems[0]


def _send(peers: RankGroup, storage: Storage, place: Location, record: FileRecord, takers: Sequence[int]) -> None:
    import torch
    import torch.distributed as dist

    buffer = torch.empty(min(BLOCK, record.size), dtype=torch.uint8, device="cpu")
    problem: CheckpointError | None = None
    with ExitStack() as opened:
        source: ByteSource | None = None
        try:
            source = opened.enter_context(closing(storage.open(place)))
        except CheckpointError as error:
            problem = error
        for begin in range(0, record.size, BLOCK):
            block = buffer[: record.size - begin]
            try:
                if source is not None:
                    source.read_into(begin, byte_view(block))
            except CheckpointError as error:
                problem = error
            for taker in takers:
                dist.send(block, group=peers.group, group_dst=taker)
    if problem is not None:
        raise problem


def _take(peers: RankGroup, storage: Storage, place: Location, record: FileRecord, writer: int, digest: Digest) -> None:
    arriving = _Arriving(peers, record.size, writer)
    try:
        # One buffer receives block after block, so no thread may still read it when the next arrives: no threads.
        found = storage.write(place, Content(lambda: iter(arriving), record.size, digest, threads=0))
    finally:
        for _ in arriving:
            pass
    if found != record:
        raise CheckpointError(f"{place}: what arrived is not what rank {writer} has written")


@final
class _Arriving(Iterator[memoryview]):
    """Receives the blocks of a file from its writer, in one reused buffer."""

    def __init__(self, peers: RankGroup, size: int, writer: int) -> None:
        import torch

        self._peers, self._left, self._writer = peers, size, writer
        self._buffer: torch.Tensor = torch.empty(min(BLOCK, size), dtype=torch.uint8, device="cpu")

    def __next__(self) -> memoryview:
        import torch.distributed as dist

        if not self._left:
            raise StopIteration
        block: Any = self._buffer[: self._left]
        self._left -= block.numel()
        try:
            dist.recv(block, group=self._peers.group, group_src=self._writer)
        except RuntimeError:
            self._left = 0
            raise
        return byte_view(block)
