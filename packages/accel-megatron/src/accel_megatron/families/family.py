"""Family of models that are built and called alike, and the batches that they take."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch.nn import functional

from accel_megatron.conversion.architecture import Architecture

IGNORED = -100


@final
@dataclass(frozen=True, slots=True)
class Term:
    """One part of a loss: the mean of a cross-entropy over all targets that are not ``IGNORED``.

    Attributes:
        targets: classes of the rows of the term's logits, [samples, ...].
    """

    targets: torch.Tensor

    @property
    def count(self) -> torch.Tensor:
        """Number of targets."""
        return (self.targets != IGNORED).sum()


@final
@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A batch, or one of its micro-batches.

    Attributes:
        tensors: what megatron-core's model takes, each of shape [samples, ...].
        terms: targets of each part of the loss; none without labels.
        lengths: tokens of each sample, of each sequence that it has; the last is what stages pass on.
    """

    tensors: Mapping[str, torch.Tensor]
    terms: tuple[Term, ...]
    lengths: tuple[int, ...]

    @property
    def samples(self) -> int:
        """Number of samples."""
        return next(iter(self.tensors.values())).shape[0]

    def padded(self, samples: int) -> "TokenBatch":
        """Returns the batch with its last sample repeated up to ``samples``."""
        rows = torch.arange(samples).clamp(max=self.samples - 1)
        return replace(
            self,
            tensors={name: value[rows.to(value.device)] for name, value in self.tensors.items()},
            terms=tuple(Term(one.targets[rows.to(one.targets.device)]) for one in self.terms),
        )

    def split(self, count: int) -> "Iterator[TokenBatch]":
        """Yields ``count`` micro-batches of equal size."""
        tensors = {name: value.chunk(count) for name, value in self.tensors.items()}
        terms = [one.targets.chunk(count) for one in self.terms]
        for number in range(count):
            yield replace(
                self,
                tensors={name: parts[number] for name, parts in tensors.items()},
                terms=tuple(Term(parts[number]) for parts in terms),
            )


class Family(ABC):
    """Models that are built and called alike. One object serves all models of the family."""

    @abstractmethod
    def build(
        self, config: Any, architecture: Architecture, *, first: bool, last: bool, num_layers: int, chunk: int | None
    ) -> Any:
        """Returns megatron-core's model of one stage, or of a chunk of it, with ``num_layers`` layers.

        ``config``: its ``TransformerConfig``. ``first``, ``last``: whether it has the first or the last layer.
        ``chunk``: number of the chunk under an interleaved schedule; otherwise None.
        """

    @abstractmethod
    def batch(self, architecture: Architecture, *args: Any, **arguments: Any) -> TokenBatch:
        """Returns the batch that the arguments of a call of the Transformers model are."""

    @abstractmethod
    def call(self, model: Any, part: TokenBatch, *, labelled: bool) -> Sequence[torch.Tensor] | torch.Tensor:
        """Returns the output of a stage: on the last one, losses of each target (``labelled``), or logits."""

    def sums(self, output: Any, part: TokenBatch) -> list[torch.Tensor]:
        """Returns the sum over targets of each part of the loss, from the output of a call with labels."""
        (term,) = part.terms
        return [(output * (term.targets != IGNORED)).sum()]

    def shards(self, output: Any) -> tuple[torch.Tensor, ...]:
        """Returns this rank's logits of each part of the loss, from the output of a call without labels.

        Of the first, each tensor-parallel rank has a shard of the vocabulary; the others are full.
        """
        return (output,)

    def shapes(self, architecture: Architecture, batch: TokenBatch) -> list[tuple[int, ...]]:
        """Returns the shapes of the full logits of each part of the loss."""
        return [(batch.samples, batch.lengths[-1], architecture.model["vocab_size"])]

    @abstractmethod
    def result(self, architecture: Architecture, loss: torch.Tensor | None, logits: Sequence[torch.Tensor]) -> Any:
        """Returns what a call of the Transformers model returns; without logits in training."""

    @final
    def loss(self, logits: Sequence[torch.Tensor], terms: Sequence[Term]) -> torch.Tensor | None:
        """Returns the loss of full logits; None without targets."""
        found = [
            functional.cross_entropy(one.flatten(0, -2), term.targets.flatten(), ignore_index=IGNORED)
            for one, term in zip(logits, terms, strict=False)
        ]
        return torch.stack(found).sum() if found else None


def causal_mask(hidden: torch.Tensor) -> torch.Tensor:
    """Returns where a token does not read another, [samples, 1, tokens, tokens]: ``hidden`` ones, and later ones.

    ``hidden``: True where a token is not read, [samples, 1, 1 or tokens, tokens].
    """
    length = hidden.shape[-1]
    return hidden | torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)


def layers_of(layer: Any, count: int, norm: Callable[..., Any] | None) -> Any:
    """Returns megatron-core's specification of ``count`` layers and of the norm behind the last stage's."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    block: Any = TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)
    return block
