"""Comparison of replicas by digests, and the one state that a save makes of those of all ranks.

Each tensor is written by one of the ranks that hold it, so a state of which ranks have different values would be put
together from several of them. A digest of every tensor that several ranks hold shows that before anything is written.
CRC-32 reads memory at its own speed; of a large tensor on an accelerator sums of rows are digested instead, since all
of it would have to come to the host on every rank, where a save needs it from one.
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
# Tensors of an accelerator up to this many bytes come to the host whole.
_WHOLE = 2**20
_ROW = 256
Facts = tuple[str, tuple[int, ...]]
"""Dtype and shape."""


@final
@dataclass(frozen=True, slots=True)
class Terms:
    """What becomes of states in which ranks that should have the same do not, and what the user adds to a checkpoint.

    Of those named in ``own``, ranks that differ from the first one keep their own; of others the first rank's values
    are saved, with a warning. ``refused(place)`` says what to do instead where that would be wrong: the save fails.

    ``fill(folder)`` is called before anything is read, on all ranks, if all have it: what it writes into the folder
    becomes part of the checkpoint, digested and committed with it. Behind a URL the folder is a temporary one of this
    rank, whose files are uploaded. It may still change the state. Of a file that several ranks write the last writer's
    is kept, behind a URL the lowest rank's.
    """

    own: Collection[str] = ()
    refused: Callable[[str], str | None] = lambda place: None
    fill: Callable[[Location], object] | None = None


@final
@dataclass(frozen=True, slots=True)
class StateStructure:
    """A rank's trees without tensors, dtype and shape of the tensors that it holds whole, and digests of values."""

    trees: dict[str, Json]
    plain: dict[str, Facts]
    values: dict[str, tuple[tuple[int, ...] | None, str]]
    """Of each tensor that several ranks hold: which ones (None: all that know the name), and the digest."""
    sharded: frozenset[str]
    """The states of which ranks hold parts."""

    def summary(self) -> "Summary":
        """What tells whether ranks bring the same."""
        kind = sha256([json.dumps([self.trees, sorted(self.plain.items())]).encode()])
        sets: dict[tuple[int, ...] | None, list[tuple[str, str]]] = {}
        for name, (ranks, digest) in self.values.items():
            sets.setdefault(ranks, []).append((name, digest))
        return Summary(kind, {ranks: sha256([json.dumps(sorted(found)).encode()]) for ranks, found in sets.items()})


@final
@dataclass(frozen=True, slots=True)
class Summary:
    """A digest of trees and kinds of tensors, and one of the values of all tensors that the same ranks hold."""

    kind: str
    values: Mapping[tuple[int, ...] | None, str]


@final
@dataclass(slots=True)
class Differences:
    """Where the values of ranks differ, by state: the places, and the ranks that are not like the first."""

    places: dict[str, set[str]] = field(default_factory=dict)
    ranks: dict[str, set[int]] = field(default_factory=dict)
    tensors: set[str] = field(default_factory=set)
    """The names of tensors among them."""
    misfits: dict[str, str] = field(default_factory=dict)
    """Tensors that differ in dtype or shape, and how, by state."""

    def add(self, state: str, place: str, rank: int) -> None:
        """Notes that a rank has something else at a place than the first that has it."""
        self.places.setdefault(state, set()).add(place)
        self.ranks.setdefault(state, set()).add(rank)

    def shown(self, states: Collection[str]) -> str:
        """Places and ranks for a message."""
        places = sorted(place for state in states for place in self.places[state])
        ranks = sorted({rank for state in states for rank in self.ranks[state]})
        more = f" and {len(places) - 5} more" if len(places) > 5 else ""
        return f"{', '.join(places[:5])}{more} (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"


@final
@dataclass(frozen=True, slots=True)
class Merged:
    """One state out of those of all ranks: the trees, who holds each full tensor, and what differs."""

    trees: dict[str, Json]
    holders: dict[str, tuple[int, ...]]
    differences: Differences


def alike(summaries: Sequence[Summary]) -> bool:
    """Whether all ranks bring the same tensors, and those that hold the same part of one have the same values."""
    everyone = range(len(summaries))
    return len({one.kind for one in summaries}) == 1 and all(
        len({summaries[rank].values.get(ranks) for rank in (everyone if ranks is None else ranks)}) == 1
        for one in summaries
        for ranks in one.values
    )


def value_digests(tensors: Mapping[str, torch.Tensor], threads: int | None = None) -> dict[str, str]:
    """A digest of the bytes of each tensor, or of sums that differ where they do, as the module's text says."""
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
    """Sums of the bits of 256 neighbours each, on the tensor's own device: they differ where the tensor does."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 4 == 0 and flat.data_ptr() % 4 == 0:
        flat = flat.view(torch.int32)
    whole = flat.numel() // _ROW * _ROW
    return torch.cat([flat[:whole].view(-1, _ROW).sum(1, dtype=torch.int64), flat[whole:].to(torch.int64)])


def merge_structures(structures: Sequence[StateStructure]) -> Merged:
    """One set of trees from ranks that bring different ones. Where values differ the first rank's is taken."""
    differences = Differences()
    trees: dict[str, Json] = {}
    for rank, structure in enumerate(structures):
        for state, tree in structure.trees.items():
            conflicts: list[str] = []
            trees[state] = _merge(trees[state], tree, state, conflicts) if state in trees else tree
            for place in conflicts:
                differences.add(state, place, rank)
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
    """The states of which this rank keeps its own, as it differs from the first rank.

    Raises:
        CheckpointError: values differ that must not, or tensors differ in dtype or shape; the same on all ranks.
    """
    differences = merged.differences
    sharded = frozenset[str]().union(*(structure.sharded for structure in structures))
    own = {state for state in differences.places if state in terms.own and state not in sharded}
    for state, places in sorted(differences.places.items()):
        advice = next((text for place in sorted(places) if (text := terms.refused(place)) is not None), None)
        if advice is not None and state not in own:
            raise CheckpointError(f"the ranks have different values at {differences.shown([state])}: {advice}")
    for state, text in sorted(differences.misfits.items()):
        if state not in own:
            raise CheckpointError(f"{text}; what differs between ranks belongs into local")
    return frozenset(state for state in own if rank in differences.ranks[state])


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Parts of a tensor that threads can digest; those of a large one on an accelerator are made from its sums."""
    if tensor.is_cuda and tensor.nbytes > _WHOLE:
        tensor = row_sums(tensor)
    if not tensor.is_contiguous() or tensor.nbytes <= _JOB:
        yield tensor
        return
    yield from tensor.detach().view(-1).split(_JOB // tensor.element_size())


def _merge(one: Json, other: Json, path: str, conflicts: list[str]) -> Json:
    if one == other:
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        if set(one) == set(other) == {"$dict"}:
            pairs: dict[str, list[Any]] = {json.dumps(key): [key, value] for key, value in one["$dict"]}
            for key, value in other["$dict"]:
                text = json.dumps(key)
                known = pairs.get(text)
                merged = value if known is None else _merge(known[1], value, f"{path}/{text}", conflicts)
                pairs[text] = [key, merged]
            return {"$dict": list(pairs.values())}
        if not any(key.startswith("$") for key in (*one, *other)):
            added = {key: value for key, value in other.items() if key not in one}
            kept = {
                key: _merge(value, other[key], f"{path}/{key}", conflicts) if key in other else value
                for key, value in one.items()
            }
            return {**kept, **added}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_merge(a, b, f"{path}/{i}", conflicts) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    conflicts.append(path)
    return one
