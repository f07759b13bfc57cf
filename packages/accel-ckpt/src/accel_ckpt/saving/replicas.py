"""Comparison of replicas by digests, and the merge of the ranks' states into the one that is saved.

Each tensor is written by one of its replicas, so a state whose replicas differ would be a mixture of several ranks'
values. The digest of every tensor with several replicas shows that before anything is written. CRC-32 runs at memory
speed; of a large CUDA tensor sums of rows are digested instead, because otherwise every rank would copy the full tensor
to the host, which a save needs from one rank only.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from accel_ckpt.format.blocks import crc32, sha256
from accel_ckpt.format.tensors import byte_view, host_copy
from accel_ckpt.format.tree import Json, tensor_name
from accel_ckpt.io.storage import Location
from accel_ckpt.io.thread_pool import run_jobs
from accel_state.errors import CheckpointError

_JOB = 4 * 2**20
# CUDA tensors up to this many bytes are copied to the host in full.
_WHOLE = 2**20
_ROW = 256
Facts = tuple[str, tuple[int, ...]]
"""Dtype and shape."""


@final
@dataclass(frozen=True, slots=True)
class Terms:
    """Treatment of replicas that differ, and files that the user adds to a checkpoint.

    States named in ``own`` are saved rank by rank where ranks differ from the first one; of other states the first
    rank's values are saved, with a warning. Ranks with other keys differ too, unless each may hold a part of a state:
    the keys of all ranks are then one state. Those are the sharded states, the ones that are not in ``own``, and the
    ones in ``in_parts``. ``refused(path)`` returns advice for paths where that would be wrong: the
    save then fails with the advice.

    ``fill(folder)`` is called before the state is read, on all ranks, if all have it. The files that it writes into the
    folder become part of the checkpoint, with digests and in the same commit. Behind a URL the folder is a temporary
    one of this rank, and its files are uploaded. ``fill`` may still change the state. If several ranks write the same
    file, the last write counts, behind a URL that of the lowest rank.
    """

    own: Collection[str] = ()
    in_parts: Collection[str] = ()
    refused: Callable[[str], str | None] = lambda place: None
    fill: Callable[[Location], object] | None = None


@final
@dataclass(frozen=True, slots=True)
class StateStructure:
    """A rank's trees without tensors, dtype and shape of its full tensors, and digests of values."""

    trees: dict[str, Json]
    plain: dict[str, Facts]
    values: dict[str, tuple[tuple[int, ...] | None, str]]
    """For each tensor with several replicas: the ranks that hold one (None: all that have the name), and its digest."""
    sharded: frozenset[str]
    """States with sharded tensors."""

    def summary(self) -> "Summary":
        """Reduces the structure to digests, which suffice to find out whether ranks differ."""
        kind = sha256([json.dumps([self.trees, sorted(self.plain.items())]).encode()])
        sets: dict[tuple[int, ...] | None, list[tuple[str, str]]] = {}
        for name, (ranks, digest) in self.values.items():
            sets.setdefault(ranks, []).append((name, digest))
        return Summary(kind, {ranks: sha256([json.dumps(sorted(found)).encode()]) for ranks, found in sets.items()})


@final
@dataclass(frozen=True, slots=True)
class Summary:
    """A digest of trees, dtypes and shapes, and one of the values of all tensors with replicas on the same ranks."""

    kind: str
    values: Mapping[tuple[int, ...] | None, str]


@final
@dataclass(slots=True)
class Differences:
    """Differences between ranks, by state: the paths, and the ranks that differ from the first."""

    places: dict[str, set[str]] = field(default_factory=dict)
    ranks: dict[str, set[int]] = field(default_factory=dict)
    tensors: set[str] = field(default_factory=set)
    """Names of the tensors that differ."""
    misfits: dict[str, str] = field(default_factory=dict)
    """Descriptions of tensors that differ in dtype or shape, by state."""

    def add(self, state: str, place: str, rank: int) -> None:
        """Records that ``rank`` has another value at a path than the first rank that has the path."""
        self.places.setdefault(state, set()).add(place)
        self.ranks.setdefault(state, set()).add(rank)

    def shown(self, states: Collection[str]) -> str:
        """Formats paths and ranks for a message."""
        places = sorted(place for state in states for place in self.places[state])
        ranks = sorted({rank for state in states for rank in self.ranks[state]})
        more = f" and {len(places) - 5} more" if len(places) > 5 else ""
        return f"{', '.join(places[:5])}{more} (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"


@final
@dataclass(frozen=True, slots=True)
class Merged:
    """The merged state of all ranks: its trees, the holders of each full tensor, and the differences."""

    trees: dict[str, Json]
    holders: dict[str, tuple[int, ...]]
    differences: Differences


def alike(summaries: Sequence[Summary]) -> bool:
    """Whether all ranks have the same tensors, and all replicas have the same values."""
    everyone = range(len(summaries))
    return len({one.kind for one in summaries}) == 1 and all(
        len({summaries[rank].values.get(ranks) for rank in (everyone if ranks is None else ranks)}) == 1
        for one in summaries
        for ranks in one.values
    )


def value_digests(tensors: Mapping[str, torch.Tensor], threads: int | None = None) -> dict[str, str]:
    """Digests the bytes of each tensor, or the sums of its rows for large CUDA tensors (see the module's docstring)."""
    found: dict[tuple[str, int], str] = {}
    group: list[tuple[tuple[str, int], torch.Tensor]] = []
    jobs: list[Callable[[], None]] = []
    size = 0

    def work(pieces: Sequence[tuple[tuple[str, int], torch.Tensor]]) -> None:
        found.update((key, crc32([byte_view(host_copy(piece))])) for key, piece in pieces)

    for name, tensor in tensors.items():
        for number, piece in enumerate(_pieces(tensor)):
            group.append(((name, number), piece))
            size += piece.nbytes
            if size >= _JOB:
                jobs.append(lambda group=group: work(group))  # type: ignore[misc]
                group, size = [], 0
    jobs.append(lambda: work(group))
    run_jobs(jobs, threads)
    digests: dict[str, str] = {}
    for (name, _), digest in sorted(found.items()):
        digests[name] = digests.get(name, "") + digest
    return digests


def row_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sums groups of 256 neighbouring words (int32, or bytes) to int64 on the tensor's own device, for digests."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 4 == 0 and flat.data_ptr() % 4 == 0:
        flat = flat.view(torch.int32)
    end = flat.numel() // _ROW * _ROW
    return torch.cat([flat[:end].view(-1, _ROW).sum(1, dtype=torch.int64), flat[end:].to(torch.int64)])


def merge_structures(structures: Sequence[StateStructure], terms: Terms) -> Merged:
    """Merges the trees of ranks that differ. Where values differ, the first rank's value is used."""
    differences = Differences()
    trees = _merge_trees(structures, set(terms.own) - set(terms.in_parts) - _sharded(structures), differences)
    states = {tensor_name((state,)): state for state in trees}
    holders: dict[str, tuple[int, ...]] = {}
    for rank, structure in enumerate(structures):
        for name, facts in structure.plain.items():
            holders[name] = (*holders.get(name, ()), rank)
            first = holders[name][0]
            if (known := structures[first].plain[name]) != facts:
                state = states[name.partition("/")[0]]
                differences.add(state, name, rank)
                differences.misfits.setdefault(state, f"{name} is {known} on rank {first} and {facts} on rank {rank}")
    for rank, structure in enumerate(structures):
        for name, (ranks, digest) in structure.values.items():
            first = min(holders[name] if ranks is None else ranks)
            known_value = structures[first].values.get(name)
            if known_value is not None and known_value[1] != digest:
                differences.add(states[name.partition("/")[0]], name, rank)
                differences.tensors.add(name)
    return Merged(trees, holders, differences)


def kept_apart(structures: Sequence[StateStructure], merged: Merged, terms: Terms, rank: int) -> frozenset[str]:
    """Returns the states that this rank saves as its own because they differ from the first rank's.

    Raises:
        CheckpointError: values that must be equal differ, or tensors differ in dtype or shape; raised on all ranks.
    """
    differences = merged.differences
    own = {state for state in differences.places if state in terms.own} - _sharded(structures)
    for state, places in sorted(differences.places.items()):
        advice = next((text for place in sorted(places) if (text := terms.refused(place)) is not None), None)
        if advice is not None and state not in own:
            raise CheckpointError(f"the ranks have different values at {differences.shown([state])}: {advice}")
    for state, text in sorted(differences.misfits.items()):
        if state not in own:
            raise CheckpointError(f"{text}; what differs between ranks belongs into local")
    return frozenset(state for state in own if rank in differences.ranks[state])


def _merge_trees(
    structures: Sequence[StateStructure], full: Collection[str], differences: Differences
) -> dict[str, Json]:
    trees: dict[str, Json] = {}
    for rank, structure in enumerate(structures):
        for state, tree in structure.trees.items():
            conflicts: list[str] = []
            known = trees.get(state, tree)
            trees[state] = _merge(known, tree, state, conflicts, full=state in full)
            for place in conflicts:
                differences.add(state, place, rank)
    return trees


def _sharded(structures: Sequence[StateStructure]) -> frozenset[str]:
    return frozenset[str]().union(*(structure.sharded for structure in structures))


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Splits a tensor into pieces for several threads; a large CUDA tensor is replaced by its row sums."""
    if tensor.is_cuda and tensor.nbytes > _WHOLE:
        tensor = row_sums(tensor)
    if not tensor.is_contiguous() or tensor.nbytes <= _JOB:
        yield tensor
        return
    yield from tensor.detach().view(-1).split(_JOB // tensor.element_size())


def _merge(one: Json, other: Json, path: str, conflicts: list[str], *, full: bool) -> Json:
    """Merges two ranks' trees; with ``full`` each is a full state, so that other keys are a conflict."""
    if one == other:
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        if set(one) == set(other) == {"$dict"}:
            mine, theirs = ({json.dumps(key): (key, value) for key, value in tree["$dict"]} for tree in (one, other))
            if set(mine) == set(theirs) or not full:
                pairs: dict[str, list[Any]] = {text: [key, value] for text, (key, value) in mine.items()}
                for text, (key, value) in theirs.items():
                    if text in mine:
                        value = _merge(mine[text][1], value, f"{path}/{text}", conflicts, full=full)
                    pairs[text] = [key, value]
                return {"$dict": list(pairs.values())}
        elif not any(key.startswith("$") for key in (*one, *other)) and (set(one) == set(other) or not full):
            added = {key: value for key, value in other.items() if key not in one}
            kept = {
                key: _merge(value, other[key], f"{path}/{key}", conflicts, full=full) if key in other else value
                for key, value in one.items()
            }
            return {**kept, **added}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            _merge(a, b, f"{path}/{i}", conflicts, full=full) for i, (a, b) in enumerate(zip(one, other, strict=True))
        ]
    conflicts.append(path)
    return one
