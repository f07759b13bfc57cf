"""Models of the measurements: bound by the host (M0), by memory (M1), by arithmetic (M2, M3); tiny ones for the CPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.bench import Bench
from benchmarks.planner import Llama, LlamaBlock


class SmallGpt(nn.Module):
    """A GPT with LayerNorm and learned positions."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) -> (batch, length, vocabulary)."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


class ManualAttention(nn.Module):
    """A block whose softmax is written out, as the planner has to see it under autocast."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class ManualGpt(nn.Module):
    """Blocks of ``ManualAttention`` between an embedding and a head."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(ManualAttention(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) -> (batch, length, vocabulary)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


class LlamaStack(nn.Module):
    """Llama blocks alone, for fp8: (batch, length, width) to the same."""

    def __init__(self, width: int, heads: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaBlock(width, heads, heads, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True)
class Workload:
    """A model, the batch of a step (on the CPU) and the loss."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]

    def built(self, device: torch.device) -> nn.Module:
        """The model with the same weights each time, made on the device, as a CPU takes long for a billion of them."""
        torch.manual_seed(0)
        with device:
            return self.build()


def square_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Mean square of the output."""
    result: Tensor = model(batch[0]).float().square().mean()
    return result


def token_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Cross entropy of the next token."""
    tokens = batch[0]
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[], tuple[Tensor, ...]]:
    """Draws one batch of token ids."""
    return lambda: (torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(1)),)


def mlp(bench: Bench) -> Workload:
    """M0: so small that the step is the host's overhead."""
    return Workload(
        "mlp",
        lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)),
        lambda: (torch.randn(8, 16, generator=torch.Generator().manual_seed(1)),),
        square_loss,
    )


def gpt(bench: Bench) -> Workload:
    """M1: 124M parameters, 16 sequences of 1024."""
    layers, width, length, batch, vocabulary = bench.pick((12, 768, 1024, 16, 50304), (2, 32, 16, 2, 64))
    return Workload(
        "gpt",
        lambda: SmallGpt(vocabulary, width, layers, width // 64 or 1, length),
        tokens(batch, length, vocabulary),
        token_loss,
    )


def llama(bench: Bench) -> Workload:
    """M2: 1.1B parameters, 8 sequences of 2048 (4 where the device has less than 100 GB)."""
    layers, width, hidden, length, vocabulary = bench.pick((22, 2048, 5632, 2048, 32000), (2, 64, 128, 16, 64))
    roomy = bench.on_cuda and torch.cuda.get_device_properties(bench.device).total_memory > 100e9
    batch = bench.pick(8 if roomy else 4, 2)
    heads, groups = bench.pick((32, 4), (4, 2))
    return Workload(
        "llama",
        lambda: Llama(vocabulary, width, heads=heads, groups=groups, hidden=hidden, layers=layers),
        tokens(batch, length, vocabulary),
        token_loss,
    )


def stack(bench: Bench) -> Workload:
    """M3: 4 Llama blocks of width 4096 on 16k tokens; three of them with AdamW fit beside each other into 80 GB."""
    layers, width, heads, hidden = bench.pick((4, 4096, 32, 14336), (1, 64, 4, 128))
    batch, length = bench.pick((8, 2048), (2, 16))
    return Workload(
        "stack",
        lambda: LlamaStack(width, heads, hidden, layers),
        lambda: (torch.randn(batch, length, width, generator=torch.Generator().manual_seed(1)),),
        square_loss,
    )


def manual_gpt(bench: Bench) -> Workload:
    """A GPT with attention written out, for the planner."""
    layers, width, length, batch, vocabulary = bench.pick((8, 1024, 1024, 8, 16000), (2, 32, 16, 2, 64))
    return Workload(
        "manual softmax",
        lambda: ManualGpt(vocabulary, width, layers, 4),
        tokens(batch, length, vocabulary),
        token_loss,
    )
