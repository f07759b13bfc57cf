"""A series of checkpoints in one folder: numbered, found again, pruned."""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import final

from accel_ckpt.format.manifest import MANIFEST
from accel_ckpt.format.tree import Json, Tree, decode
from accel_ckpt.io.storage import Location, is_folder, locate, storage_of
from accel_ckpt.loading.checkpoint import Checkpoint, open_checkpoint, read_manifest
from accel_ckpt.rank_group import RankGroup, Ranks
from accel_ckpt.series.retention import Retention, SavedCheckpoint, keep_all, to_remove
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError

_LOG = logging.getLogger(__name__)
NUMBERED = re.compile(r"checkpoint_(0|[1-9][0-9]{0,17})")


@final
class CheckpointDirectory:
    """``checkpoint_0``, ``checkpoint_1``, ... in ``path``; ``retention`` decides which stay when a new one is there.

    Methods that act (``save``, ``latest``, ``prune``, ``sweep``, ``next_path``) are for all ranks of ``group``; rank 0
    decides, so that ranks whose view of the file system lags behind do not disagree. With a ``PerNode`` the lowest rank
    of each machine acts on its copy of the series, and what counts is what all machines have. With ``alone`` this
    process acts by itself, though it is one of several.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        retention: Retention | None = None,
        group: Ranks = None,
        alone: bool = False,
    ) -> None:
        self.path = locate(path)
        self._storage = storage_of(self.path)
        self.retention = keep_all() if retention is None else retention
        self._peers = RankGroup(None) if alone else RankGroup.of(group)

    def entries(self) -> list[SavedCheckpoint]:
        """The committed checkpoints in order of their numbers, whether or not they are intact. Not a collective."""
        places = {number: self._place(number) for number in self._committed()}
        return [SavedCheckpoint(number, path, _Metadata(path)) for number, path in places.items()]

    def alone(self) -> "CheckpointDirectory":
        """The same series for this process by itself."""
        return self.among(RankGroup(None))

    def among(self, group: Ranks) -> "CheckpointDirectory":
        """The same series for other ranks."""
        return CheckpointDirectory(self.path, retention=self.retention, group=group)

    def is_empty(self) -> bool:
        """Whether no rank sees a committed checkpoint, intact or not."""
        return not any(self._peers.each_copy(f"looking into {self.path}", self._committed))

    def next_path(self, *, at_least: int = 0) -> Location:
        """Where the next checkpoint goes: one number above all that are taken, or ``at_least``."""
        last = self._peers.each_copy(f"numbering in {self.path}", lambda: max([at_least - 1, *self._numbers()]))
        return self._place(max(last) + 1)

    def save(
        self,
        state: Mapping[str, Tree],
        *,
        local: Mapping[str, Tree] | None = None,
        metadata: Mapping[str, Json] | None = None,
    ) -> Checkpoint:
        """Saves under the next number, then removes what ``retention`` no longer keeps.

        Raises:
            CheckpointError: as ``accel_ckpt.save``; nothing was removed.
        """
        from accel_ckpt.saving.transaction import save

        saved = save(
            self.next_path(),
            state,
            local=local,
            metadata=metadata,
            group=self._peers,
            overwrite=False,
        )
        self.prune()
        return saved

    def latest(self, accept: Callable[[Checkpoint], object] | None = None) -> Checkpoint | None:
        """The newest checkpoint all of whose bytes are as written; None if there is none.

        Damaged ones are passed over with a warning that says what is wrong with them. If ``accept`` is given, it is
        called instead of comparing all bytes, and raises CheckpointCorruptError on all ranks to pass one over; so the
        bytes that are needed can be read and compared at the same time.
        """
        tried: set[int] = set()
        while True:  # those that are there while others are tried may be pruned before it is their turn
            copies = [set(numbers) for numbers in self._peers.each_copy(f"looking into {self.path}", self._committed)]
            untried = set.union(*copies) - tried
            if not untried:
                return None
            if (found := self._first_intact(untried, copies, accept)) is not None:
                return found
            tried |= untried

    def _first_intact(
        self, numbers: set[int], copies: list[set[int]], accept: Callable[[Checkpoint], object] | None
    ) -> Checkpoint | None:
        peers = self._peers
        for number in sorted(numbers, reverse=True):
            path = self._place(number)
            checkpoint: Checkpoint | None = None
            try:
                if without := [rank for rank, seen in zip(peers.keepers, copies, strict=True) if number not in seen]:
                    raise CheckpointError(f"the machine of rank {without[0]} has no copy of it")
                checkpoint = open_checkpoint(path, verify=accept is None, group=peers)
                if accept is not None:
                    accept(checkpoint)
                return checkpoint
            except CheckpointMismatchError:
                raise
            except CheckpointError as error:
                if checkpoint is not None and not isinstance(error, CheckpointCorruptError):
                    raise  # by ``accept``, and not because of damage
                if peers.rank == 0:
                    _LOG.warning("passing over %s, trying an older one: %s", path.name, error)
        return None

    def surplus(self, *, thorough: bool = False) -> list[SavedCheckpoint]:
        """What pruning would remove, oldest first: never the newest, nor the newest that is whole. Not a collective.

        Whole is what has every file in its size; with ``thorough`` every byte is compared, as ``verify`` does. Where
        the policy goes by metadata that cannot be read, though it is not damaged, nothing is removed this time.
        """
        saved = self.entries()
        if len(saved) < 2:
            return []
        whole = next((entry.number for entry in reversed(saved) if _is_full(entry.path, thorough)), None)
        try:
            return to_remove(saved, self.retention, frozenset() if whole is None else frozenset({whole}))
        except _UnreadableError as error:
            _LOG.warning("%s: no checkpoint is removed this time, since metadata cannot be read: %s", self.path, error)
            return []

    def prune(self, *, thorough: bool = False) -> list[Location]:
        """Removes the ``surplus``; of several copies of a checkpoint all or none."""
        what = f"pruning {self.path}"
        seen = self._peers.each_copy(what, lambda: self._kept_and_surplus(thorough))
        kept = frozenset[int]().union(*(keeping for keeping, _ in seen))
        surplus = dict(zip(self._peers.keepers, (going for _, going in seen), strict=True))
        return self._peers.first(what, lambda: self._discard(surplus[self._peers.rank] - kept))

    def _kept_and_surplus(self, thorough: bool) -> tuple[frozenset[int], frozenset[int]]:
        going = frozenset(entry.number for entry in self.surplus(thorough=thorough))
        return frozenset(self._committed()) - going, going

    def _discard(self, numbers: frozenset[int]) -> list[Location]:
        going = [self._place(number) for number in sorted(numbers)]
        for path in going:
            self._storage.discard(path)
        return going

    def sweep(self, *, grace: float | None = None) -> list[Location]:
        """Removes what killed saves left here; what another run is writing right now is left alone.

        Where no lock tells whether the writer lives (object stores), leftovers are spared for ``grace`` seconds: a day
        unless given.
        """
        sweep = partial(self._storage.sweep, self.path, grace=grace)
        return self._peers.first(f"sweeping {self.path}", sweep)

    def _numbers(self) -> list[int]:
        """Those that are taken, by committed checkpoints or not, in order."""
        names = self._storage.listing(self.path) if is_folder(self._storage, self.path) else {}
        found = (NUMBERED.fullmatch(name) for name, size in names.items() if size is None)
        return sorted(int(match[1]) for match in found if match is not None)

    def _committed(self) -> list[int]:
        return [number for number in self._numbers() if self._has_manifest(self._place(number))]

    def _place(self, number: int) -> Location:
        return self.path / f"checkpoint_{number}"

    def _has_manifest(self, place: Location) -> bool:
        try:
            return MANIFEST in self._storage.listing(place)
        except FileNotFoundError:  # another run has removed it
            return False


def _is_full(place: Location, thorough: bool) -> bool:
    try:
        if thorough:
            open_checkpoint(place).close()
            return True
        manifest = read_manifest(place)
        seen = storage_of(place).listing(place / manifest.folder if manifest.folder else place)
    except (CheckpointError, FileNotFoundError):
        return False
    return all(seen.get(name) == record.size for name, record in manifest.files.items())


@final
class _UnreadableError(CheckpointError):
    """Metadata of a checkpoint that may well be intact."""


@final
class _Metadata(Mapping[str, Json]):
    """The metadata of one checkpoint, read when it is first needed: most policies go by numbers alone."""

    def __init__(self, path: Location) -> None:
        self._path = path

    @cached_property
    def _known(self) -> Mapping[str, Json]:
        try:
            metadata = decode(read_manifest(self._path).metadata, _refuse)
        except CheckpointCorruptError:
            return {}
        except CheckpointError as error:
            raise _UnreadableError(str(error)) from error
        return metadata if isinstance(metadata, Mapping) else {}

    def __getitem__(self, name: str) -> Json:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return repr(self._known)


def _refuse(key: str, path: object) -> object:
    raise CheckpointCorruptError(f"a tensor {key!r} in the metadata")
