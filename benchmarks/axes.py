"""Time of a step with degrees of parallelism through accel, over the same composition written by hand with torch.

``benchmarks/by_hand.py`` has the other side, with the same plan, units, split, schedule, shards of sequences and
exchanges. Both train a few steps first, and their losses have to be equal; then they are measured in turn, between the
same barriers. ``cpu`` is the processor time of the thread that steps; ``+-`` is how far its median may be off (see
``fsdp``).
"""

import math
import statistics
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.by_hand import COLWISE, MICRO_BATCHES, OPTIMIZER, ROWWISE, Degrees, Step, parts, step_by_hand
from benchmarks.fsdp import timed
from benchmarks.harness import Report, parser

#: Degrees of each case, whose product is its number of ranks.
CASES: Mapping[str, Degrees] = {
    "tp:2": {"tp_size": 2},
    "tp:2/dp_shard:2": {"tp_size": 2, "dp_shard_size": 2},
    "pp:2": {"pp_size": 2},
    "pp:2/dp_replicate:2": {"pp_size": 2, "dp_replicate_size": 2},
    "cp:2": {"cp_size": 2},
    "cp:2/dp_shard:2": {"cp_size": 2, "dp_shard_size": 2},
    "sp:2": {"sp_size": 2},
    "sp:2/dp_shard:2": {"sp_size": 2, "dp_shard_size": 2},
    "ep:2": {"ep_size": 2},
    "ep:2/dp_shard:2": {"ep_size": 2, "dp_shard_size": 2},
}


def accel(degrees: Degrees) -> Step:
    """The loop of the README, with degrees."""
    from accel import Accelerator, FullyShardedDataParallelPlugin
    from accel.utils import ParallelismConfig, TorchTensorParallelConfig
    from accel_backends import PipelineParallelConfig

    model, tokens = parts(degrees)
    plan = {f"model.layers.*.*.{name}": "colwise" for name in COLWISE}
    plan |= {f"model.layers.*.*.{name}": "rowwise" for name in ROWWISE}
    handler = TorchTensorParallelConfig(plan=plan) if "tp_size" in degrees else None
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**degrees, tp_handler=handler),
        strategy=PipelineParallelConfig(num_microbatches=MICRO_BATCHES) if "pp_size" in degrees else None,
        fsdp_plugin=None if "pp_size" in degrees else FullyShardedDataParallelPlugin(fsdp_version=2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        told: torch.Tensor = loss.detach()
        return told

    return step


def measure(case: str, *, rounds: int, steps: int) -> dict[str, Any]:
    """Milliseconds of the step by hand, and how much longer ours takes, on the clock and in processor time."""
    loops = {"raw": step_by_hand(CASES[case]), "accel": accel(CASES[case])}
    check_equal(case, loops)
    return {"case": case, **timed(loops, rounds=rounds, steps=steps)}


def check_equal(case: str, loops: Mapping[str, Step], steps: int = 4) -> None:
    """Trains some steps both ways, and raises if this rank's losses differ by more than what float32 rounds."""
    for number in range(steps):
        losses = {name: step() for name, step in loops.items()}
        if not math.isclose(float(losses["raw"]), float(losses["accel"]), rel_tol=1e-5):
            raise AssertionError(f"{case}: losses of step {number + 1} differ: {losses}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES), help="which compositions")
    args = options.parse_args()
    rounds, steps = (2, 1) if args.quick else (args.rounds, 4)
    columns = ["case", "ranks", "raw_ms", "wall_ratio", "cpu_ratio", "+-"]
    report = Report("A step with degrees of parallelism over the same by hand (goal: 1.05)", columns)
    from accel_testing import RankPool

    sizes = {case: math.prod(CASES[case].values()) for case in args.cases}
    for ranks in sorted(set(sizes.values())):
        with RankPool(ranks, timeout=900, preload=["torch._dynamo"]) as pool:
            for case in [case for case, size in sizes.items() if size == ranks]:
                rows = pool.run(measure, case, rounds=rounds, steps=steps)
                row = {key: rows[0][key] for key in ("case", "raw_ms")}
                for key in ("wall_ratio", "cpu_ratio", "+-"):
                    row[key] = statistics.median(one[key] for one in rows)
                report.add(**row, ranks=ranks)
    report.show(args.json)


if __name__ == "__main__":
    main()
