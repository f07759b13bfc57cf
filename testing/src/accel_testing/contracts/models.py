"""Models of contracts: minimal models with the features of users' models."""

from typing import final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accel_testing.contracts.samples import LENGTH, OUT, VOCABULARY, WIDTH

HIDDEN = 8


@final
class Block(nn.Module):
    """A residual layer: (rows, ``HIDDEN``) -> (rows, ``HIDDEN``)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + torch.tanh(self.inner(x))
        return result


class Stack(nn.Module):
    """Two blocks between two linear layers; subclasses change one property."""

    def __init__(self, width: int = WIDTH, out: int = OUT) -> None:
        super().__init__()
        self.stem = nn.Linear(width, HIDDEN)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.crown = nn.Linear(HIDDEN, out)

    def hidden(self, x: Tensor) -> Tensor:
        """(rows, width) -> (rows, ``HIDDEN``)."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) -> (rows, out)."""
        result: Tensor = self.crown(self.hidden(x))
        return result


@final
class Routed(Stack):
    """Each sample is processed by the block that its route names."""

    def __init__(self, parts: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(parts))

    def forward(self, x: Tensor, route: Tensor) -> Tensor:  # type: ignore[override]
        x = self.stem(x)
        mixed = torch.zeros_like(x)
        for index, block in enumerate(self.blocks):
            rows = (route == index).nonzero()[:, 0]
            if len(rows):
                mixed = mixed.index_add(0, rows, block(x[rows]))
        result: Tensor = self.crown(mixed)
        return result


@final
class Unused(Stack):
    """Has a layer that does not contribute to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(HIDDEN, HIDDEN)


@final
class Tied(nn.Module):
    """The output layer shares the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.block = Block()
        self.crown = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.crown.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, length) -> (rows, length, vocabulary)."""
        result: Tensor = self.crown(self.block(self.embedding(tokens)))
        return result


@final
class Embedded(nn.Module):
    """Mean of embeddings; with ``sparse``, their gradient is a sparse tensor."""

    def __init__(self, *, sparse: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, sparse=sparse, padding_idx=padding)
        self.crown = nn.Linear(HIDDEN, OUT)

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, length) -> (rows, out)."""
        result: Tensor = self.crown(self.embedding(tokens).mean(1))
        return result


@final
class SharedBlock(Stack):
    """The same block is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.blocks[0]


@final
class FrozenPart(Stack):
    """A middle layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


@final
class FrozenRoot(Stack):
    """All but the blocks is frozen, including the parameters of the root module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.offset = nn.Parameter(torch.randn(OUT), requires_grad=False)
        self.blocks.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.offset


@final
class Counting(Stack):
    """Keeps a running mean of its inputs and a count of its calls in buffers."""

    average: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(x.detach().mean(0), 0.1)
            self.calls += 1
        return super().forward(x - self.average)


@final
class Normalised(Stack):
    """Has a normalisation after the first layer."""

    def __init__(self, norm: str = "batch") -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(HIDDEN) if norm == "batch" else nn.LayerNorm(HIDDEN)

    def hidden(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return x


@final
class Scaled(Stack):
    """Has a scalar parameter (0 dimensions) and a parameter with one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor([0.2]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.shift


@final
class Listed(nn.Module):
    """Parameters in a ParameterList and in a ParameterDict, without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [nn.Parameter(0.4 * torch.randn(WIDTH, HIDDEN)), nn.Parameter(0.4 * torch.randn(HIDDEN, OUT))]
        )
        self.biases = nn.ParameterDict({"inner": nn.Parameter(torch.zeros(HIDDEN))})

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) -> (rows, out)."""
        result: Tensor = torch.tanh(x @ self.weights[0] + self.biases["inner"]) @ self.weights[1]
        return result


@final
class Odd(nn.Module):
    """Sizes that no shard degree divides, and a parameter with a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, 7)
        self.middle = nn.Linear(7, 13)
        self.narrow = nn.Linear(13, 1)
        self.crown = nn.Linear(1, OUT)
        self.cube = nn.Parameter(torch.randn(1, 3, 5))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) -> (rows, out)."""
        inner = torch.tanh(self.middle(torch.tanh(self.stem(x))))
        result: Tensor = self.crown(self.narrow(inner)) + self.cube.sum((0, 2))
        return result


@final
class Recurrent(nn.Module):
    """An LSTM, or a plain recurrent network of two layers, over embedded tokens."""

    def __init__(self, kind: str = "lstm") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.cells: nn.Module = (
            nn.LSTM(HIDDEN, 5, batch_first=True)
            if kind == "lstm"
            else nn.RNN(HIDDEN, 5, num_layers=2, batch_first=True)
        )
        self.crown = nn.Linear(5, OUT)

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, length) -> (rows, out)."""
        states, _ = self.cells(self.embedding(tokens))
        result: Tensor = self.crown(states[:, LENGTH - 1])
        return result


@final
class Adapter(nn.Module):
    """A frozen layer with a trained low-rank product (LoRA) beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) + self.up(self.down(x))
        return result


@final
class Adapted(Stack):
    """Frozen, except for adapters in its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.inner = Adapter(block.inner)  # type: ignore[arg-type]


@final
class Checkpointed(Stack):
    """Uses activation checkpointing for its blocks."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant

    def hidden(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@final
class Growing(Stack):
    """Uses a layer that is added later."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(x)
        if (grown := getattr(self, "grown", None)) is not None:
            x = grown(x)
        result: Tensor = self.crown(x)
        return result
