"""A series of checkpoints in one folder: numbered, found again, pruned."""

import logging
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, final

from accel_ckpt.checkpoint import Checkpoint, open_checkpoint, read_manifest
from accel_ckpt.manifest import MANIFEST
from accel_ckpt.peers import Peers
from accel_ckpt.retention import Retention, SavedCheckpoint, keep_all, to_remove
from accel_ckpt.storage import Location, is_folder, locate, storage_of
from accel_ckpt.tree import Json, Tree, decode
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LOG = logging.getLogger(__name__)
NUMBERED = re.compile(r"checkpoint_(0|[1-9][0-9]{0,17})")


@final
class CheckpointDirectory:
    """``checkpoint_0``, ``checkpoint_1``, ... in ``path``; ``retention`` decides which stay when a new one is there.

    Methods that act (``save``, ``latest``, ``prune``, ``sweep``, ``next_path``) are for all ranks of ``group``; rank 0
    decides, so that ranks whose view of the file system lags behind do not disagree. With ``alone`` this process acts
    by itself, though it is one of several.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        retention: Retention | None = None,
        group: "ProcessGroup | None" = None,
        alone: bool = False,
    ) -> None:
        self.path = locate(path)
        self._storage = storage_of(self.path)
        self.retention = keep_all() if retention is None else retention
        self.group = group
        self._alone = alone
        self._peers = Peers(None) if alone else Peers.of(group)

    def entries(self) -> list[SavedCheckpoint]:
        """The committed checkpoints in order of their numbers, whether or not they are intact. Not a collective."""
        return [SavedCheckpoint(number, path, _metadata(path)) for number, path in self._committed()]

    def alone(self) -> "CheckpointDirectory":
        """The same series for this process by itself."""
        return CheckpointDirectory(self.path, retention=self.retention, group=self.group, alone=True)

    def next_path(self, *, at_least: int = 0) -> Location:
        """Where the next checkpoint goes: one number above all that are taken, or ``at_least``."""
        number = self._peers.first(f"numbering in {self.path}", lambda: max([at_least - 1, *self._numbers()]) + 1)
        return self.path / f"checkpoint_{number}"

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
        from accel_ckpt.saving import save

        saved = save(
            self.next_path(),
            state,
            local=local,
            metadata=metadata,
            group=self.group,
            overwrite=False,
            alone=self._alone,
        )
        self.prune()
        return saved

    def latest(self, accept: Callable[[Checkpoint], object] | None = None) -> Checkpoint | None:
        """The newest checkpoint all of whose bytes are as written; None if there is none.

        Damaged ones are passed over with a warning that says what is wrong with them. ``accept`` is asked instead of
        comparing all bytes, if it is given, and raises CheckpointCorruptError on all ranks to pass one over; so what
        is needed can be read and compared in one go.
        """
        peers = self._peers
        for _, path in reversed(peers.first(f"looking into {self.path}", self._committed)):
            try:
                checkpoint = open_checkpoint(path, verify=accept is None, group=peers.group)
                if accept is not None:
                    accept(checkpoint)
                return checkpoint
            except CheckpointMismatchError:
                raise
            except CheckpointError as error:
                if peers.rank == 0:
                    _LOG.warning("passing over %s, trying an older one: %s", path.name, error)
        return None

    def surplus(self, *, thorough: bool = False) -> list[SavedCheckpoint]:
        """What pruning would remove, oldest first: never the newest, nor the newest that is whole. Not a collective.

        Whole is what has every file in its size; with ``thorough`` every byte is compared, as ``verify`` does.
        """
        saved = self.entries()
        if len(saved) < 2:
            return []
        whole = next((entry.number for entry in reversed(saved) if _is_whole(entry.path, thorough)), None)
        return to_remove(saved, self.retention, frozenset() if whole is None else frozenset({whole}))

    def prune(self, *, thorough: bool = False) -> list[Location]:
        """Removes the ``surplus``."""
        return self._peers.first(f"pruning {self.path}", lambda: self._prune(thorough))

    def _prune(self, thorough: bool) -> list[Location]:
        going = [entry.path for entry in self.surplus(thorough=thorough)]
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

    def _committed(self) -> list[tuple[int, Location]]:
        places = ((number, self.path / f"checkpoint_{number}") for number in self._numbers())
        return [(number, place) for number, place in places if self._has_manifest(place)]

    def _has_manifest(self, place: Location) -> bool:
        try:
            return MANIFEST in self._storage.listing(place)
        except FileNotFoundError:  # another run has removed it
            return False


def _is_whole(place: Location, thorough: bool) -> bool:
    try:
        if thorough:
            open_checkpoint(place).close()
            return True
        manifest = read_manifest(place)
        seen = storage_of(place).listing(place / manifest.folder if manifest.folder else place)
    except (CheckpointError, FileNotFoundError):
        return False
    return all(seen.get(name) == record.size for name, record in manifest.files.items())


def _metadata(path: Location) -> Mapping[str, Json]:
    try:
        metadata = decode(read_manifest(path).metadata, _refuse)
    except CheckpointError:
        return {}
    return metadata if isinstance(metadata, Mapping) else {}


def _refuse(key: str, path: object) -> object:
    raise CheckpointCorruptError(f"a tensor {key!r} in the metadata")
