"""Reader of tensors: reads only the byte ranges of this rank's shards, several at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import NamedTuple, final

import torch

from accel_ckpt.format.blocks import CheckedFile, read_range
from accel_ckpt.format.manifest import MANIFEST, Manifest, Part, TensorEntry
from accel_ckpt.format.safetensors_file import Span, read_header, stored_as
from accel_ckpt.format.shard_layout import Box, Layout, boxes, is_run, local_shape, run_start, whole
from accel_ckpt.format.tensors import (
    apart,
    as_dtensor,
    byte_view,
    distributed_like,
    dtensor_layout,
    dtype_of,
    own_memory,
    row_major,
)
from accel_ckpt.io.pinned_ring import PinnedRing
from accel_ckpt.io.storage import Storage
from accel_ckpt.io.thread_pool import Seat, run_jobs
from accel_ckpt.loading.cooperative_read import Parts, Place, RankReads, assign_verifiers, read_for_all, wanted_by_all
from accel_ckpt.loading.opened_files import OpenedFiles
from accel_ckpt.private import shard_of
from accel_ckpt.rank_group import RankGroup
from accel_state.device.huge_pages import new_tensor
from accel_state.device.pinned import uses_pinned_memory
from accel_state.errors import CheckpointCorruptError

# Tensors for other devices are read and moved in batches of about this many bytes.
_BATCH = 2**30
Puts = list[Callable[[], torch.Tensor]]
"""For each tensor that has been read, a function that moves it to its placement and returns it."""


class Request(NamedTuple):
    """Tensor to read: its name in the manifest, and a tensor with its placement (None: full tensor on the CPU)."""

    key: str
    like: torch.Tensor | None = None
    in_place: bool = False
    """Whether to read into the memory of ``like`` where possible, so that ``like`` is the result."""


@final
class TensorReader:
    """Reads tensors of one checkpoint from its ``files``."""

    def __init__(self, manifest: Manifest, files: OpenedFiles, storage: Storage) -> None:
        self._manifest, self._files, self._storage = manifest, files, storage
        self._headers: dict[str, Mapping[str, Span]] = {}
        # First byte of the tensors of a file, i.e. the size of its header.
        self._begins: dict[str, int] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def entry(self, key: str) -> TensorEntry:
        """Returns the manifest's entry of a tensor."""
        entry = self._manifest.tensors.get(key)
        if entry is None:
            raise CheckpointCorruptError(f"{MANIFEST}: no tensor {key!r:.200}")
        return entry

    def dtype(self, key: str) -> torch.dtype:
        """Returns the dtype of a tensor."""
        name = self.entry(key).dtype
        found = self._dtypes.get(name) or dtype_of(name)
        if found is None:
            raise CheckpointCorruptError(f"this torch has no dtype {name!r}, which {key} has")
        self._dtypes[name] = found
        return found

    def read(self, wanted: Sequence[Request]) -> list[torch.Tensor]:
        """Reads a tensor of the saved dtype for each request, in batches that limit host memory."""
        results: list[torch.Tensor] = []
        for batch in _batches(wanted, lambda key: prod(self.entry(key).shape) * self.dtype(key).itemsize):
            planned = self.plan(batch)
            results += [put() for put in planned.read([planned.reads], RankGroup(None))]
        return results

    def plan(self, wanted: Sequence[Request]) -> "ReadPlan":
        """Does the first half of ``read``, without tensors: reads headers and compares them with the manifest."""
        entries = [(self.entry(request.key), self.dtype(request.key)) for request in wanted]
        memories = [
            own_memory(request.like, dtype) if request.in_place and request.like is not None else None
            for request, (_, dtype) in zip(wanted, entries, strict=True)
        ]
        shares: dict[object, _Shard] = {}
        work, targets = _Work(), []
        for (key, like, _), (entry, dtype), memory in zip(wanted, entries, apart(memories), strict=True):
            targets.append(_Target(key, entry, dtype, like, _shard(key, entry, like, shares), memory))
            self._plan(targets[-1], work)
        blocks = {name: tuple(numbers) for name, numbers in self._blocks(work).items()}
        besides = {name: tuple(sorted(numbers)) for name, numbers in work.mapped.items()}
        return ReadPlan(self._files, self._storage, work, targets, RankReads(Seat.own(), blocks, besides))

    def read_box(self, key: str, box: Box) -> torch.Tensor:
        """Reads one box of a tensor onto the CPU."""
        layout = tuple(((start, start + size),) for start, size in zip(box.offset, box.shape, strict=True))
        target, work = _Target(key, self.entry(key), self.dtype(key), None, _Shard.of(layout)), _Work()
        self._plan(target, work)
        self._blocks(work)
        _run(self._files, work, self._storage.threads)
        return target.tensor

    def span(self, part: Part, entry: TensorEntry) -> Span:
        """Returns the location of a part in its file; raises if the file's header contradicts the manifest."""
        if part.file not in self._headers:
            file = self._files[part.file]
            spans = read_header(partial(read_range, file.source), file.record.size, part.file)
            self._headers[part.file] = spans
            self._begins[part.file] = min((span.begin for span in spans.values()), default=file.record.size)
        span = self._headers[part.file].get(part.key)
        if span is None:
            raise CheckpointCorruptError(f"{part.file}: no tensor {part.key!r}")
        if (span.code, span.shape) != stored_as(entry.dtype, part.box.shape):
            raise CheckpointCorruptError(f"{part.file}: {part.key!r} is {span.code} {span.shape}, the manifest differs")
        return span

    def _blocks(self, work: "_Work") -> dict[str, list[int]]:
        """Splits the ranges to read into blocks; returns their numbers by file.

        Includes unverified blocks of the header, so that the header is verified before the numbers in it are trusted.
        """
        numbers: dict[str, list[int]] = {}
        for name, ranges in work.ranges.items():
            file = self._files[name]
            header = file.unchecked(0, self._begins[name])
            blocks: dict[int, Parts] = {**dict.fromkeys(header, ()), **file.by_block(ranges)}
            for number in sorted(blocks):
                work.blocks[name, number] = blocks[number]
                numbers.setdefault(name, []).append(number)
        return numbers

    def _plan(self, target: "_Target", work: "_Work") -> None:
        size, entry = target.tensor.element_size(), target.entry
        moves = target.shard.moves(entry)
        if sum(move.volume for move in moves) != target.tensor.numel():
            raise CheckpointCorruptError(f"{MANIFEST}: the parts of {target.key!r} overlap or leave gaps")
        for move in moves:
            part = entry.parts[move.part]
            begin = self.span(part, entry).begin + move.source * size
            if move.offset is not None:
                view = target.bytes[move.offset * size : (move.offset + move.volume) * size]
                work.ranges.setdefault(part.file, []).append((begin, view))
                continue
            file, end = self._files[part.file], begin + move.reach * size
            work.mapped.setdefault(part.file, set()).update(file.touched(begin, end))
            work.strided.append(partial(_copy, file, begin, end, target, part.box, move))


@final
class ReadPlan:
    """Reads of one process, planned by itself; ``reads`` describes them to the ranks that read at the same time."""

    def __init__(
        self, files: OpenedFiles, storage: Storage, work: "_Work", targets: "Sequence[_Target]", reads: RankReads
    ) -> None:
        self._files, self._storage, self._work, self._targets = files, storage, work, targets
        self.reads = reads

    def read(self, rank_reads: Sequence[RankReads], peers: RankGroup, others: Sequence[Place] = ()) -> Puts:
        """Reads all tensors into host memory, and verifies this process's share of the blocks.

        ``rank_reads`` are those of all ``peers``, which call this at the same time. Of the ranks of one machine that
        read a block, one verifies all of it, or reads it for all. Blocks in ``others`` are verified too.

        Collective: every rank of the group must call this. Blocks may be sent between ranks; the caller must exchange
        errors.

        Raises:
            CheckpointCorruptError: names the file and the bytes that differ.
        """
        self._read_for_all(rank_reads, peers)
        compares = assign_verifiers(rank_reads, peers.neighbours)
        most = self._storage.threads
        threads = self.reads.seat.threads([one.seat for one in rank_reads], most) if self._storage.cached else most
        _run(self._files, self._work, threads, lambda place: compares(peers.rank, place), others)
        _mark_written(self._targets)
        ring = PinnedRing()
        return [partial(target.finish, ring) for target in self._targets]

    def _read_for_all(self, rank_reads: Sequence[RankReads], peers: RankGroup) -> None:
        """Fills blocks that all ranks read from one reader each, if the ranks share no cache and that is faster."""
        machines = {reads.seat.host for reads in rank_reads}
        readers = len(machines) if self._storage.cached else peers.size
        if readers < 2 or len(peers.keepers) > 1:
            return
        common = wanted_by_all(rank_reads)
        blocks = [(self._files[name], number, self._work.blocks[name, number]) for name, number in common]
        for place in common[: read_for_all(peers, blocks, readers=readers, lanes=self._storage.threads)]:
            del self._work.blocks[place]


def _run(
    files: OpenedFiles,
    work: "_Work",
    threads: int,
    compares: Callable[[Place], bool] = lambda place: True,
    others: Sequence[Place] = (),
) -> None:
    fills = [
        partial(files[name].fill, number, parts, compare=compares((name, number)))
        for (name, number), parts in work.blocks.items()
    ]
    run_jobs([*fills, *(partial(files[name].check, number) for name, number in others)], threads)
    run_jobs(work.strided, threads)


def _copy(file: CheckedFile, begin: int, end: int, target: "_Target", outer: Box, move: "_Move") -> None:
    """Copies a box that is not contiguous in the mapped file: only the pages that it touches are read."""
    content = torch.frombuffer(file.content(begin, end), dtype=torch.uint8)
    aligned = content if begin % target.tensor.element_size() == 0 else content.clone()
    saved = torch.as_strided(aligned.view(target.tensor.dtype), move.common.shape, row_major(outer.shape))
    target.tensor[move.inside.within(target.shard.whole)].copy_(saved)


@final
@dataclass(slots=True)
class _Work:
    """Planned reads: ranges of files with target memory, the same split into blocks, and copies of strided boxes."""

    ranges: dict[str, list[tuple[int, memoryview]]] = field(default_factory=dict)
    blocks: dict[Place, Parts] = field(default_factory=dict)
    strided: list[Callable[[], None]] = field(default_factory=list)
    mapped: dict[str, set[int]] = field(default_factory=dict)
    """Blocks that ``strided`` copies from, and verifies, by file."""


@final
@dataclass(frozen=True, slots=True)
class _Move:
    """Elements that a shard takes from one saved part of a tensor.

    Attributes:
        part: index of the saved part.
        volume: number of the elements.
        source: offset of the first of them in the saved part.
        reach: elements of the saved part from the first to the last of them.
        offset: offset of the first of them in the shard; None if they are not contiguous on either side.
        common: their box in the tensor.
        inside: their box in the shard.
    """

    part: int
    volume: int
    source: int
    reach: int
    offset: int | None
    common: Box
    inside: Box


@final
@dataclass(frozen=True, slots=True)
class _Shard:
    """This process's shard of a tensor: its local shape, and its boxes, as in ``shard_layout.boxes``."""

    shape: tuple[int, ...]
    boxes: Sequence[tuple[Box, Box]]
    whole: Box
    known: dict[tuple[Box, ...], list[_Move]] = field(default_factory=dict)
    """Moves by the boxes of the saved parts: most tensors of a shape are saved in the same boxes."""

    @classmethod
    def of(cls, layout: Layout) -> "_Shard":
        shape = local_shape(layout)
        return cls(shape, boxes(layout), Box((0,) * len(shape), shape))

    def moves(self, entry: TensorEntry) -> list[_Move]:
        """Returns what to take from the parts of a saved tensor of this shape."""
        saved = tuple([part.box for part in entry.parts])
        if saved not in self.known:
            self.known[saved] = list(self._moves(saved))
        return self.known[saved]

    def _moves(self, saved: tuple[Box, ...]) -> Iterator[_Move]:
        for box, here in self.boxes:
            for part, outer in enumerate(saved):
                common = box.intersect(outer)
                if common is None:
                    continue
                inside = _shift(common, box, here)
                source = run_start(common, outer)
                reach = run_start(_last(common), outer) - source + 1
                contiguous = is_run(common, outer) and is_run(inside, self.whole)
                place = run_start(inside, self.whole) if contiguous else None
                yield _Move(part, common.volume, source, reach, place, common, inside)


def _shard(key: str, entry: TensorEntry, like: torch.Tensor | None, known: dict[object, _Shard]) -> _Shard:
    """Returns the shard for the placement of ``like``; ``known`` caches it for tensors of equal shape and placement."""
    dtensor = None if like is None else as_dtensor(like)
    if dtensor is None:
        same: object = entry.shape
        if same not in known:
            known[same] = _Shard.of(whole(entry.shape))
        return known[same]
    local = tuple(shard_of(dtensor).shape)
    same = (entry.shape, local, id(dtensor.device_mesh), dtensor.placements)
    if same not in known:
        layout = dtensor_layout(key, dtensor)
        known[same] = _Shard(local, [], Box((0,) * len(local), local)) if layout is None else _Shard.of(layout)
    return known[same]


@final
class _Target:
    """Tensor that is being read: this process's shard in CPU memory, and the conversion to the result."""

    def __init__(
        self,
        key: str,
        entry: TensorEntry,
        dtype: torch.dtype,
        like: torch.Tensor | None,
        shard: _Shard,
        memory: torch.Tensor | None = None,
    ) -> None:
        self.key, self.entry, self.like, self.shard = key, entry, like, shard
        self.in_place = memory is not None and tuple(memory.shape) == shard.shape
        self.tensor = memory if self.in_place and memory is not None else new_tensor(shard.shape, dtype)
        self.bytes = byte_view(self.tensor)

    def finish(self, ring: PinnedRing) -> torch.Tensor:
        """Converts the shard to the kind of ``like``, on its device."""
        if self.like is None:
            return self.tensor
        if self.in_place:
            return self.like
        dtensor = as_dtensor(self.like)
        if dtensor is None:
            return self.tensor if self.like.device.type == "meta" else self._on(self.like.device, ring)
        device = shard_of(dtensor).device
        device = torch.device(dtensor.device_mesh.device_type) if device.type == "meta" else device
        local = self._on(device, ring)
        placed: torch.Tensor = distributed_like(local, dtensor)
        return placed

    def _on(self, device: torch.device, ring: PinnedRing) -> torch.Tensor:
        return ring.to_device(self.tensor, device) if uses_pinned_memory(device) else self.tensor.to(device)


def _mark_written(targets: "Sequence[_Target]") -> None:
    """Counts the reads into tensors as changes in place, which autograd and caches of weights look for."""
    read = [target.like for target in targets if target.in_place and target.like is not None]
    shards = [like if (dtensor := as_dtensor(like)) is None else shard_of(dtensor) for like in read]
    torch.autograd.graph.increment_version([shard for shard in shards if not shard.is_inference()])


def _last(box: Box) -> Box:
    """Returns the last element of a box."""
    return Box(tuple(a + n - 1 for a, n in zip(box.offset, box.shape, strict=True)), (1,) * len(box.shape))


def _shift(common: Box, box: Box, here: Box) -> Box:
    """Converts ``common``, which lies inside ``box``, to coordinates of a memory in which ``box`` lies at ``here``."""
    return Box(tuple(c - b + h for c, b, h in zip(common.offset, box.offset, here.offset, strict=True)), common.shape)


def _batches(wanted: Sequence[Request], size_of: Callable[[str], int]) -> Iterator[list[Request]]:
    """Yields one batch for the CPU, otherwise batches of limited size, so that the host never holds a full model."""
    batch: list[Request] = []
    total = 0
    for request in wanted:
        batch.append(request)
        on_host = request.like is None or request.like.device.type in ("cpu", "meta")
        total += 0 if on_host else size_of(request.key)
        if total >= _BATCH:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
