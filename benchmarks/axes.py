"""Time of a step with tensor, sharded and pipeline axes through accel, over the same composition written by hand.

By hand means torch's own pieces: ``parallelize_module``, ``fully_shard`` and ``torch.distributed.pipelining``, with
the same plan, units, split, schedule and micro-batches. Both are measured in turn, between the same barriers. ``cpu``
is the processor time of the thread that steps; ``+-`` is how far its median may be off (see ``fsdp``).
"""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.fsdp import timed
from benchmarks.harness import Report, parser

Step = Callable[[], object]
LENGTH, BATCH, MICRO_BATCHES = 32, 8, 4
COLWISE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWWISE = ("o_proj", "down_proj")
#: Degrees of each case, whose product is its number of ranks.
CASES: Mapping[str, Mapping[str, int]] = {
    "tp:2": {"tp_size": 2},
    "tp:2/dp_shard:2": {"tp_size": 2, "dp_shard_size": 2},
    "pp:2": {"pp_size": 2},
    "pp:2/dp_replicate:2": {"pp_size": 2, "dp_replicate_size": 2},
}


def parts() -> tuple[Any, torch.Tensor]:
    """A Llama of four blocks whose step takes some ten milliseconds, and one batch."""
    from accel_testing.equivalence.causal_lms import VOCABULARY, tiny_llama, with_exact_loss

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    model = with_exact_loss(tiny_llama(**sizes, use_cache=False))
    return model, torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def accel(degrees: Mapping[str, int]) -> Step:
    """The loop of the README, with degrees."""
    from accel import Accelerator, FullyShardedDataParallelPlugin
    from accel.utils import ParallelismConfig, TorchTensorParallelConfig
    from accel_backends import PipelineParallelConfig

    model, tokens = parts()
    plan = {f"model.layers.*.*.{name}": "colwise" for name in COLWISE}
    plan |= {f"model.layers.*.*.{name}": "rowwise" for name in ROWWISE}
    handler = TorchTensorParallelConfig(plan=plan) if "tp_size" in degrees else None
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**degrees, tp_handler=handler),
        strategy=PipelineParallelConfig(num_microbatches=MICRO_BATCHES) if "pp_size" in degrees else None,
        fsdp_plugin=None if "pp_size" in degrees else FullyShardedDataParallelPlugin(fsdp_version=2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def shards_by_hand(degrees: Mapping[str, int]) -> Step:
    """``parallelize_module`` by block, then ``fully_shard`` by block over the data-parallel ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, tokens = parts()
    mesh = init_device_mesh("cpu", (degrees.get("dp_shard_size", 1), 2), mesh_dim_names=("dp", "tp"))
    for block in model.model.layers:
        names = [name for name, _ in block.named_modules()]
        plan: dict[str, Any] = {name: ColwiseParallel() for name in names if name.endswith(COLWISE)}
        plan |= {name: RowwiseParallel() for name in names if name.endswith(ROWWISE)}
        parallelize_module(block, mesh["tp"], plan)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Half(nn.Module):
    """One stage of a Llama: the embedding and the first blocks, or the last blocks and the head."""

    def __init__(self, model: Any, *, first: bool) -> None:
        super().__init__()
        blocks, middle = list(model.model.layers), len(model.model.layers) // 2
        self.embedding = model.model.embed_tokens if first else None
        self.blocks = nn.ModuleList(blocks[:middle] if first else blocks[middle:])
        self.rotary = model.model.rotary_emb
        self.norm, self.head = (None, None) if first else (model.model.norm, model.lm_head)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        places = torch.arange(hidden.shape[1]).unsqueeze(0)
        rotary = self.rotary(hidden, places)
        for block in self.blocks:
            hidden = block(hidden, attention_mask=None, position_ids=places, position_embeddings=rotary)
        return hidden if self.head is None or self.norm is None else self.head(self.norm(hidden))


def pipeline_by_hand(degrees: Mapping[str, int]) -> Step:
    """Two halves of the model under torch's 1F1B; replicas average their gradients in one all-reduce for each."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model, tokens = parts()
    replicas = degrees.get("dp_replicate_size", 1)
    mesh = init_device_mesh("cpu", (2, replicas), mesh_dim_names=("pp", "dp"))
    place = mesh["pp"].get_local_rank()
    half = Half(model, first=place == 0)
    stage = PipelineStage(half, place, 2, torch.device("cpu"), group=mesh["pp"].get_group())

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(half.parameters(), lr=1e-4)

    def step() -> None:
        if place == 0:
            schedule.step(tokens)
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=tokens, losses=losses)
        if replicas > 1:
            gradients = [p.grad for p in half.parameters() if p.grad is not None]
            flat = torch.cat([one.flatten() for one in gradients]).div_(replicas)
            dist.all_reduce(flat, group=mesh["dp"].get_group())
            for one, mean in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
                one.copy_(mean.view_as(one))
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(case: str, *, rounds: int, steps: int) -> dict[str, Any]:
    """Milliseconds of the step by hand, and how much longer ours takes, on the clock and in processor time."""
    degrees = CASES[case]
    by_hand = pipeline_by_hand(degrees) if "pp_size" in degrees else shards_by_hand(degrees)
    return {"case": case, **timed({"raw": by_hand, "accel": accel(degrees)}, rounds=rounds, steps=steps)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES), help="which compositions")
    args = options.parse_args()
    rounds, steps = (2, 1) if args.quick else (args.rounds, 4)
    columns = ["case", "ranks", "raw_ms", "wall_ratio", "cpu_ratio", "+-"]
    report = Report("A step with degrees of parallelism over the same by hand (goal: 1.05)", columns)
    from accel_testing import RankPool

    for case in args.cases:
        ranks = math.prod(CASES[case].values())
        with RankPool(ranks, timeout=900, preload=["torch._dynamo"]) as pool:
            rows = pool.run(measure, case, rounds=rounds, steps=steps)
        row = {key: rows[0][key] for key in ("case", "raw_ms")}
        for key in ("wall_ratio", "cpu_ratio", "+-"):
            row[key] = statistics.median(one[key] for one in rows)
        report.add(**row, ranks=ranks)
    report.show(args.json)


if __name__ == "__main__":
    main()
