"""Structure of a causal language model of transformers: embeddings, one list of blocks, what stands behind it, head."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self, cast, final

from torch import nn

from accel_state.errors import PrepareError


@final
@dataclass(frozen=True, slots=True)
class CausalLM:
    """Parts of a model, by the names of its modules.

    Attributes:
        model: the model.
        base_name: child of the model that holds the blocks.
        blocks_name: child of the base model: the list of blocks.
        embeddings: children of the base model that compute before the blocks.
        behind: children of the base model that have parameters and compute behind the blocks.
        head_name: child of the model that computes the logits.
        tied: weight that the embedding and the head share; None if each has its own.
    """

    model: nn.Module
    base_name: str
    blocks_name: str
    embeddings: tuple[str, ...]
    behind: tuple[str, ...]
    head_name: str
    tied: nn.Parameter | None

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Finds the parts of a model.

        Raises:
            PrepareError: the model has parameters beside these parts, or parts that share parameters otherwise than by
                a tied embedding.
        """
        base_name, head_name = _base_and_head(model)
        base, head = model.get_submodule(base_name), model.get_submodule(head_name)
        blocks_name = _blocks_name(base)
        embeddings, behind = _around(base, blocks_name)
        embedding = cast(Any, model).get_input_embeddings()
        tied = embedding.weight if embedding.weight is cast(Any, head).weight else None
        found = cls(model, base_name, blocks_name, embeddings, behind, head_name, tied)
        found._check_shared()
        return found

    @property
    def base(self) -> nn.Module:
        """The base model."""
        return self.model.get_submodule(self.base_name)

    @property
    def blocks(self) -> nn.ModuleList:
        """The list of blocks."""
        return cast(nn.ModuleList, self.base.get_submodule(self.blocks_name))

    @property
    def block_bytes(self) -> list[int]:
        """Bytes of the parameters of each block, with the embeddings in the first and the rest in the last."""
        found = [_bytes(block.parameters()) for block in self.blocks]
        found[0] += sum(_bytes(self.base.get_submodule(name).parameters()) for name in self.embeddings)
        found[-1] += sum(_bytes(self.base.get_submodule(name).parameters()) for name in self.behind)
        found[-1] += _bytes(self.model.get_submodule(self.head_name).parameters())
        return found

    def _check_shared(self) -> None:
        parts = {f"{self.blocks_name}.{number}": block for number, block in enumerate(self.blocks)}
        parts |= {name: self.base.get_submodule(name) for name in (*self.embeddings, *self.behind)}
        parts[self.head_name] = self.model.get_submodule(self.head_name)
        owner: dict[int, str] = {}
        for name, part in parts.items():
            for parameter in part.parameters():
                first = owner.setdefault(id(parameter), name)
                if first != name and parameter is not self.tied:
                    raise PrepareError(
                        f"{first} and {name} of {type(self.model).__name__} share a parameter, and would be on "
                        "different pipeline stages; only the embedding and the head can share theirs"
                    )


def _base_and_head(model: nn.Module) -> tuple[str, str]:
    base = getattr(model, "base_model", None)
    head = cast(Any, model).get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(base, nn.Module) or base is model or not isinstance(head, nn.Module):
        raise PrepareError(
            f"{type(model).__name__} has no base_model and output embeddings, by which a causal language model of "
            "transformers is split into pipeline stages"
        )
    for name, module in model.named_children():
        if module is not base and module is not head and has_parameters(module):
            raise PrepareError(
                f"{type(model).__name__} has {name} beside its base model and its head, and no pipeline stage to put it"
            )
    names = {id(module): name for name, module in model.named_children()}
    return names[id(base)], names[id(head)]


def _blocks_name(base: nn.Module) -> str:
    found = {name: child for name, child in base.named_children() if isinstance(child, nn.ModuleList)}
    # By name, because blocks that are recomputed have a subclass of the same name.
    kinds = {(type(one).__module__, type(one).__qualname__) for blocks in found.values() for one in blocks}
    if len(found) != 1 or len(kinds) != 1:
        raise PrepareError(
            f"{type(base).__name__} has {len(found)} lists of blocks; a pipeline splits models with one list of blocks "
            "of one class"
        )
    return next(iter(found))


def _around(base: nn.Module, blocks_name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the embeddings and of the modules behind the blocks.

    Refuses modules of which the structure does not say whether they compute before or behind the blocks.
    """
    unknown = [name for name, _ in base.named_parameters(recurse=False)]
    embeddings, behind, seen = list[str](), list[str](), False
    for name, module in base.named_children():
        seen = seen or name == blocks_name
        if isinstance(module, nn.Embedding):
            embeddings.append(name)
        elif name != blocks_name and has_parameters(module):
            (behind if seen else unknown).append(name)
    if unknown:
        raise PrepareError(
            f"{type(base).__name__} has {', '.join(unknown)} before its list of blocks; only embeddings are known to "
            "compute before the blocks, so there is no pipeline stage to put it"
        )
    return tuple(embeddings), tuple(behind)


def has_parameters(module: nn.Module) -> bool:
    """Whether the module or one inside it has a parameter."""
    return any(True for _ in module.parameters())


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
