"""Rules by which one tensor of megatron-core is made of tensors of a Transformers model, and split again.

A rule joins full tensors, so that it is the same for any tensor-parallel size; ``shard`` and ``unshard`` know how the
full tensor is split over tensor-parallel ranks.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

Tensors = Sequence[torch.Tensor]


@final
@dataclass(frozen=True, slots=True)
class Rule:
    """Relation of a tensor of megatron-core to tensors of a Transformers model.

    Attributes:
        names: FQNs in the Transformers model.
        join: full tensors of those names to the full tensor of megatron-core.
        split: its inverse.
        dim: dim that is split over tensor-parallel ranks; None: every rank has the full tensor.
        parts: number of equal parts along ``dim``, each of which is split over the ranks (2: gate and up projection).
    """

    names: tuple[str, ...]
    join: Callable[[Tensors], torch.Tensor]
    split: Callable[[torch.Tensor], list[torch.Tensor]]
    dim: int | None = None
    parts: int = 1

    @property
    def of_expert(self) -> bool:
        """Whether the tensor is of one expert, which other ranks may share than those of other tensors."""
        return stack_name(self.names[0]) != self.names[0]

    def shard(self, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """Returns the shard of tensor-parallel rank ``rank`` of ``size``."""
        if self.dim is None or size == 1:
            return full
        pieces = [part.chunk(size, self.dim)[rank] for part in full.chunk(self.parts, self.dim)]
        return torch.cat(pieces, self.dim).contiguous()

    def unshard(self, shards: Tensors) -> torch.Tensor:
        """Returns the full tensor of the shards of all tensor-parallel ranks, in their order."""
        if self.dim is None or len(shards) == 1:
            return shards[0]
        parts = [shard.chunk(self.parts, self.dim) for shard in shards]
        return torch.cat([piece for part in zip(*parts, strict=True) for piece in part], self.dim)


def slice_name(name: str, number: int) -> str:
    """Returns the name of slice ``number`` of a tensor that stacks the weights of all experts along its first dim."""
    return f"{name}[{number}]"


def stack_name(name: str) -> str:
    """Returns the FQN that a name belongs to: of the stack if it is one of a slice."""
    return name.partition("[")[0]


def unstacked(state: Mapping[str, torch.Tensor], stacks: Collection[str]) -> dict[str, torch.Tensor]:
    """Returns the tensors with each of ``stacks`` replaced by its slices, which share its memory."""
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if name in stacks:
            found.update({slice_name(name, number): one for number, one in enumerate(value)})
        else:
            found[name] = value
    return found


def stacked(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors with slices joined to stacks; inverse of ``unstacked``."""
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        fqn = stack_name(name)
        if fqn == name:
            found[name] = value
        elif fqn not in found:
            count = sum(stack_name(other) == fqn for other in state)
            found[fqn] = torch.stack([state[slice_name(fqn, number)] for number in range(count)])
    return found


def same(name: str, dim: int | None = None) -> Rule:
    """Returns the rule of a tensor that is the same in both models."""
    return Rule((name,), lambda tensors: tensors[0], lambda full: [full], dim)


def transposed(name: str, dim: int | None = None) -> Rule:
    """Returns the rule of the weight of a GPT-2 ``Conv1D``, which is the transposed weight of a linear layer."""
    return Rule((name,), lambda tensors: tensors[0].t().contiguous(), lambda full: [full.t().contiguous()], dim)


def gated(gate: str, up: str) -> Rule:
    """Returns the rule of a gate and an up projection, which megatron-core keeps in one matrix."""
    return Rule((gate, up), lambda tensors: torch.cat(list(tensors)), lambda full: list(full.chunk(2)), 0, 2)


def gated_already(name: str) -> Rule:
    """Returns the rule of a matrix that has the rows of a gate projection, then those of an up projection."""
    return Rule((name,), lambda tensors: tensors[0], lambda full: [full], 0, 2)


def attention(names: Sequence[str], heads: int, groups: int, *, conv: bool = False) -> Rule:
    """Returns the rule of queries, keys and values, which megatron-core keeps in one matrix, group by group.

    Each of ``groups`` groups has the rows of its queries, then those of its key and its value. ``names`` are three
    tensors, or one that holds all queries, then all keys, then all values, transposed if ``conv``; or two, of keys and
    values only, with ``heads`` 0.
    """

    def join(tensors: Tensors) -> torch.Tensor:
        if len(tensors) == 1:
            single = tensors[0].t() if conv and tensors[0].dim() == 2 else tensors[0]
            tensors = single.chunk(3)
        split = [one.reshape(groups, one.shape[0] // groups, *one.shape[1:]) for one in tensors]
        return torch.cat(split, 1).flatten(0, 1).contiguous()

    def split(full: torch.Tensor) -> list[torch.Tensor]:
        size = full.shape[0] // (heads + 2 * groups)
        grouped = full.reshape(groups, -1, *full.shape[1:])
        queries = [heads // groups * size] if heads else []
        found = [part.flatten(0, 1).contiguous() for part in grouped.split([*queries, size, size], 1)]
        if len(names) > 1:
            return found
        single = torch.cat(found)
        return [single.t().contiguous() if conv and single.dim() == 2 else single]

    return Rule(tuple(names), join, split, 0)
