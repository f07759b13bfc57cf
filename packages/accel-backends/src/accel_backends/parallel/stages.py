"""Split of a model into the stages of a pipeline, at its repeated blocks."""

from typing import Any, cast, final

import torch
from torch import nn

from accel_state.errors import BackendError, PrepareError


def block_ranges(num_blocks: int, num_stages: int) -> list[range]:
    """Blocks of each stage, as equal as possible; the first stages, which have no head, have one more.

    Raises:
        PrepareError: fewer blocks than stages.
    """
    if num_blocks < num_stages:
        raise PrepareError(
            f"{num_blocks} blocks do not make {num_stages} pipeline stages; nearest: {num_blocks} stages"
        )
    small, more = divmod(num_blocks, num_stages)
    ranges, start = [], 0
    for stage in range(num_stages):
        stop = start + small + (stage < more)
        ranges.append(range(start, stop))
        start = stop
    return ranges


def cut_stage(model: nn.Module, index: int, count: int) -> "Stage":
    """Stage ``index`` of ``count`` of a causal language model of transformers, by removing everything else in place.

    Embeddings are on the first stage, what stands behind the list of blocks and the head on the last. Blocks of other
    stages become placeholders, so that the blocks keep their numbers.

    Raises:
        PrepareError: before any change, a model whose parameters are not those of embeddings, one list of blocks,
            modules behind the list, and a head.
    """
    base, head = _base_and_head(model)
    blocks = _blocks(base)
    ranges = block_ranges(len(blocks), count)
    _check_outside(base, blocks)
    embedding = cast(Any, model).get_input_embeddings()
    tied = embedding.weight if embedding.weight is cast(Any, head).weight else None
    first, last = index == 0, index == count - 1
    for name, module in list(base.named_children()):
        if isinstance(module, nn.Embedding) and not first:
            setattr(base, name, _NoEmbedding(module.embedding_dim))
        elif module is not blocks and not isinstance(module, nn.Embedding) and not last and _has_parameters(module):
            setattr(base, name, Placeholder())
    for position in set(range(len(blocks))) - set(ranges[index]):
        blocks[position] = Placeholder()
    if not last:
        setattr(model, next(name for name, module in model.named_children() if module is head), Placeholder())
    return Stage(model, base, blocks, ranges[index], tied=tied if first or last else None, is_tied=tied is not None)


@final
class Placeholder(nn.Module):
    """A block of another stage, which returns its first argument."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Returns the activations unchanged."""
        return hidden_states


@final
class _NoEmbedding(nn.Module):
    """An embedding of the first stage on another one, where what stands before the blocks is not used."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns zeros."""
        return torch.zeros(*indices.shape, self.features, device=indices.device)


@final
class Stage(nn.Module):
    """One stage: token ids or received activations in, activations to send or logits out.

    The model's own forward runs on every stage, so that it prepares masks and positions for the blocks. On stages after
    the first, the activations replace the input of the stage's first block, whatever the model has made of its inputs;
    on stages before the last, the output of the stage's last block is the result.
    """

    tied: nn.Parameter | None
    """Weight that embedding and head share, on the first and the last stage."""

    def __init__(
        self,
        model: nn.Module,
        base: nn.Module,
        blocks: nn.ModuleList,
        mine: range,
        *,
        tied: nn.Parameter | None,
        is_tied: bool,
    ) -> None:
        super().__init__()
        self.first, self.last = mine.start == 0, mine.stop == len(blocks)
        self.is_tied = is_tied
        # Outside of the registries of modules and parameters, so that names are those of the model.
        self.__dict__.update(_base=base, tied=tied)
        self.model = model
        self._received: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None
        if not self.first:
            blocks[mine.start].register_forward_pre_hook(self._replace_input, with_kwargs=True)
        if not self.last:
            blocks[mine.stop - 1].register_forward_hook(self._keep_output)

    def forward(self, given: torch.Tensor, **options: Any) -> torch.Tensor:
        """Computes the stage for one micro-batch."""
        self._received = None if self.first else given
        inputs = {"input_ids": given} if self.first else {"inputs_embeds": given.detach()}
        target = self.model if self.last else cast(nn.Module, self._base)
        output = target(**inputs, **options, use_cache=False)
        if self.last:
            return cast(torch.Tensor, output.logits)
        sent, self._sent, self._received = self._sent, None, None
        assert sent is not None
        return sent

    def _replace_input(
        self, block: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._received, *args[1:]), options
        return args, {**options, "hidden_states": self._received}

    def _keep_output(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, torch.Tensor):
            raise BackendError(
                f"blocks of class {type(block).__name__} return a {type(output).__name__}; expected one tensor, which "
                "the next pipeline stage receives"
            )
        self._sent = output


def _base_and_head(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    base = getattr(model, "base_model", None)
    head = cast(Any, model).get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(base, nn.Module) or base is model or not isinstance(head, nn.Module):
        raise PrepareError(
            f"{type(model).__name__} has no base_model and output embeddings, by which a causal language model of "
            "transformers is split into pipeline stages"
        )
    for name, module in model.named_children():
        if module is not base and module is not head and _has_parameters(module):
            raise PrepareError(
                f"{type(model).__name__} has {name} beside its base model and its head, and no pipeline stage to put it"
            )
    return base, head


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _blocks(base: nn.Module) -> nn.ModuleList:
    found = [child for child in base.children() if isinstance(child, nn.ModuleList)]
    if len(found) != 1 or len({type(block) for block in found[0]}) != 1:
        raise PrepareError(
            f"{type(base).__name__} has {len(found)} lists of blocks; a pipeline splits models with one list of blocks "
            "of one class"
        )
    return found[0]


def _check_outside(base: nn.Module, blocks: nn.ModuleList) -> None:
    """Refuses modules of which the structure does not say whether they compute before or behind the blocks."""
    own = [name for name, _ in base.named_parameters(recurse=False)]
    behind = False
    for name, module in base.named_children():
        behind = behind or module is blocks
        known = behind or isinstance(module, nn.Embedding)
        if not known and _has_parameters(module):
            own.append(name)
    if own:
        raise PrepareError(
            f"{type(base).__name__} has {', '.join(own)} before its list of blocks; only embeddings are known to "
            "compute before the blocks, so there is no pipeline stage to put it"
        )
