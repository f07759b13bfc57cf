"""Series of numbered checkpoints in one folder: saving, finding the latest, pruning."""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import final

from accel_ckpt.format.blocks import UnavailableError
from accel_ckpt.format.manifest import MANIFEST
from accel_ckpt.format.tree import Json, Tree, decode
from accel_ckpt.io.storage import Location, locate, storage_of
from accel_ckpt.loading.checkpoint import Checkpoint, open_checkpoint, read_manifest
from accel_ckpt.rank_group import RankGroup, Ranks
from accel_ckpt.series.retention import Retention, SavedCheckpoint, keep_all, keeps_all, to_remove
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError

_LOG = logging.getLogger(__name__)
_NUMBERED = re.compile(r"checkpoint_(0|[1-9][0-9]{0,17})")


def number_of(name: str) -> int | None:
    """Returns the number in the name of a checkpoint of a series; None for other names."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else int(match[1])


@final
class CheckpointDirectory:
    """``checkpoint_0``, ``checkpoint_1``, ... in ``path``; ``retention`` selects those that stay after a save.

    ``save``, ``latest``, ``prune``, ``sweep``, ``next_path`` and ``is_empty`` are collectives over ``group``. Rank 0
    decides, so that ranks whose view of the file system lags behind do not disagree. With a ``PerNode`` the lowest rank
    of each machine acts on its copy of the series, and a checkpoint counts if all machines have it. With ``alone`` this
    process acts by itself, although it is one of several.
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
        """Returns the committed checkpoints in order of their numbers, intact or not. Not a collective."""
        return self._entries(self._committed())

    def _entries(self, numbers: Sequence[int]) -> list[SavedCheckpoint]:
        places = {number: self._place(number) for number in numbers}
        return [SavedCheckpoint(number, path, _Metadata(path)) for number, path in places.items()]

    def alone(self) -> "CheckpointDirectory":
        """Returns the same series for this process alone."""
        return self.among(RankGroup(None))

    def among(self, group: Ranks) -> "CheckpointDirectory":
        """Returns the same series for the ranks of ``group``."""
        return CheckpointDirectory(self.path, retention=self.retention, group=group)

    def is_empty(self) -> bool:
        """Whether no rank sees a committed checkpoint, intact or not.

        Collective: every rank of the group must call this.
        """
        return not any(self._peers.run_on_each_keeper(f"looking into {self.path}", self._committed))

    def next_path(self, *, at_least: int = 0) -> Location:
        """Returns the location of the next checkpoint: one number above all existing ones, at least ``at_least``.

        Collective: every rank of the group must call this.
        """
        last = self._peers.run_on_each_keeper(
            f"numbering in {self.path}", lambda: max([at_least - 1, *self._numbers()])
        )
        return self._place(max(last) + 1)

    def save(
        self,
        state: Mapping[str, Tree],
        *,
        local: Mapping[str, Tree] | None = None,
        metadata: Mapping[str, Json] | None = None,
    ) -> Checkpoint:
        """Saves under the next number, then removes the checkpoints that ``retention`` does not keep.

        Collective: every rank of the group must call this.

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
        """Opens the newest checkpoint whose bytes all match their digests; None if there is none.

        Collective: every rank of the group must call this. Damaged checkpoints are skipped with a warning that
        describes the damage. ``accept``, if given, is called instead of the verification of all bytes, and skips a
        checkpoint by raising CheckpointCorruptError on all ranks; it can read and verify the needed bytes in one pass.

        Raises:
            CheckpointError: one that may be intact cannot be read now; an older one would lose what was trained since.
        """
        tried: set[int] = set()
        while True:  # listed again, because checkpoints may be pruned while others are tried
            copies = [
                set(numbers) for numbers in self._peers.run_on_each_keeper(f"looking into {self.path}", self._committed)
            ]
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
                    raise  # raised by ``accept`` for another reason than damage
                if checkpoint is None:  # the ranks may have different errors
                    peers.run_on_all(f"opening {path}", partial(_raise_unavailable, error))
                if peers.rank == 0:
                    _LOG.warning("passing over %s, trying an older one: %s", path.name, error)
        return None

    def surplus(self, *, thorough: bool = False) -> list[SavedCheckpoint]:
        """Returns the checkpoints to prune, oldest first; never the newest, nor the newest complete one.

        A checkpoint is complete if it has every file with its recorded size; with ``thorough``, if every byte matches
        its digest. If the policy needs metadata that cannot be read for another reason than damage, nothing is removed
        this time. Not a collective.
        """
        return self._surplus(self.entries(), thorough)

    def _surplus(self, saved: Sequence[SavedCheckpoint], thorough: bool) -> list[SavedCheckpoint]:
        if len(saved) < 2 or keeps_all(self.retention):
            return []
        whole = next((entry.number for entry in reversed(saved) if _is_full(entry.path, thorough)), None)
        try:
            return to_remove(saved, self.retention, frozenset() if whole is None else frozenset({whole}))
        except _UnreadableError as error:
            _LOG.warning("%s: no checkpoint is removed this time, since metadata cannot be read: %s", self.path, error)
            return []

    def prune(self, *, thorough: bool = False) -> list[Location]:
        """Removes the ``surplus``, of several copies of a checkpoint all or none; returns what this process removed.

        A checkpoint that cannot be removed stays, with a warning: the run that has saved a newer one goes on.

        Collective: every rank of the group must call this.
        """
        what = f"pruning {self.path}"
        seen = self._peers.run_on_each_keeper(what, lambda: self._kept_and_surplus(thorough))
        kept = frozenset[int]().union(*(keeping for keeping, _ in seen))
        surplus = dict(zip(self._peers.keepers, (going for _, going in seen), strict=True))
        return self._peers.run_on_keeper(what, lambda: self._discard(surplus[self._peers.rank] - kept))

    def _kept_and_surplus(self, thorough: bool) -> tuple[frozenset[int], frozenset[int]]:
        numbers = [] if keeps_all(self.retention) else self._committed()
        going = frozenset(entry.number for entry in self._surplus(self._entries(numbers), thorough))
        return frozenset(numbers) - going, going

    def _discard(self, numbers: frozenset[int]) -> list[Location]:
        removed = []
        for path in map(self._place, sorted(numbers)):
            try:
                self._storage.discard(path)
                removed.append(path)
            except CheckpointError as error:
                _LOG.warning("%s; it stays, although nothing keeps it", error)
        return removed

    def sweep(self, *, grace: float | None = None) -> list[Location]:
        """Removes leftovers of killed saves in the folder; saves in progress of other runs are left alone.

        Collective: every rank of the group must call this. In object stores, where no lock shows whether the writer is
        alive, leftovers younger than ``grace`` seconds (default: a day) stay.
        """
        sweep = partial(self._storage.sweep, self.path, grace=grace)
        return self._peers.run_on_keeper(f"sweeping {self.path}", sweep)

    def _numbers(self) -> list[int]:
        """Returns the existing numbers in order, of committed checkpoints and anything else with such a name.

        A link counts: a checkpoint may have been moved to another disk.
        """
        try:
            names = self._storage.names(self.path)
        except FileNotFoundError:
            return []
        return sorted(number for number in map(number_of, names) if number is not None)

    def _committed(self) -> list[int]:
        return [number for number in self._numbers() if self._has_manifest(self._place(number))]

    def _place(self, number: int) -> Location:
        return self.path / f"checkpoint_{number}"

    def _has_manifest(self, place: Location) -> bool:
        try:
            return MANIFEST in self._storage.names(place)
        except FileNotFoundError:  # another run has removed the folder
            return False


def _raise_unavailable(error: CheckpointError) -> None:
    if isinstance(error, UnavailableError):
        raise error


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
    """Metadata of a checkpoint cannot be read, although the checkpoint may be intact."""


@final
class _Metadata(Mapping[str, Json]):
    """Metadata of one checkpoint, read on first access, because most policies need numbers only."""

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
