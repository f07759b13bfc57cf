"""A series of checkpoints in one folder: numbered, found again, pruned."""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, final

from accel_ckpt.checkpoint import Checkpoint, open_checkpoint, read_manifest
from accel_ckpt.manifest import MANIFEST
from accel_ckpt.peers import Peers
from accel_ckpt.retention import Retention, SavedCheckpoint, keep_all, to_remove
from accel_ckpt.staging import discard, sweep
from accel_ckpt.tree import Json, Tree, decode
from accel_state.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LOG = logging.getLogger(__name__)
NUMBERED = re.compile(r"checkpoint_(0|[1-9][0-9]{0,17})")


@final
class CheckpointDirectory:
    """``checkpoint_0``, ``checkpoint_1``, ... in ``path``; ``retention`` decides which stay when a new one is there.

    Methods that act (``save``, ``latest``, ``prune``, ``sweep``, ``next_path``) are for all ranks of ``group``; rank 0
    decides, so that ranks whose view of the file system lags behind do not disagree.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        retention: Retention | None = None,
        group: "ProcessGroup | None" = None,
    ) -> None:
        self.path = Path(path).absolute()
        self.retention = keep_all() if retention is None else retention
        self.group = group

    def entries(self) -> list[SavedCheckpoint]:
        """The committed checkpoints in order of their numbers, whether or not they are intact. Not a collective."""
        numbered = sorted((int(m[1]), p) for p, m in self._named() if os.path.lexists(p / MANIFEST))
        return [SavedCheckpoint(number, path, _metadata(path)) for number, path in numbered]

    def next_path(self) -> Path:
        """Where the next checkpoint goes: one number above all that are taken."""
        return Peers.of(self.group).first(f"numbering in {self.path}", self._next)

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

        saved = save(self.next_path(), state, local=local, metadata=metadata, group=self.group, overwrite=False)
        self.prune()
        return saved

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint all of whose bytes are as written; None if there is none.

        Damaged ones are passed over with a warning that says what is wrong with them.
        """
        peers = Peers.of(self.group)
        for path in reversed(peers.first(f"looking into {self.path}", self._committed)):
            try:
                return open_checkpoint(path, group=peers.group)
            except CheckpointError as error:
                if peers.rank == 0:
                    _LOG.warning("passing over %s, trying an older one: %s", path.name, error)
        return None

    def prune(self) -> list[Path]:
        """Removes what ``retention`` does not keep; never the newest, nor the newest that is whole."""
        return Peers.of(self.group).first(f"pruning {self.path}", self._prune)

    def prune_alone(self) -> list[Path]:
        """What ``prune`` does, without asking the other ranks; for one rank only."""
        return self._prune()

    def sweep(self) -> list[Path]:
        """Removes what killed saves left here; the folders that another run is writing right now are left alone."""
        return Peers.of(self.group).first(f"sweeping {self.path}", lambda: sweep(self.path))

    def _named(self) -> list[tuple[Path, re.Match[str]]]:
        if not self.path.is_dir():
            return []
        found = ((entry, NUMBERED.fullmatch(entry.name)) for entry in self.path.iterdir() if not entry.is_symlink())
        return [(entry, match) for entry, match in found if match is not None]

    def _committed(self) -> list[Path]:
        return [path for _, path in sorted((int(m[1]), p) for p, m in self._named() if os.path.lexists(p / MANIFEST))]

    def _next(self) -> Path:
        taken = [int(match[1]) for _, match in self._named()]
        return self.path / f"checkpoint_{max(taken, default=-1) + 1}"

    def _prune(self) -> list[Path]:
        saved = self.entries()
        if len(saved) < 2:
            return []
        whole = next((entry.number for entry in reversed(saved) if _is_whole(entry.path)), None)
        removed = []
        for entry in to_remove(saved, self.retention, frozenset() if whole is None else frozenset({whole})):
            discard(entry.path)
            removed.append(entry.path)
        return removed


def _is_whole(path: Path) -> bool:
    """Whether the manifest is sealed and every file has its size; comparing all bytes at each save costs too much."""
    try:
        manifest = read_manifest(path)
        return all((path / name).lstat().st_size == record.size for name, record in manifest.files.items())
    except (CheckpointError, OSError):
        return False


def _metadata(path: Path) -> Mapping[str, Json]:
    try:
        metadata = decode(read_manifest(path).metadata, _refuse)
    except CheckpointError:
        return {}
    return metadata if isinstance(metadata, Mapping) else {}


def _refuse(key: str, path: object) -> object:
    raise CheckpointCorruptError(f"a tensor {key!r} in the metadata")
