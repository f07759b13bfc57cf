"""A committed checkpoint, open for reading: by name, by shard, at any world size."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeVar, final

import torch

from accel_ckpt.format.blocks import BLOCK, CheckedFile, read_full
from accel_ckpt.format.manifest import MANIFEST, MAX_DOCUMENT, TREE, Manifest, local_file, unpack
from accel_ckpt.format.shard_layout import Box
from accel_ckpt.format.tree import Json, Tree, decode, leaves
from accel_ckpt.format.tree import Path as TreePath
from accel_ckpt.io.storage import Location, locate, storage_of
from accel_ckpt.io.thread_pool import run_jobs
from accel_ckpt.loading.cooperative_read import RankReads
from accel_ckpt.loading.fetching import Fetched, Place, PlannedFetch, Requests, fill
from accel_ckpt.loading.foreign import advice
from accel_ckpt.loading.nearby import below, beside
from accel_ckpt.loading.opened_files import OpenedFiles
from accel_ckpt.loading.tensor_reader import Request, TensorReader
from accel_ckpt.loading.tree_diff import Difference, compare
from accel_ckpt.rank_group import RankGroup, Ranks
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError

T = TypeVar("T")
# Number of times that a checkpoint that was replaced while it was read is opened again.
_REPLACED = 3


def open_checkpoint(path: str | os.PathLike[str], *, verify: bool = True, group: Ranks = None) -> "Checkpoint":
    """Opens the checkpoint at ``path`` without reading its tensors.

    With ``verify`` every byte of every file is compared with its digest now, so that damage is found before anything is
    loaded; without ``verify``, each block is verified when it is first read.

    Collective: every rank of the group must call this. The ranks of ``group`` share the verification, and if one of
    them raises, all do. They read once all ranks have called, so a checkpoint that one of them wrote before its call is
    found. Without a group, this process works alone. With a ``PerNode`` each machine opens the copy at its own
    ``path``, and all copies must be of one save.

    Raises:
        CheckpointError: there is no checkpoint, a newer version wrote it, or ranks see different checkpoints.
        CheckpointCorruptError: files are missing, truncated or altered; names each.
    """
    return with_checkpoint(path, lambda checkpoint: checkpoint, verify=verify, group=group)


def with_checkpoint(
    path: str | os.PathLike[str], use: Callable[["Checkpoint"], T], *, verify: bool = True, group: Ranks = None
) -> T:
    """Opens the checkpoint at ``path`` as ``open_checkpoint`` does, and returns the result of ``use``.

    Files are opened when they are first read, so a save that replaces the checkpoint meanwhile looks like damage: then
    the new one is opened and ``use`` called with it. ``use`` must raise its CheckpointCorruptError on all ranks.

    Collective: every rank of the group must call this.
    """
    peers = RankGroup(None) if group is None else RankGroup.of(group)
    left = _REPLACED
    while True:
        checkpoint = _opened(path, peers)
        try:
            if verify:
                checkpoint.verify(group=peers)
            return use(checkpoint)
        except BaseException as error:
            checkpoint.close()
            damaged = isinstance(error, CheckpointCorruptError)
            if not left or not damaged or not any(peers.run_on_all(f"opening {path}", checkpoint.is_replaced)):
                raise
            left -= 1


def _opened(path: str | os.PathLike[str], peers: RankGroup) -> "Checkpoint":
    """Opens the checkpoint of which all ranks see the same save, after all ranks have called.

    Collective: every rank of the group must call this. Each rank opens what it sees at once. A rank that has just
    written the checkpoint sees that save, so if all ranks see the same save, it is the right one; otherwise all look
    again, after the last rank has called.
    """
    opened: list[Checkpoint] = []

    def identity() -> str:
        opened.append(Checkpoint(locate(path)))
        return opened[-1].manifest.id

    def seen() -> str | None:
        try:
            return identity()
        except CheckpointError:
            return None

    if peers.size > 1:
        told = peers.run_on_all(f"opening {path}", seen)
        if told[0] is not None and len({*told}) == 1:
            return opened[0]
    told = peers.run_on_all(f"opening {path}", identity)
    if other := [rank for rank, one in enumerate(told) if one != told[0]]:
        raise CheckpointError(
            f"{path}: rank 0 sees the save {told[0]} there and rank {other[0]} the save {told[other[0]]}; every "
            "machine needs a copy of the same"
        )
    return opened[-1]


@final
class Checkpoint:
    """Saved state trees by name, rank-local trees and metadata at ``path``. Any number of ranks may read it."""

    def __init__(self, path: Location) -> None:
        self.path = path
        self._storage = storage_of(path)
        self.manifest = read_manifest(path)
        self._files = OpenedFiles(path, self.manifest, self._storage)
        self._documents: dict[str, Mapping[str, Json]] = {}
        self._reader = TensorReader(self.manifest, self._files, self._storage)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, names={self.names})"

    def __getstate__(self) -> object:
        raise TypeError("a Checkpoint holds open files; pass its path and open it there")

    @property
    def names(self) -> list[str]:
        """Names of the saved state trees, in order."""
        return list(self._document(TREE))

    @property
    def metadata(self) -> dict[str, Any]:
        """JSON metadata of the save."""
        metadata = decode(self.manifest.metadata, _no_tensor)
        if not isinstance(metadata, dict):
            raise CheckpointCorruptError(f"{MANIFEST}: the metadata have no names")
        return metadata

    @property
    def world_size(self) -> int:
        """World size of the save."""
        return self.manifest.world_size

    def read(self, name: str, like: Tree | None = None, *, strict: bool = True, place: Place | None = None) -> Tree:
        """Reads the state tree ``name`` into new tensors of the saved dtypes. Not a collective.

        ``like`` is a tree whose tensors give the placement of the tensors at the same paths: with a DTensor its mesh
        and placements, of which only this rank's shard is read; with a plain tensor its device. Tensors without one are
        read in full on the CPU. ``place(path, dtype, shape)`` may return such a tensor for paths that ``like`` does not
        have (the state of an optimizer before its first step). Tensors that were tied when saved are tied in the
        result.

        Raises:
            CheckpointError: there is no such name.
            CheckpointMismatchError: ``strict``, and paths or shapes of ``like`` differ from the saved ones; lists them.
            CheckpointCorruptError: a block does not match its digest.
        """
        tree = self._tree(TREE, name)
        if like is not None and strict:
            difference = self.compare(name, like)
            if difference:
                raise CheckpointMismatchError(
                    f"{name!r} in {self.path} is not like what it is loaded into: {difference}"
                )
        return self._read(tree, {} if like is None else leaves(like), place)

    def fetch(
        self,
        likes: Mapping[str, Tree],
        *,
        places: Mapping[str, Place | None] | None = None,
        group: Ranks = None,
        in_place: bool = False,
        verify: bool = False,
    ) -> Fetched:
        """Reads each name of ``likes`` as ``read`` does with ``strict=False`` (None: full tensors), in two steps.

        This call reads everything into host memory and verifies it; the function that it returns for each name moves
        the tensors to their placement. All states of a run are therefore known to be intact before the first one is
        loaded, and nothing is read twice.

        Collective: every rank of the group must call this. The ranks of ``group`` (None: this process alone) pass the
        same names: a block that several ranks read is verified by one of them, or read by one and sent to the others if
        that is faster, and if one rank raises, all do. With ``verify`` the blocks that no rank reads are verified as
        well, a share by each rank.

        With ``in_place`` a tensor is read into the memory of the tensor in ``likes``, which then is the result, if that
        is contiguous CPU memory of the saved dtype that no other tensor shares; tensors of ``places`` are never
        written. Damage within a block is then found after parts of ``likes`` have been written; all other damage
        before.
        """
        return self.plan(likes, places=places, group=group, in_place=in_place, verify=verify)()

    def plan(
        self,
        likes: Mapping[str, Tree],
        *,
        places: Mapping[str, Place | None] | None = None,
        group: Ranks = None,
        in_place: bool = False,
        verify: bool = False,
    ) -> Callable[[], Fetched]:
        """Does the first half of ``fetch``, before tensors are read: compares headers with the manifest and ``likes``.

        With ``in_place`` it also compares every file's size, and verifies the files without tensors, of which the ranks
        of a machine take a share each. The returned function does the second half.

        Collective: every rank of the group must call this. The same holds for the returned function. Without a
        ``group``, this process works alone.
        """
        peers = RankGroup(None) if group is None else RankGroup.of(group)
        planned: list[PlannedFetch] = []

        def plan() -> RankReads:
            planned.append(self.planned(likes, places=places, peers=peers, in_place=in_place, verify=verify))
            return planned[0].reads

        rank_reads = peers.run_on_all("planning what to read", plan)

        def fetch() -> Fetched:
            fetched: list[Fetched] = []
            peers.run_on_all("reading", lambda: fetched.append(planned[0].read(rank_reads)))
            planned[0].trust(rank_reads)
            return fetched[0]

        return fetch

    def planned(
        self,
        likes: Mapping[str, Tree],
        *,
        places: Mapping[str, Place | None] | None = None,
        peers: RankGroup,
        in_place: bool,
        verify: bool,
    ) -> PlannedFetch:
        """Does this rank's part of ``plan``, for callers with a collective of their own. Not a collective.

        ``plan`` shows its use: all-gather the ``reads`` of each rank, then ``read``, and ``trust`` once no rank has
        failed.
        """
        if in_place:
            share = peers.neighbours.index(peers.rank)
            self._refuse(self._damage(share, len(peers.neighbours), tensors=False))
        requests, trees = Requests(self._reader), {}
        for name, like in likes.items():
            place = None if places is None else places.get(name)
            held = {} if like is None else leaves(like)
            trees[name] = requests.add(self._tree(TREE, name), held, place, in_place=in_place)
        compared = frozenset(self.documents if in_place else ())
        plan = self._reader.plan(requests.wanted)
        return PlannedFetch(self.manifest, self._files, peers, plan, trees, compared if verify else None)

    def read_local(self, name: str, rank: int) -> Tree | None:
        """Reads the rank-local tree ``name`` of ``rank``; None if there was no such rank or it saved no such name."""
        file = local_file(rank)
        if file not in self.manifest.files or name not in self._document(file):
            return None
        return self._read(self._document(file)[name], {}, None)

    def local_names(self, rank: int) -> list[str]:
        """Returns the names of the rank-local trees of ``rank``."""
        file = local_file(rank)
        return list(self._document(file)) if file in self.manifest.files else []

    def read_structure(self, name: str, tensor: Callable[[str], Any]) -> Tree:
        """Returns the tree ``name`` with ``tensor(stored name)`` in place of each tensor; reads JSON only."""

        def known(key: str, path: TreePath) -> Any:
            self._reader.entry(key)
            return tensor(key)

        return decode(self._tree(TREE, name), known)

    def facts(self, name: str, *, read: Callable[[TreePath], bool] = lambda path: False) -> Tree:
        """Returns the tree ``name`` with tensors on the meta device, i.e. shapes and dtypes; reads JSON only.

        Tensors at the paths that ``read`` accepts are read and verified, for small ones that others depend on.
        """
        return decode(
            self._tree(TREE, name), lambda key, path: self.read_tensor(key) if read(path) else self._entry_facts(key)
        )

    def read_tensor(self, key: str) -> torch.Tensor:
        """Reads one full tensor of the manifest onto the CPU."""
        return self._reader.read([Request(key)])[0]

    def read_box(self, key: str, box: Box) -> torch.Tensor:
        """Reads a box of one tensor of the manifest onto the CPU."""
        return self._reader.read_box(key, box)

    @property
    def documents(self) -> list[str]:
        """Names of the files that hold JSON and no tensors."""
        return [name for name in self.manifest.files if name.endswith(".json")]

    def document_bytes(self, name: str) -> bytes:
        """Reads one of the ``documents``."""
        file = self._files[name]
        return file.read(0, file.record.size)

    def extra_pieces(self, name: str) -> Iterator[bytes]:
        """Yields the content of a file of the user, one verified block at a time."""
        size = self.manifest.extra[name].size
        return (self._files[name].read(begin, min(begin + BLOCK, size)) for begin in range(0, size, BLOCK))

    def dtype_of(self, key: str) -> torch.dtype:
        """Returns the dtype of a tensor of the manifest."""
        return self._reader.dtype(key)

    def compare(self, name: str, like: Tree) -> Difference:
        """Compares paths, shapes and kinds of leaves of ``like`` with the saved tree ``name``; ignores values."""
        return compare(leaves(self.facts(name)), leaves(like))

    def verify(self, *, group: Ranks = None) -> None:
        """Compares every byte with its digest.

        Collective: every rank of the group must call this. The ranks of ``group`` (None: this process alone) share the
        work. Blocks that a rank has verified before, because it read them, are not read again.

        Raises:
            CheckpointCorruptError: names every file that is missing, truncated or altered.
        """
        peers = RankGroup(None) if group is None else RankGroup.of(group)
        if peers.size > 1:
            compared = {file.name: file.compared for file in self._files}
            told = peers.run_on_all(f"verifying {self.path}", lambda: compared)
            for rank in peers.neighbours:
                for name, blocks in told[rank].items():
                    self._trust(name, blocks)
        share = peers.neighbours.index(peers.rank)
        found = peers.run_on_all(f"verifying {self.path}", lambda: self._damage(share, len(peers.neighbours)))
        self._refuse(problem for problems in found for problem in problems)
        for name in self.manifest.every_file:
            file = self._files[name]
            file.trust(file.unchecked())

    def is_replaced(self) -> bool:
        """Whether another save has replaced this checkpoint since it was opened."""
        try:
            return read_manifest(self.path).id != self.manifest.id
        except CheckpointError:
            return False

    def close(self) -> None:
        """Closes the files; garbage collection of the checkpoint closes them too."""
        self._files.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, document: Json, like: Mapping[TreePath, Any], place: Place | None) -> Tree:
        requests = Requests(self._reader)
        tree = requests.add(document, like, place)
        return fill(tree, self._reader.read(requests.wanted).__getitem__)

    def _entry_facts(self, key: str) -> torch.Tensor:
        entry = self._reader.entry(key)
        return torch.empty(entry.shape, dtype=self._reader.dtype(key), device="meta")

    def _tree(self, file: str, name: str) -> Json:
        trees = self._document(file)
        if name not in trees:
            raise CheckpointError(f"{self.path} holds no {name!r}; it holds {', '.join(map(repr, trees)) or 'nothing'}")
        return trees[name]

    def _document(self, name: str) -> Mapping[str, Json]:
        if name not in self._documents:
            file = self._files[name]
            if file.record.size > MAX_DOCUMENT:
                raise CheckpointCorruptError(f"{name}: {file.record.size} bytes of JSON")
            try:
                document = json.loads(file.read(0, file.record.size))
                if not isinstance(document, dict):
                    raise ValueError("no object")
            except (ValueError, RecursionError) as error:
                raise CheckpointCorruptError(f"{name}: ill-formed: {error}") from error
            self._documents[name] = document
        return self._documents[name]

    def _trust(self, name: str, blocks: Sequence[int]) -> None:
        try:
            self._files[name].trust(blocks)
        except CheckpointError:  # this rank does not see the file, which ``_damage`` reports
            return

    def _refuse(self, problems: Iterable[str]) -> None:
        if damage := sorted(set(problems)):
            raise CheckpointCorruptError(f"{self.path} is damaged: {'; '.join(damage)}")

    def _damage(self, share: int, shares: int, *, tensors: bool = True) -> list[str]:
        """Verifies this rank's share of all blocks; returns problems. Without ``tensors``, only sizes of tensor files.

        All files are opened, which checks that they exist and have the right size.
        """
        problems: list[str] = []
        blocks: list[tuple[CheckedFile, int]] = []
        documents = frozenset(self.documents)
        for name in self.manifest.every_file:
            try:
                file = self._files[name]
                if tensors or name in documents:
                    blocks += [(file, number) for number in file.unchecked()]
            except CheckpointCorruptError as error:
                problems.append(str(error))

        def check(file: CheckedFile, number: int) -> None:
            try:
                file.check(number)
            except CheckpointCorruptError as error:
                problems.append(str(error))

        own = blocks[len(blocks) * share // shares : len(blocks) * (share + 1) // shares]
        run_jobs([partial(check, file, number) for file, number in own], self._storage.threads)
        return problems


def read_manifest(folder: Location) -> Manifest:
    """Reads and validates the manifest of the checkpoint at ``folder``.

    Raises:
        CheckpointError: there is no manifest, so this is not a checkpoint.
    """
    storage = storage_of(folder)
    try:
        names = storage.listing(folder)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {folder}{beside(storage, folder)}") from None
    if MANIFEST not in names:
        raise CheckpointError(
            f"{folder} has no {MANIFEST}, so it is not a complete checkpoint of this format"
            f"{advice(names) or below(storage, folder)}"
        )
    with closing(storage.open(folder / MANIFEST)) as source:
        return unpack(read_full(source, MANIFEST, MAX_DOCUMENT))


def _no_tensor(key: str, path: TreePath) -> Tree:
    raise CheckpointCorruptError(f"{MANIFEST}: a tensor {key!r} in the metadata")
