"""Partition maps: the blocks of a parameter on each tensor-parallel rank, as AutoTP records and saves them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch


@final
@dataclass(frozen=True, slots=True)
class ParameterBlock:
    """A block with the same elements and arrangement in the full parameter and in a rank's shard.

    Attributes:
        shape: shape of the block.
        source: offset and strides in the full parameter, in elements.
        dest: offset and strides in the shard, in elements.
    """

    shape: tuple[int, ...]
    source: tuple[int, tuple[int, ...]]
    dest: tuple[int, tuple[int, ...]]

    def of_full(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the block as a view of a flat full parameter that starts at offset 0 of its storage."""
        return torch.as_strided(flat, self.shape, self.source[1], self.source[0])

    def of_part(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the block as a view of a flat shard that starts at offset 0 of its storage."""
        return torch.as_strided(flat, self.shape, self.dest[1], self.dest[0])


@final
@dataclass(frozen=True, slots=True)
class PartMap:
    """Partition map of one parameter.

    Attributes:
        shape: shape of the full parameter.
        shapes: shape of each rank's shard.
        pieces: for each rank, the blocks that make up its shard.
    """

    shape: torch.Size
    shapes: tuple[torch.Size, ...]
    pieces: tuple[tuple[ParameterBlock, ...], ...]

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> "PartMap":
        """Parses DeepSpeed's description (its ``affine_ir_spec.md``, version 1).

        Raises:
            ValueError: shards are scaled.
        """
        ranks = [described["ranks"][rank] for rank in sorted(described["ranks"], key=int)]
        if any(piece.get("scale", 1.0) != 1.0 for rank in ranks for piece in rank["pieces"]):
            raise ValueError("parts are scaled")
        return cls(
            torch.Size(described["logical_shape"]),
            tuple(torch.Size(rank["shard_shape"]) for rank in ranks),
            tuple(tuple(map(_piece, rank["pieces"])) for rank in ranks),
        )

    @property
    def cut(self) -> bool:
        """Whether any rank has less than the full parameter."""
        return any(shape != self.shape for shape in self.shapes)

    def put(self, full: torch.Tensor, part: torch.Tensor, rank: int) -> None:
        """Copies a rank's shard into a flat full parameter."""
        flat = _flat(part)
        for piece in self.pieces[rank]:
            piece.of_full(full).copy_(piece.of_part(flat))

    def take(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """Returns a rank's shard of a full parameter, as a new flat tensor."""
        source = _flat(full)
        part = torch.empty(self.shapes[rank].numel(), dtype=full.dtype, device=full.device)
        for piece in self.pieces[rank]:
            piece.of_part(part).copy_(piece.of_full(source))
        return part

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Assembles the full parameter from all ranks' shards.

        Raises:
            ValueError: shapes that differ from the map, or a map that does not cover all elements.
        """
        if [part.shape for part in parts] != list(self.shapes):
            found, expected = ([tuple(shape) for shape in shapes] for shapes in ([p.shape for p in parts], self.shapes))
            raise ValueError(f"parts of {found}, and {expected} are described")
        full = torch.empty(self.shape.numel(), dtype=parts[0].dtype)
        covered = torch.zeros(self.shape.numel(), dtype=torch.bool)
        try:
            for rank, part in enumerate(parts):
                self.put(full, part, rank)
                for piece in self.pieces[rank]:
                    piece.of_full(covered).fill_(True)
        except RuntimeError as error:
            raise ValueError(f"blocks lie outside of it: {error}") from error
        if not covered.all():
            raise ValueError(f"{int((~covered).sum())} of its {covered.numel()} elements are no rank's")
        return full.view(self.shape)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements as a flat tensor at offset 0 of a storage, as the blocks' offsets require."""
    flat = tensor.detach().reshape(-1)
    return flat.clone() if flat.storage_offset() else flat


def _piece(described: Mapping[str, Any]) -> ParameterBlock:
    (source, strides), (dest, inside) = described["source"], described["dest"]
    return ParameterBlock(tuple(described["shape"]), (source, tuple(strides)), (dest, tuple(inside)))
