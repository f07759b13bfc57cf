"""Tiny models and data for tests: weights and samples are determined by the seed, in float32 or float64."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


@final
class TinyMLP(nn.Module):
    """Two linear layers: (batch, ``width``) to (batch, ``out``)."""

    def __init__(self, width: int = 8, hidden: int = 16, out: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.second = nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> (batch, out)."""
        result: Tensor = self.second(torch.tanh(self.first(x)))
        return result


@final
class TinyBlock(nn.Module):
    """One pre-norm transformer block, the unit that is wrapped, compiled or checkpointed."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, length, width)."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))
        return result


@final
class TinyTransformer(nn.Module):
    """A causal language model of repeated ``TinyBlock`` whose output layer is tied to the embedding."""

    def __init__(
        self, vocabulary: int = 32, width: int = 16, *, layers: int = 2, heads: int = 2, length: int = 16
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(TinyBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, length), int64 -> logits (batch, length, vocabulary)."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@final
class WithBuffers(nn.Module):
    """Batch norm and its own counter: buffers on which the ranks must agree."""

    calls: Tensor

    def __init__(self, width: int = 8, out: int = 4) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, out)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> (batch, out); counts its calls while training."""
        if self.training:
            self.calls += 1
        result: Tensor = self.linear(self.norm(x))
        return result


@final
class WithFrozen(nn.Module):
    """A model whose first layer is frozen."""

    def __init__(self, width: int = 8, hidden: int = 16, out: int = 4) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, hidden).requires_grad_(False)
        self.trained = nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> (batch, out)."""
        result: Tensor = self.trained(torch.relu(self.frozen(x)))
        return result


@final
class WithUnused(nn.Module):
    """Has a layer without effect on the output, so without gradient; ``alternate``: used in every other call."""

    def __init__(self, width: int = 8, out: int = 4, *, alternate: bool = False) -> None:
        super().__init__()
        self.used = nn.Linear(width, out)
        self.unused = nn.Linear(width, out)
        self.alternate = alternate
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> (batch, out)."""
        self._calls += 1
        layer = self.unused if self.alternate and self._calls % 2 == 0 else self.used
        result: Tensor = layer(x)
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": TinyMLP,
    "transformer": TinyTransformer,
    "buffers": WithBuffers,
    "frozen": WithFrozen,
    "unused": WithUnused,
}


def make_model(name: str = "mlp", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """One of ``MODELS`` with weights that depend on ``seed`` only; the global random state is restored.

    Weights are drawn in float64 and rounded, so a float32 and a float64 model of one seed are the same model.
    """
    if name not in MODELS:
        raise ValueError(f"no model {name!r}; there are: {', '.join(MODELS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            model = MODELS[name]()
        finally:
            torch.set_default_dtype(before)
    return model.to(dtype)


@final
class SyntheticData(Dataset[tuple[Tensor, Tensor]]):
    """Regression samples: x (``width``,) and y (``out``,), a noisy nonlinear function of x, fixed by the seed."""

    def __init__(
        self, size: int = 64, width: int = 8, out: int = 4, *, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(size, width, generator=generator, dtype=torch.float64)
        mixing = torch.randn(width, out, generator=generator, dtype=torch.float64)
        noise = torch.randn(size, out, generator=generator, dtype=torch.float64)
        self.x = x.to(dtype)
        self.y = (torch.sin(x @ mixing) + 0.1 * noise).to(dtype)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


@final
class SyntheticTokens(Dataset[Tensor]):
    """Sequences of tokens (``length``,), int64, in which each token mostly determines the next one."""

    def __init__(self, size: int = 64, length: int = 16, vocabulary: int = 32, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(vocabulary, (size, 1), generator=generator)
        steps = torch.randint(1, 4, (size, length), generator=generator).cumsum(1)
        self.tokens = (starts + steps) % vocabulary

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]
