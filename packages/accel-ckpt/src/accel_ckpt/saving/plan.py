"""Save plan: one rank's contribution to a checkpoint, and the files that this rank writes."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from accel_ckpt.format.manifest import TREE, Part, TensorEntry, check_length, local_file, tensor_file
from accel_ckpt.format.safetensors_file import Item, file_order, header_of
from accel_ckpt.format.shard_layout import Box, boxes, choose_writers, overlap
from accel_ckpt.format.tensors import Holding, as_dtensor, hold
from accel_ckpt.format.tree import Json, TensorTable, Tree, encode, plain_text, tensor_name
from accel_ckpt.io.pinned_ring import host_pieces
from accel_ckpt.rank_group import RankGroup
from accel_ckpt.saving.replicas import StateStructure, value_digests
from accel_state.errors import CheckpointError

LOCAL = "~local"
# Tensors up to this many bytes are all written by the first rank that has them: distributing them saves nothing, and
# values that differ slightly between replicas (statistics of a BatchNorm) then come from one rank.
SMALL = 2**16


@dataclass(frozen=True)
class Draft:
    """Trees as JSON and the tensors in them: those common to the ranks, and those of this rank only."""

    trees: dict[str, Json]
    holdings: dict[str, Holding]
    local_trees: dict[str, Json]
    local_tensors: dict[str, Holding]
    metadata: Json

    values: dict[str, str]
    """Digests of the tensors of which other ranks hold replicas."""

    @cached_property
    def structure(self) -> StateStructure:
        """Description of this rank's state, for the comparison with other ranks."""
        plain = {
            name: (holding.dtype, holding.shape) for name, holding in self.holdings.items() if holding.ranks is None
        }
        values = {name: (self.holdings[name].ranks, digest) for name, digest in self.values.items()}
        parts = {name.partition("/")[0] for name, holding in self.holdings.items() if holding.ranks is not None}
        return StateStructure(self.trees, plain, values, frozenset(s for s in self.trees if tensor_name((s,)) in parts))


@dataclass(frozen=True)
class RankPart:
    """Files that one rank writes: trees for JSON documents, tensors as items and memory in file order.

    Only values are collected at once; headers and documents are built on access, which for a background save is in the
    background.
    """

    trees: Mapping[str, dict[str, Json]]
    """By name of the JSON document."""
    tensors_name: str
    items: Sequence[Item]
    tensors: Sequence[torch.Tensor]
    entries: dict[str, TensorEntry]

    @cached_property
    def documents(self) -> dict[str, bytes]:
        """Contents of the JSON files by name."""
        return {name: check_length(_document(trees), name) for name, trees in self.trees.items()}

    @cached_property
    def header(self) -> bytes:
        """Header of the tensor file; empty if this rank writes none."""
        return header_of(self.items, {"format": "pt"}) if self.items else b""

    @cached_property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def pieces(self) -> Iterator[memoryview]:
        """Yields the tensor file, without copies of contiguous CPU tensors."""
        yield memoryview(self.header)
        yield from host_pieces(self.tensors)


def make_draft(
    state: Mapping[str, Tree],
    local: Mapping[str, Tree] | None,
    metadata: Mapping[str, Json] | None,
    peers: RankGroup,
    apart: Collection[str] = (),
    *,
    threads: int | None = None,
) -> Draft:
    """Encodes all trees and determines this rank's shard of each tensor.

    States named in ``apart`` become rank-local, beside those in ``local``, which they replace under equal names.

    Raises:
        CheckpointError: a value cannot be stored; names its path.
    """
    table, own = TensorTable(), TensorTable(f"{LOCAL}/{peers.rank:05d}/")
    for what, given in (("state", state), ("local", local or {}), ("metadata", metadata or {})):
        if not isinstance(given, Mapping):
            raise CheckpointError(
                f"{what} is a {type(given).__qualname__}; expected values by name, like {{'step': 7}}"
            )
    for name in (*state, *(local or {})):
        if not isinstance(name, str) or not name:
            raise CheckpointError(f"{name!r} is no name of a state; expected a text that is not empty")
    local = {**(local or {}), **{name: tree for name, tree in state.items() if name in apart}}
    trees = {plain_text(name): encode(tree, name, table) for name, tree in state.items() if name not in apart}
    local_trees = {plain_text(name): encode(tree, name, own) for name, tree in local.items()}
    sharded = [name for name, tensor in own.tensors.items() if as_dtensor(tensor) is not None]
    if sharded:
        raise CheckpointError(
            f"{sharded[0]} in local is a DTensor, which belongs to several ranks; put it into the state, or save "
            "its to_local()"
        )
    holdings = {name: hold(name, tensor, peers.group_rank) for name, tensor in table.tensors.items()}
    shared = {name: one.local for name, one in holdings.items() if peers.size > 1 and _is_shared(one)}
    return Draft(
        trees,
        holdings,
        local_trees,
        {name: hold(name, tensor, peers.group_rank) for name, tensor in own.tensors.items()},
        encode(dict(metadata or {}), "metadata", None),
        value_digests(shared, threads),
    )


def make_part(
    draft: Draft,
    trees: dict[str, Json],
    ranks: Mapping[str, tuple[int, ...]] | None,
    peers: RankGroup,
    differing: Collection[str] = (),
) -> RankPart:
    """Plans this rank's files: its boxes of sharded tensors, its share of the full ones, its rank-local trees.

    ``trees`` are those common to all ranks; ``ranks`` are the holders of each full tensor (None: all ranks). A tensor
    in ``differing`` is written by the first rank that holds it.
    """
    everyone = tuple(range(peers.size))
    holders = {
        name: holding.ranks if holding.ranks is not None else (everyone if ranks is None else ranks[name])
        for name, holding in draft.holdings.items()
    }
    large = {
        name: (size, holders[name])
        for name, one in draft.holdings.items()
        if (size := one.nbytes) > SMALL and name not in differing
    }
    writers = choose_writers(large)
    file = tensor_file(peers.rank)
    items: list[tuple[Item, torch.Tensor]] = []
    entries: dict[str, TensorEntry] = {}
    for name, holding in draft.holdings.items():
        writer = writers.get(name, holders[name][0] if holders[name] else None)
        _add(name, holding, file, items if writer == peers.rank else None, entries)
    for name, holding in draft.local_tensors.items():
        _add(name, holding, file, items, entries)
    order = {item: number for number, item in enumerate(file_order([item for item, _ in items]))}
    items.sort(key=lambda pair: order[pair[0]])
    documents = {TREE: trees} if peers.rank == 0 else {}
    if draft.local_trees:
        documents[local_file(peers.rank)] = draft.local_trees
    return RankPart(documents, file, [item for item, _ in items], [tensor for _, tensor in items], entries)


def join_entries(every: Sequence[dict[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Merges the parts that each rank wrote into the tensors of the checkpoint.

    Raises:
        CheckpointError: parts of a tensor are missing or overlap.
    """
    joined: dict[str, TensorEntry] = {}
    for entries in every:
        for name, entry in entries.items():
            known = joined.get(name)
            if known is None:
                joined[name] = entry
            elif (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"{name} is {known.dtype} {known.shape} on one rank and {entry.dtype} {entry.shape} on another"
                )
            else:
                joined[name] = TensorEntry(known.dtype, known.shape, known.parts + entry.parts)
    for name, entry in joined.items():
        have, want = sum(part.box.volume for part in entry.parts), prod(entry.shape)
        if have != want:
            raise CheckpointError(
                f"{name} has {want} elements, but the ranks brought {have}; every rank that holds a part must save"
            )
        if overlap([part.box for part in entry.parts]):
            raise CheckpointError(f"{name}: ranks brought parts that overlap; do their meshes and placements agree?")
    return joined


def _add(
    name: str,
    holding: Holding,
    file: str,
    items: list[tuple[Item, torch.Tensor]] | None,
    entries: dict[str, TensorEntry],
) -> None:
    """Adds a tensor's boxes to the file if this rank writes it, i.e. if ``items`` is given."""
    parts = []
    if items is not None and holding.ranks is None and holding.nbytes:  # the full tensor, the common case
        items.append((Item(name, holding.dtype, holding.shape), holding.local))
        everything = Box((0,) * len(holding.shape), holding.shape)
        entries[name] = TensorEntry(holding.dtype, holding.shape, (Part(file, name, everything),))
        return
    for box, here in boxes(holding.layout) if items is not None else ():
        whole = box.shape == holding.shape
        key = name if whole else f"{name}@{','.join(map(str, box.offset))}"
        memory = holding.local[here.within(_all(holding))]
        assert items is not None
        items.append((Item(key, holding.dtype, box.shape), memory))
        parts.append(Part(file, key, box))
    if parts or not prod(holding.shape):
        entries[name] = TensorEntry(holding.dtype, holding.shape, tuple(parts))


def _is_shared(holding: Holding) -> bool:
    """Whether other ranks hold, or should hold, the same values."""
    return holding.local.numel() > 0 and (holding.ranks is None or len(holding.ranks) > 1)


def _all(holding: Holding) -> Box:
    shape = tuple(holding.local.shape)
    return Box((0,) * len(shape), shape)


def _document(trees: Json) -> bytes:
    return json.dumps(trees, separators=(",", ":"), allow_nan=False).encode()
