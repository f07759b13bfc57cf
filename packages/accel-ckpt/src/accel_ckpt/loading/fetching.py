"""Fetch of state trees from a checkpoint: planned by each rank alone, read by all ranks at the same time."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch.nn.parameter import is_lazy

from accel_ckpt.format.manifest import Manifest
from accel_ckpt.format.tensors import as_dtensor, memory_key, placement_key
from accel_ckpt.format.tree import Json, Tree, decode
from accel_ckpt.format.tree import Path as TreePath
from accel_ckpt.loading.cooperative_read import RankReads, covered
from accel_ckpt.loading.opened_files import OpenedFiles
from accel_ckpt.loading.tensor_reader import ReadPlan, Request, TensorReader
from accel_ckpt.rank_group import RankGroup

Place = Callable[[TreePath, torch.dtype, tuple[int, ...]], "torch.Tensor | None"]
Fetched = dict[str, Callable[[], Tree]]
"""By name, a function that moves a tree's tensors to their placement and returns the tree."""


@final
class Requests:
    """Trees with placeholders for tensors, and the tensors to read for them; tied tensors are read once."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self.wanted: list[Request] = []

    def add(
        self, document: Json, like: Mapping[TreePath, Any], place: Place | None = None, *, in_place: bool = False
    ) -> Tree:
        """Adds a tree; ``like`` and ``place`` give the placement of its tensors, as in ``Checkpoint.read``."""
        known: dict[str, list[int]] = {}

        def request(key: str, path: TreePath) -> "_Wanted":
            entry = self._reader.entry(key)
            here = path in like
            model = like[path] if here else None
            if not here and place is not None:
                model = place(path, self._reader.dtype(key), entry.shape)
            if not isinstance(model, torch.Tensor) or is_lazy(model) or tuple(model.shape) != entry.shape:
                model = None
            wanted = Request(key, model, in_place and here and model is not None)
            return _Wanted(self._number(wanted, known.setdefault(key, [])))

        return decode(document, request)

    def _number(self, request: Request, same: list[int]) -> int:
        for number in same:
            if _destination(self.wanted[number]) == _destination(request):
                return number
        same.append(len(self.wanted))
        self.wanted.append(request)
        return same[-1]


@final
class PlannedFetch:
    """One rank's part of a fetch, planned alone and read by all ranks at the same time; does not exchange errors."""

    def __init__(
        self,
        manifest: Manifest,
        files: OpenedFiles,
        peers: RankGroup,
        plan: ReadPlan,
        trees: Mapping[str, Tree],
        verified: Collection[str] | None,
    ) -> None:
        self._manifest, self._files, self._peers, self._plan, self._trees = manifest, files, peers, plan, trees
        # Files that have been verified; None: blocks that no rank reads are not verified.
        self._verified = verified
        self.reads = plan.reads
        """Blocks that this rank reads; all ranks must have each other's before they read."""

    def read(self, rank_reads: Sequence[RankReads]) -> Fetched:
        """Reads this rank's tensors into host memory and verifies its share of the blocks.

        ``rank_reads`` are those of all ranks. Collective: every rank of the group must call this. That holds only if
        blocks are sent between machines.

        Raises:
            CheckpointCorruptError: names the file and the bytes that do not match their digest.
        """
        puts = self._plan.read(rank_reads, self._peers, self._others(rank_reads))
        return {name: partial(self._filled, name, puts) for name in self._trees}

    def trust(self, rank_reads: Sequence[RankReads]) -> None:
        """Marks the blocks that all ranks have verified; called once all ranks are known to have succeeded."""
        read = covered(rank_reads, self._peers.neighbours)
        for file in self._files:
            file.trust(read.get(file.name, ()) if self._verified is None else file.unchecked())

    def _others(self, rank_reads: Sequence[RankReads]) -> list[tuple[str, int]]:
        """Returns this rank's share of the blocks that no rank reads; ranks that see the same copy split them alike.

        All files are opened, which checks that they exist and have the right size.
        """
        if self._verified is None:
            return []
        read = covered(rank_reads, self._peers.neighbours)
        blocks = [
            (file.name, number)
            for file in [self._files[name] for name in self._manifest.every_file]
            if file.name not in self._verified
            for number in range(len(file.record.blocks))
            if number not in read.get(file.name, ())
        ]
        share, shares = self._peers.neighbours.index(self._peers.rank), len(self._peers.neighbours)
        return blocks[len(blocks) * share // shares : len(blocks) * (share + 1) // shares]

    def _filled(self, name: str, puts: Sequence[Callable[[], torch.Tensor]]) -> Tree:
        tensors: dict[int, torch.Tensor] = {}

        def tensor(number: int) -> torch.Tensor:
            if number not in tensors:
                tensors[number] = puts[number]()
            return tensors[number]

        return fill(self._trees[name], tensor)


@final
class _Wanted:
    """Placeholder in a tree for a tensor that is not read yet."""

    def __init__(self, number: int) -> None:
        self.number = number


def fill(tree: Tree, tensor: Callable[[int], torch.Tensor]) -> Tree:
    """Replaces the placeholders of ``tree`` by tensors, by their index in ``Requests.wanted``."""
    if isinstance(tree, _Wanted):
        return tensor(tree.number)
    if isinstance(tree, dict):
        return {key: fill(value, tensor) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(fill(value, tensor) for value in tree)
    return tree


def _destination(request: Request) -> object:
    """Returns a key that is equal for two requests of one tensor that can have the same result."""
    model = request.like
    memory = memory_key(model) if request.in_place and model is not None else None
    if model is None or as_dtensor(model) is None:
        return "cpu" if model is None or model.device.type == "meta" else str(model.device), memory
    return placement_key(model), memory
