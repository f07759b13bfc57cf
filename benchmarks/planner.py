"""The planner's predictions against what training takes: bytes of each part and of the peak, per rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Report, parser


class LlamaBlock(nn.Module):
    """Attention with grouped keys and a gated MLP, both behind a norm."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        size = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        batch, length, width = x.shape
        y = self.norm1(x)
        q = self.q(y).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = (f(y).view(batch, length, self.groups, -1).transpose(1, 2) for f in (self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Llama(nn.Module):
    """A language model of the shape of Llama: (batch, length) tokens to (batch, length, vocabulary)."""

    def __init__(self, vocabulary: int, width: int, *, heads: int, groups: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, groups, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) -> (batch, length, vocabulary)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(self.norm(x))
        return result


class Gpt(nn.Module):
    """torch's own encoder layers with dropout, learned positions and an output tied to the embedding."""

    def __init__(self, vocabulary: int = 2048, width: int = 128, *, layers: int = 4, length: int = 64) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) -> (batch, length, vocabulary)."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


class Residual(nn.Module):
    """Blocks whose output is added to their input, between a stem and a head."""

    def __init__(self, stem: nn.Module, block: Callable[[], nn.Module], layers: int, width: int) -> None:
        super().__init__()
        self.stem = stem
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Features or images -> (batch, 10)."""
        x = self.stem(x)
        for layer in self.layers:
            x = F.relu(x + layer(x))
        result: Tensor = self.head(x.mean((2, 3)) if x.dim() == 4 else x)
        return result


def mlp(width: int = 512) -> nn.Module:
    return Residual(
        nn.Identity(),
        lambda: nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)),
        layers=6,
        width=width,
    )


def convolutions(width: int = 64) -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
        )

    return Residual(nn.Conv2d(3, width, 3, padding=1), block, layers=4, width=width)


@dataclass(frozen=True)
class Shape:
    """A model and the batch of one rank: inputs, and targets by class."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    targets: Callable[[], Tensor]

    @property
    def batch(self) -> tuple[Tensor, Tensor]:
        """As a loader gives it."""
        return self.inputs(), self.targets()


def _tokens(batch: int, length: int, vocabulary: int, build: Callable[[], nn.Module]) -> Shape:
    def draw() -> Tensor:
        return torch.randint(vocabulary, (batch, length))

    return Shape(build, draw, draw)


def _features(*size: int, build: Callable[[], nn.Module]) -> Shape:
    return Shape(build, lambda: torch.randn(size), lambda: torch.randint(10, size[:1]))


SHAPES: Mapping[str, Shape] = {
    "llama": _tokens(8, 64, 1024, lambda: Llama(1024, 256, heads=8, groups=4, hidden=512, layers=6)),
    "wide": _tokens(2, 32, 512, lambda: Llama(512, 512, heads=8, groups=8, hidden=1536, layers=3)),
    "deep": _tokens(8, 128, 256, lambda: Llama(256, 96, heads=4, groups=4, hidden=256, layers=16)),
    "gpt": _tokens(8, 64, 2048, Gpt),
    "mlp": _features(256, 512, build=mlp),
    "conv": _features(8, 3, 32, 32, build=convolutions),
}


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy over the last dimension."""
    inputs, targets = batch
    output = model(inputs)
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def compared(
    shape: str | Shape,
    strategy: str,
    *,
    world: int,
    precision: str = "no",
    optimizer: str = "AdamW",
    cpu: bool = True,
) -> dict[str, Any]:
    """Predicts and measures one strategy; called on every rank, with a group of that many.

    Four ranks count as two nodes of two, so that there is something hybrid. Returns predicted and measured bytes.
    """
    from accel import Accelerator
    from accel_backends import build_options, load_backend
    from accel_planner import Hardware, MeasuredStep, candidates, measure, optimizer_facts, plan_memory, profile_model
    from accel_planner.auto import checkpoint_blocks
    from accel_planner.candidate import named
    from accel_state.collectives.objects import all_gather_object

    chosen = SHAPES[shape] if isinstance(shape, str) else shape
    batch = chosen.batch
    devices, nodes = (2, 2) if world == 4 else (world, 1)
    (candidate,) = [c for c in candidates(devices, nodes) if c.name == strategy] or named(
        candidates(devices, nodes), [strategy]
    )
    options = dict(candidate.options)
    if options.get("sharding_strategy") == "HYBRID_SHARD":
        options["shard_size"] = devices  # all of them share one machine here, which hybrid would fill
    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=cpu, mixed_precision=precision, strategy=build_options(load_backend(candidate.backend), options)
    )
    with accelerator.device:  # a CPU takes long for the values of a large model
        source = chosen.build()
    profile = profile_model(
        source if cpu else chosen.build,
        batch,
        loss=loss_of,
        policy=precision,
        device_type=accelerator.device.type,
    )
    if candidate.wraps_blocks:
        checkpoint_blocks(source)
    stepping = getattr(torch.optim, optimizer)(source.parameters(), lr=0.01)
    facts = optimizer_facts(stepping, profile.parameters)
    plan = plan_memory(profile, facts, Hardware.of_cpu(devices, nodes, 2**34), candidate)
    model, stepping = accelerator.prepare(source, stepping)
    batch = (batch[0].to(accelerator.device), batch[1].to(accelerator.device))
    run = MeasuredStep(
        model,
        stepping,
        lambda: accelerator.backward(loss_of(model, batch)),
        held=lambda: accelerator.backend.states.held(model, stepping.optimizer),
    )
    measured = measure(run, extra=batch)
    predicted = {name: getattr(plan.parts, name) for name in ("parameters", "gradients", "optimizer")}
    found = {name: getattr(measured, name) for name in (*predicted, "peak")}
    everywhere = all_gather_object(found, group=accelerator.session.group)
    found = {name: max(one[name] for one in everywhere) for name in found}  # of the fullest rank
    accelerator.free_memory()
    return {"predicted": predicted | {"peak": plan.peak}, "measured": found}


def differences(row: Mapping[str, Any]) -> dict[str, float]:
    """Percent by which each prediction is off."""
    pairs = {name: (value, row["measured"][name]) for name, value in row["predicted"].items()}
    return {name: 100 * (said - is_) / is_ if is_ else float(said > 0) for name, (said, is_) in pairs.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2, help="processes to measure with; 4 count as 2 nodes of 2")
    options.add_argument("--precision", default="no", help="mixed precision")
    options.add_argument("--optimizer", default="AdamW", help="class of torch.optim")
    options.add_argument("--shapes", default=",".join(SHAPES), help="models, with commas")
    args = options.parse_args()
    from accel_planner import Hardware
    from accel_planner.auto import able
    from accel_testing import RankPool

    devices, nodes = (2, 2) if args.ranks == 4 else (args.ranks, 1)
    names = [candidate.name for candidate in able(Hardware(devices=devices, nodes=nodes), blocks=True)]
    columns = ["shape", "strategy", "ranks", "precision", "parameters_%", "gradients_%", "optimizer_%", "peak_%", "MB"]
    report = Report("Predicted against measured, off by percent", columns)
    how = {"precision": args.precision, "optimizer": args.optimizer, "world": args.ranks}
    with RankPool(args.ranks, timeout=900) as pool:
        for shape in args.shapes.split(",")[: 1 if args.quick else None]:
            for name in names[:2] if args.quick else names:
                row = pool.run(compared, shape, name, **how)[0]
                off = {f"{part}_%": round(value, 2) for part, value in differences(row).items()}
                size = round(row["measured"]["peak"] / 1e6, 1)
                report.add(shape=shape, strategy=name, ranks=args.ranks, precision=args.precision, MB=size, **off)
    report.show(args.json)


if __name__ == "__main__":
    main()
