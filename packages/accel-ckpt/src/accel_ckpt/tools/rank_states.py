"""Checkpoint of several ranks, written by one process that has the states of all of them."""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from accel_ckpt._version import __version__
from accel_ckpt.format.blocks import Content, FileRecord
from accel_ckpt.format.manifest import Manifest, pack
from accel_ckpt.format.tree import Json, Tree
from accel_ckpt.io.storage import locate, staged_at
from accel_ckpt.loading.checkpoint import Checkpoint, open_checkpoint
from accel_ckpt.rank_group import RankGroup
from accel_ckpt.saving.plan import Draft, RankPart, join_entries, make_draft, make_part
from accel_state.errors import CheckpointError


def save_for_ranks(
    path: str | os.PathLike[str],
    state: Mapping[str, Tree],
    local: Sequence[Mapping[str, Tree]],
    *,
    metadata: Mapping[str, Json] | None = None,
    overwrite: bool = False,
) -> Checkpoint:
    """Saves ``state``, which is common to all ranks, and the own state of each rank, as that many ranks would. Local.

    Raises:
        CheckpointError: there is no rank, a value cannot be stored, or ``path`` is taken or cannot be written.
    """
    if not local:
        raise CheckpointError("local is empty; a checkpoint has the states of 1 or more ranks")
    planned = [_planned(state if rank == 0 else {}, own, metadata, rank) for rank, own in enumerate(local)]
    place = locate(path)
    with staged_at(place, overwrite=overwrite) as (storage, staged):
        records: dict[str, FileRecord] = {}
        for _, part in planned:
            for name, document in part.documents.items():
                records[name] = storage.write(staged.folder / name, Content.of(document))
            if part.items:
                size = len(part.header) + part.nbytes
                content = Content(part.pieces, size, threads=0)
                records[part.tensors_name] = storage.write(staged.folder / part.tensors_name, content)
        manifest = Manifest(
            id=staged.id,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            world_size=len(planned),
            files=records,
            tensors=join_entries([part.entries for _, part in planned]),
            metadata=planned[0][0].metadata,
            writer={"accel-ckpt": __version__},
            digest="crc32",
            folder=staged.subfolder,
        )
        staged.seal(pack(manifest))
    return open_checkpoint(place, verify=False)


def _planned(
    state: Mapping[str, Tree], own: Mapping[str, Tree], metadata: Mapping[str, Json] | None, rank: int
) -> tuple[Draft, RankPart]:
    alone = RankGroup(None)
    alone.rank = rank
    draft = make_draft(state, own, metadata, alone)
    return draft, make_part(draft, draft.trees, None, alone)
