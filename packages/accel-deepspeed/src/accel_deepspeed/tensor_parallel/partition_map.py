"""The blocks of a parameter on each rank that shares layers, as AutoTP records them and writes them to folders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch


@final
@dataclass(frozen=True, slots=True)
class ParameterBlock:
    """A block that has the same elements, in the same arrangement, in a whole and in a rank's part of it.

    Attributes:
        shape: of the block.
        source: offset and strides in the whole, in elements.
        dest: the same in the part.
    """

    shape: tuple[int, ...]
    source: tuple[int, tuple[int, ...]]
    dest: tuple[int, tuple[int, ...]]

    def of_full(self, flat: torch.Tensor) -> torch.Tensor:
        """The block, as a view of a flat whole that begins its storage."""
        return torch.as_strided(flat, self.shape, self.source[1], self.source[0])

    def of_part(self, flat: torch.Tensor) -> torch.Tensor:
        """The block, as a view of a flat part that begins its storage."""
        return torch.as_strided(flat, self.shape, self.dest[1], self.dest[0])


@final
@dataclass(frozen=True, slots=True)
class PartMap:
    """How one parameter is cut.

    Attributes:
        shape: of the whole.
        shapes: of each rank's part.
        pieces: of each rank, which together are its part.
    """

    shape: torch.Size
    shapes: tuple[torch.Size, ...]
    pieces: tuple[tuple[ParameterBlock, ...], ...]

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> "PartMap":
        """Reads DeepSpeed's description (its ``affine_ir_spec.md``, version 1).

        Raises:
            ValueError: parts are not just cut but scaled, too.
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
        """Whether some rank has less than all."""
        return any(shape != self.shape for shape in self.shapes)

    def put(self, whole: torch.Tensor, part: torch.Tensor, rank: int) -> None:
        """Copies a rank's part to where it is in a flat whole."""
        flat = _flat(part)
        for piece in self.pieces[rank]:
            piece.of_full(whole).copy_(piece.of_part(flat))

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's part of a whole, flat and its own."""
        source = _flat(whole)
        part = torch.empty(self.shapes[rank].numel(), dtype=whole.dtype, device=whole.device)
        for piece in self.pieces[rank]:
            piece.of_part(part).copy_(piece.of_full(source))
        return part

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole of all ranks' parts, each of its shape.

        Raises:
            ValueError: other parts than described, or the description leaves something out.
        """
        if [part.shape for part in parts] != list(self.shapes):
            found, expected = ([tuple(shape) for shape in shapes] for shapes in ([p.shape for p in parts], self.shapes))
            raise ValueError(f"parts of {found}, and {expected} are described")
        whole = torch.empty(self.shape.numel(), dtype=parts[0].dtype)
        covered = torch.zeros(self.shape.numel(), dtype=torch.bool)
        try:
            for rank, part in enumerate(parts):
                self.put(whole, part, rank)
                for piece in self.pieces[rank]:
                    piece.of_full(covered).fill_(True)
        except RuntimeError as error:
            raise ValueError(f"blocks lie outside of it: {error}") from error
        if not covered.all():
            raise ValueError(f"{int((~covered).sum())} of its {covered.numel()} elements are no rank's")
        return whole.view(self.shape)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in their order, from the start of a storage, as pieces count them."""
    flat = tensor.detach().reshape(-1)
    return flat.clone() if flat.storage_offset() else flat


def _piece(described: Mapping[str, Any]) -> ParameterBlock:
    (source, strides), (dest, inside) = described["source"], described["dest"]
    return ParameterBlock(tuple(described["shape"]), (source, tuple(strides)), (dest, tuple(inside)))
