"""Save transaction: every rank writes its files, then one rename commits the checkpoint."""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

from accel_ckpt._version import __version__
from accel_ckpt.format.blocks import DIGESTS, Content, Digest, FileRecord
from accel_ckpt.format.manifest import Manifest, TensorEntry, pack
from accel_ckpt.format.tree import Json, Tree
from accel_ckpt.io.atomic_folder import files_below
from accel_ckpt.io.storage import Location, Staged, Storage, Url, is_folder, locate, storage_of
from accel_ckpt.io.thread_pool import Seat, default_threads
from accel_ckpt.loading.checkpoint import Checkpoint, open_checkpoint
from accel_ckpt.rank_group import RankGroup, Ranks
from accel_ckpt.saving.extra_files import check_names, upload
from accel_ckpt.saving.per_node import complete
from accel_ckpt.saving.plan import Draft, RankPart, join_entries, make_draft, make_part
from accel_ckpt.saving.replicas import Summary, Terms, alike, kept_apart, merge_structures
from accel_state.errors import CheckpointError

_LOG = logging.getLogger(__name__)
# Called with the name of each stage just before the stage begins; tests kill the process there.
StageHook = Callable[[str], None]
_HOOKS = "hooks before saving"
MakeDraft = Callable[[Collection[str]], Draft]
"""Builds this rank's draft, with the states of the given names as rank-local."""


def save(  # noqa: PLR0913
    path: str | os.PathLike[str],
    state: Mapping[str, Tree],
    *,
    local: Mapping[str, Tree] | None = None,
    metadata: Mapping[str, Json] | None = None,
    group: Ranks = None,
    overwrite: bool = True,
    digest: Digest = "crc32",
    alone: bool = False,
    terms: Terms = Terms(),  # noqa: B008 (frozen)
) -> Checkpoint:
    """Saves named state trees under ``path``, which then holds all of them, or its previous contents after a failure.

    Collective: every rank of the group must call this. ``group`` defaults to torch's default group; without a group,
    this process saves alone. ``state`` is common to the ranks: the shards of a DTensor are written by the ranks that
    hold them, a plain tensor by one of the ranks. ``local`` is this rank's own state. ``metadata`` is JSON, kept in the
    manifest; rank 0's metadata and ``path`` are used. With ``alone`` this process saves by itself, although it is one
    of several. With a ``PerNode`` as ``group`` every machine gets a full checkpoint, at the ``path`` of its lowest
    rank; an overwrite is atomic on each machine, but not over all of them. ``digest`` detects damage; with "sha256" the
    manifest's seal covers every byte, for users who sign it.

    If replicas in ``state`` differ, rank 0's values are saved and a warning lists the paths, unless ``terms`` says
    otherwise. Values of several ranks are never mixed in one state.

    Raises:
        CheckpointError: on every rank if any rank failed, and ``path`` is unchanged; or, where two runs share a folder,
            the other one has removed the checkpoint already.
    """
    peers = RankGroup(None) if alone else RankGroup.of(group)
    make = partial(make_draft, state, local, metadata, peers)
    transaction = SaveTransaction.begin(peers, locate(path), make, overwrite=overwrite, terms=terms, digest=digest)
    transaction.finish(peers, transaction.part.pieces)
    return open_saved(transaction.target)


def open_saved(target: Location) -> Checkpoint:
    """Opens a checkpoint that has just been committed.

    Raises:
        CheckpointError: another run that keeps its last checkpoints in the same folder has removed it since.
    """
    try:
        return open_checkpoint(target, verify=False)
    except CheckpointError as error:
        if is_folder(storage_of(target), target):
            raise
        raise CheckpointError(
            f"{target} was saved, and has been removed since by another run that keeps its last checkpoints in the "
            "same folder; give each run a folder of its own"
        ) from error


@final
@dataclass(slots=True)
class SaveTransaction:
    """A save in progress: begun by all ranks together, then committed or dropped."""

    target: Location
    storage: Storage
    folder: Location
    part: RankPart
    label: "_Label"
    staging: Staged | None
    """The keeper's staging folder; None on other ranks."""
    threads: int
    """This rank's share of the CPUs, which the other ranks of its machine use too."""
    alike: bool = True
    """Whether all ranks have the same tensors, so that each can plan its files without communication."""
    extra: Mapping[str, FileRecord] = field(default_factory=dict)
    """Files that ``fill`` wrote into this rank's copy."""
    digest: Digest = "crc32"
    on_stage: StageHook = lambda stage: None

    @classmethod
    def begin(
        cls,
        peers: RankGroup,
        target: Location,
        draft: MakeDraft,
        *,
        overwrite: bool = True,
        part: RankPart | None = None,
        terms: Terms = Terms(),  # noqa: B008 (frozen)
        digest: Digest = "crc32",
    ) -> "SaveTransaction":
        """Plans the files of all ranks and creates the staging folder; writes no tensors yet.

        Collective: every rank of the group must call this. ``draft`` builds this rank's draft, or raises; it is called
        again with the names of states that turn out to be rank-local. ``part`` is this rank's plan if it was made
        before, under the assumption that all ranks have the same tensors.

        Raises:
            CheckpointError: on every rank if any rank cannot take part, or if that assumption was wrong.
        """
        place = _Place(peers, target, overwrite, digest)
        drafts: list[Draft] = []

        def prepare() -> "_RankFacts":
            drafts.append(draft(()))
            folder = place.made()
            label = None if place.staging is None or peers.rank else _Label.of(place.staging, drafts[0])
            return _RankFacts(drafts[0].structure.summary(), folder, str(target), label, Seat.own())

        try:
            if terms.fill is not None:
                place.fill(terms.fill)
            told = peers.run_on_all(place.what, prepare)
            same = alike([one.summary for one in told])
            if same:
                planned = part or make_part(drafts[0], drafts[0].trees, None, peers)
            else:
                planned, same = _plan(peers, target, drafts[0], draft, part, terms)
        except BaseException:
            if place.staging is not None:
                place.staging.drop()
            raise
        kept, label = told[peers.keeper], told[0].label
        assert label is not None
        folder, storage = locate(kept.folder), storage_of(target)
        threads = told[peers.rank].seat.threads([one.seat for one in told], default_threads())
        target = locate(kept.target)
        return cls(target, storage, folder, planned, label, place.staging, threads, same, place.extra, digest)

    def finish(
        self, peers: RankGroup, pieces: Callable[[], Iterable[memoryview]], *, threads: int | None = None
    ) -> None:
        """Writes this rank's files, and commits once all ranks have written theirs.

        Collective: every rank of the group must call this. ``pieces`` yields the bytes of this rank's tensor file;
        ``threads`` is the number of threads that digest them (None: this rank's share of the CPUs).
        """
        with self.dropped_on_error():
            if len(peers.keepers) == 1:  # only rank 0 needs the entries, and a large model has many
                written = partial(self._write, pieces, threads)
                peers.gather_to_first(f"saving {self.target}", written, self._seal_and_commit)
                return
            told = peers.run_on_all(f"saving {self.target}", lambda: self._write(pieces, threads))
            self.on_stage("copy")
            files = [records for records, _ in told]
            bring = partial(complete, peers, self.storage, self.folder, files, self.digest)
            peers.run_on_all(f"copying {self.target} to every machine", bring)
            # A copy is committed only if all copies can be.
            peers.run_on_keeper(f"sealing {self.target}", lambda: self._seal(told))
            peers.run_on_keeper(f"committing {self.target}", self._commit)

    @contextmanager
    def dropped_on_error(self) -> Iterator[None]:
        """Removes the written files if the block raises."""
        try:
            yield
        except BaseException:
            if self.staging is not None:
                self.staging.drop()
            raise

    def _write(self, pieces: Callable[[], Iterable[memoryview]], threads: int | None) -> "Written":
        if isinstance(self.folder, Path) and not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder}, which another rank has created, is not there on this one; is {self.folder.parent} a "
                "place that all ranks share? (machines that share none: group=PerNode(node=...), or save_on_each_node "
                "of an Accelerator's ProjectConfiguration)"
            )
        records: dict[str, FileRecord] = {}
        self.on_stage("write")
        for name, document in self.part.documents.items():
            records[name] = self.storage.write(self.folder / name, Content.of(document, self.digest))
        if self.part.items:
            name, size = self.part.tensors_name, len(self.part.header) + self.part.nbytes
            records[name] = self.storage.write(
                self.folder / name, Content(pieces, size, self.digest, self.threads if threads is None else threads)
            )
        self.on_stage("written")
        return records, self.part.entries

    def _seal(self, told: "list[Written]") -> None:
        assert self.staging is not None
        files = {name: record for records, _ in told for name, record in records.items()}
        _check_arrived(self.folder, self.storage.listing(self.folder), [records for records, _ in told])
        manifest = Manifest(
            id=self.label.id,
            created=self.label.created,
            world_size=len(told),
            files=files,
            tensors=join_entries([entries for _, entries in told]),
            metadata=self.label.metadata,
            writer=_writer(),
            digest=self.digest,
            folder=self.staging.subfolder,
            extra=self.extra,
        )
        self.on_stage("seal")
        self.staging.seal(pack(manifest))

    def _seal_and_commit(self, told: "list[Written]") -> None:
        self._seal(told)
        self._commit()

    def _commit(self) -> None:
        assert self.staging is not None
        self.on_stage("commit")
        self.staging.commit()
        self.on_stage("committed")


@final
class _Place:
    """Staging folder that the ranks write into, created once by the keeper of each copy."""

    def __init__(self, peers: RankGroup, target: Location, overwrite: bool, digest: Digest) -> None:
        self._peers, self._target, self._overwrite, self._digest = peers, target, overwrite, digest
        self.what = f"saving {target}"
        self.staging: Staged | None = None
        """The keeper's staging folder; None on other ranks."""
        self.extra: Mapping[str, FileRecord] = {}

    def made(self) -> str:
        """Creates the folder on a keeper and returns its path; empty on other ranks."""
        if len(self._peers.keepers) > 1 and isinstance(self._target, Url):
            raise CheckpointError(f"{self._target} is one place for all machines, so each cannot keep a copy there")
        if self._digest not in DIGESTS:
            raise CheckpointError(f"digest={self._digest!r}; expected one of {', '.join(map(repr, DIGESTS))}")
        if self._peers.keeps and self.staging is None:
            self.staging = storage_of(self._target).stage(self._target, overwrite=self._overwrite)
        return "" if self.staging is None else str(self.staging.folder)

    def fill(self, write: Callable[[Location], object]) -> None:
        """Calls ``write`` to add files to the folder, and records the added files.

        Collective: every rank of the group must call this. Behind a URL each rank writes into a folder of its own, and
        uploads the files that no lower rank has.
        """
        folder = self._peers.run_on_all(self.what, self.made)[self._peers.keeper]
        if not isinstance(self._target, Url):
            self._peers.run_on_all(_HOOKS, lambda: write(locate(folder)))
            self.extra = self._peers.run_on_all(self.what, self._brought)[self._peers.rank]
            return
        with TemporaryDirectory(prefix="accel-save-") as temporary:
            local = Path(temporary)
            self._peers.run_on_all(_HOOKS, lambda: write(local))
            told = self._peers.run_on_all(_HOOKS, lambda: _written_by_hooks(local))
            lower = {name for names in told[: self._peers.rank] for name in names}
            own = [name for name in told[self._peers.rank] if name not in lower]
            storage, place = storage_of(self._target), locate(folder)
            every = self._peers.run_on_all(self.what, lambda: upload(local, own, storage, place, self._digest))
        self.extra = {name: record for records in every for name, record in records.items()}

    def _brought(self) -> Mapping[str, FileRecord]:
        return {} if self.staging is None else self.staging.brought(self._digest)


def _written_by_hooks(folder: Path) -> list[str]:
    names = files_below(folder)
    check_names(names)
    return names


@final
@dataclass(frozen=True, slots=True)
class _Label:
    """Identity of a save, set by rank 0 and equal in every copy."""

    id: str
    created: str
    metadata: Json

    @classmethod
    def of(cls, staging: Staged, draft: Draft) -> "_Label":
        return cls(staging.id, datetime.now(UTC).isoformat(timespec="seconds"), draft.metadata)


Written = tuple[dict[str, FileRecord], dict[str, TensorEntry]]


@final
@dataclass(frozen=True, slots=True)
class _RankFacts:
    """Data that ranks exchange at the start of a save."""

    summary: Summary
    folder: str
    target: str
    label: _Label | None
    seat: Seat


def _plan(
    peers: RankGroup, path: Location, draft: Draft, make: MakeDraft, part: RankPart | None, terms: Terms
) -> tuple[RankPart, bool]:
    """Plans this rank's files if ranks have different states; also returns whether all have the same tensors.

    Collective: every rank of the group must call this.

    Raises:
        CheckpointError: states that must be equal differ; on all ranks.
    """
    what = f"saving {path}"
    structures = peers.run_on_all(what, lambda: draft.structure)
    merged = merge_structures(structures, terms)
    told = peers.run_on_all(what, lambda: kept_apart(structures, merged, terms, peers.rank))
    if any(told):
        made: list[Draft] = []
        peers.run_on_all(what, lambda: made.append(make(told[peers.rank])))
        draft = made[0]
        merged = merge_structures(peers.run_on_all(what, lambda: draft.structure), terms)
    differences = merged.differences
    if differences.places and peers.rank == 0:
        _LOG.warning(
            "%s: the ranks have different values at %s; those of rank 0 are saved",
            path,
            differences.shown(differences.places),
        )
    planned = make_part(draft, merged.trees, merged.holders, peers, differences.tensors)
    if part is not None:
        peers.run_on_all(what, lambda: _check_same(part, planned))
    everywhere = all(len(holders) == peers.size for holders in merged.holders.values())
    return planned, everywhere and not any(told) and not differences.tensors


def _check_same(part: RankPart, planned: RankPart) -> None:
    if part.items != planned.items:
        raise CheckpointError(
            "the ranks no longer bring the same tensors, which was found out when they could change; the next save "
            "asks first"
        )


def _check_arrived(folder: Location, seen: Mapping[str, int | None], written: Sequence[dict[str, FileRecord]]) -> None:
    """Raises unless rank 0 sees every file that a rank has written, with the right size."""
    for rank, records in enumerate(written):
        for name, record in records.items():
            if seen.get(name) != record.size:
                sees = f"sees {seen[name]}" if name in seen else "does not see it"
                raise CheckpointError(
                    f"rank {rank} wrote {record.size} bytes to {name} but rank 0 {sees}; is {folder.parent} a place "
                    "that all ranks share?"
                )


def _writer() -> dict[str, Any]:
    import torch

    return {"accel-ckpt": __version__, "torch": str(torch.__version__)}
