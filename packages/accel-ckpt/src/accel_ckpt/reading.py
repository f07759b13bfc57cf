"""Tensors out of files: for every tensor wanted, just the ranges that its part needs, several at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from socket import gethostname
from typing import NamedTuple, final

import torch

from accel_ckpt.blocks import read_range
from accel_ckpt.container import Span, itemsize, read_header, stored_as
from accel_ckpt.jobs import run_jobs
from accel_ckpt.layout import Box, Layout, boxes, is_run, local_shape, run_start, whole
from accel_ckpt.manifest import MANIFEST, Manifest, Part, TensorEntry
from accel_ckpt.memory import new_tensor
from accel_ckpt.opened_files import OpenedFiles
from accel_ckpt.peers import Peers
from accel_ckpt.sharing import Interest, Parts, Place, compared_by, read_for_all, wanted_by_all
from accel_ckpt.storage import Storage
from accel_ckpt.tensors import (
    apart,
    as_dtensor,
    byte_view,
    distributed_like,
    dtensor_layout,
    dtype_of,
    own_memory,
    placement_key,
    row_major,
)
from accel_state.errors import CheckpointCorruptError

# Tensors for other devices are read and moved in groups of about this many bytes.
_BATCH = 2**30
Puts = list[Callable[[], torch.Tensor]]
"""For each tensor that has been read, a function that puts it into its place and returns it."""


class Request(NamedTuple):
    """A tensor to read: its name in the manifest, and the tensor that it is placed like (None: whole, on the CPU)."""

    key: str
    like: torch.Tensor | None = None
    in_place: bool = False
    """Whether it is read into the memory of ``like``, and ``like`` is the result, where that can be."""


@final
class TensorReader:
    """Reads tensors of one checkpoint out of its ``files``."""

    def __init__(self, manifest: Manifest, files: OpenedFiles, storage: Storage) -> None:
        self._manifest, self._files, self._storage = manifest, files, storage
        self._headers: dict[str, Mapping[str, Span]] = {}
        # Where the tensors of a file begin, so where its header ends.
        self._begins: dict[str, int] = {}

    def entry(self, key: str) -> TensorEntry:
        """What the manifest says of a tensor."""
        entry = self._manifest.tensors.get(key)
        if entry is None:
            raise CheckpointCorruptError(f"{MANIFEST}: no tensor {key!r:.200}")
        return entry

    def dtype(self, key: str) -> torch.dtype:
        """A tensor's dtype."""
        found = dtype_of(self.entry(key).dtype)
        if found is None:
            raise CheckpointCorruptError(f"this torch has no dtype {self.entry(key).dtype!r}, which {key} has")
        return found

    def read(self, wanted: Sequence[Request]) -> list[torch.Tensor]:
        """A tensor of the saved dtype for each request, in groups that bound what the host's memory holds."""
        results: list[torch.Tensor] = []
        for batch in _batches(wanted, lambda key: prod(self.entry(key).shape) * self.dtype(key).itemsize):
            results += [put() for put in self.plan(lambda batch=batch: batch, Peers(None))()]  # type: ignore[misc]
        return results

    def plan(self, wanted: Callable[[], Sequence[Request]], peers: Peers) -> Callable[[], Puts]:
        """As ``read``, in two steps: now headers are read and compared with the manifest, and no tensor is touched.

        What is returned reads all of them, into this machine's memory. ``peers`` take both steps together: each
        compares a share of what several read, or reads it for all.
        """
        work = _Work()
        targets: list[_Target] = []

        def plan() -> Interest:
            requests = wanted()
            memories = apart([own_memory(r.like, self.dtype(r.key)) if r.in_place else None for r in requests])  # type: ignore[arg-type]
            for request, memory in zip(requests, memories, strict=True):
                key, like = request.key, request.like
                targets.append(_Target(key, self.entry(key), self.dtype(key), like, memory=memory))
            for target in targets:
                self._plan(target, work)
            return Interest(gethostname(), {name: tuple(blocks) for name, blocks in self._blocks(work).items()})

        interests = peers.together("planning what to read", plan)

        def fetch() -> Puts:
            self._read_for_all(work, interests, peers)
            compares = compared_by(interests, peers.neighbours)
            peers.together("reading", lambda: self._run(work, lambda place: compares(peers.rank, place)))
            return [target.finish for target in targets]

        return fetch

    def read_box(self, key: str, box: Box) -> torch.Tensor:
        """One part of a tensor, on the CPU."""
        layout = tuple(((start, start + size),) for start, size in zip(box.offset, box.shape, strict=True))
        target, work = _Target(key, self.entry(key), self.dtype(key), None, layout), _Work()
        self._plan(target, work)
        self._blocks(work)
        self._run(work, lambda place: True)
        return target.tensor

    def span(self, part: Part, entry: TensorEntry) -> Span:
        """Where a part lies in its file; what the file says of it must be what the manifest says."""
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
        """Cuts what is to be read into blocks; their numbers by file.

        Those with a header that nobody has compared yet are among them, so that it is before its numbers are believed.
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

    def _read_for_all(self, work: "_Work", interests: Sequence[Interest], peers: Peers) -> None:
        """Fills blocks that all want from one reader, where each would read them for itself and that is slower."""
        readers = len({interest.host for interest in interests}) if self._storage.cached else peers.size
        if readers < 2 or len(peers.keepers) > 1:
            return
        common = wanted_by_all(interests)
        blocks = [(self._files[name], number, work.blocks[name, number]) for name, number in common]
        for place in common[: read_for_all(peers, blocks, readers=readers, lanes=self._storage.threads)]:
            del work.blocks[place]

    def _run(self, work: "_Work", compares: Callable[[Place], bool]) -> None:
        fills = [
            partial(self._files[name].fill, number, parts, compare=compares((name, number)))
            for (name, number), parts in work.blocks.items()
        ]
        run_jobs(fills, self._storage.threads)
        run_jobs(work.strided, self._storage.threads)

    def _plan(self, target: "_Target", work: "_Work") -> None:
        size = itemsize(target.entry.dtype)
        filled = 0
        for box, here in target.boxes:
            for part in target.entry.parts:
                common = part.box.intersect(box)
                if common is None:
                    continue
                filled += common.volume
                span = self.span(part, target.entry)
                ranges = work.ranges.setdefault(part.file, [])
                inside = _shift(common, box, here)
                if is_run(common, part.box) and is_run(inside, target.whole):
                    begin = span.begin + run_start(common, part.box) * size
                    place = run_start(inside, target.whole) * size
                    view = target.bytes[place : place + common.volume * size]
                    ranges.append((begin, view))
                else:
                    work.strided.append(partial(self._copy, target, span, part, common, inside))
        if filled != prod(target.shape):
            raise CheckpointCorruptError(f"{MANIFEST}: the parts of {target.key!r} overlap or leave gaps")

    def _copy(self, target: "_Target", span: Span, part: Part, common: Box, inside: Box) -> None:
        """Copies a box that lies in pieces, out of the mapped file: only the pages that it touches are read."""
        file = self._files[part.file]
        size = itemsize(target.entry.dtype)
        last = Box(tuple(a + n - 1 for a, n in zip(common.offset, common.shape, strict=True)), common.shape)
        begin = span.begin + run_start(common, part.box) * size
        end = span.begin + (run_start(last, part.box) + 1) * size
        content = torch.frombuffer(file.content(begin, end), dtype=torch.uint8)
        aligned = content if begin % size == 0 else content.clone()
        saved = torch.as_strided(aligned.view(target.tensor.dtype), common.shape, row_major(part.box.shape))
        target.tensor[inside.within(target.whole)].copy_(saved)


def placed_like(model: torch.Tensor | None) -> object:
    """Equal for two models that ask for the same place."""
    if model is None or as_dtensor(model) is None:
        return "cpu" if model is None or model.device.type == "meta" else str(model.device)
    return placement_key(model)


@final
@dataclass(slots=True)
class _Work:
    """What is to be read: ranges of files with memory for each, the same in blocks, and copies of what is strided."""

    ranges: dict[str, list[tuple[int, memoryview]]] = field(default_factory=dict)
    blocks: dict[Place, Parts] = field(default_factory=dict)
    strided: list[Callable[[], None]] = field(default_factory=list)


@final
class _Target:
    """A tensor that is being filled: this rank's part of it in CPU memory, and how to make the result of that."""

    def __init__(
        self,
        key: str,
        entry: TensorEntry,
        dtype: torch.dtype,
        like: torch.Tensor | None,
        part: Layout | None = None,
        *,
        memory: torch.Tensor | None = None,
    ) -> None:
        self.key, self.entry, self.like = key, entry, like
        dtensor = None if like is None else as_dtensor(like)
        layout = part or (whole(entry.shape) if dtensor is None else dtensor_layout(key, dtensor))
        self.shape = (0,) * len(entry.shape) if layout is None else local_shape(layout)
        if dtensor is not None and layout is None:
            self.shape = tuple(dtensor._local_tensor.shape)
        self.boxes = [] if layout is None else boxes(layout)
        self.whole = Box((0,) * len(self.shape), self.shape)
        self.in_place = memory is not None and tuple(memory.shape) == self.shape
        self.tensor = memory if self.in_place and memory is not None else new_tensor(self.shape, dtype)
        self.bytes = byte_view(self.tensor)

    def finish(self) -> torch.Tensor:
        if self.like is None:
            return self.tensor
        if self.in_place:
            return self.like
        dtensor = as_dtensor(self.like)
        if dtensor is None:
            return self.tensor if self.like.device.type == "meta" else self.tensor.to(self.like.device)
        device = dtensor._local_tensor.device
        local = self.tensor.to(dtensor.device_mesh.device_type if device.type == "meta" else device)
        placed: torch.Tensor = distributed_like(local, dtensor)
        return placed


def _shift(common: Box, box: Box, here: Box) -> Box:
    """``common``, which lies inside ``box``, in the coordinates of the memory where ``box`` lies at ``here``."""
    return Box(tuple(c - b + h for c, b, h in zip(common.offset, box.offset, here.offset, strict=True)), common.shape)


def _batches(wanted: Sequence[Request], size_of: Callable[[str], int]) -> Iterator[list[Request]]:
    """All at once for the CPU, else groups of bounded size, so that host memory does not hold a whole model."""
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
