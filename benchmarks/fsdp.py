"""Time and memory of a sharded step through accel, over the same step written by hand with ``fully_shard``.

Ratios are medians over rounds in which both run in turn, between the same barriers. ``cpu`` is the processor time of
the thread that steps (forward, backward and update; not the threads of the collectives), which other programs disturb
less; ``+-`` is how far its median may be off: half the range that holds the middle half of the rounds, over the square
root of their number. Memory is the most that a rank held allocated from the making of the model to the end of three
steps, by the account of torch's profiler: tensors on the CPU, no files, no buffers of the collectives; it waits for
those, so that it comes out the same in every run.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Report, interleave, parser, ratio

Step = Callable[[], object]
VOCABULARY, LENGTH, BATCH = 256, 32, 8


@dataclass(frozen=True)
class Case:
    """What a step does besides forward, backward and update."""

    name: str
    bf16: bool = False
    accumulate: int = 1
    clip: bool = False
    checkpointing: bool = False


CASES = (
    Case("plain"),
    Case("bf16", bf16=True),
    Case("accumulate 2", accumulate=2),
    Case("clip", clip=True),
    Case("checkpointing", checkpointing=True),
)


def parts() -> tuple[nn.Module, torch.Tensor]:
    """A transformer whose step takes some ten milliseconds, and one batch of this rank."""
    from accel_testing.equivalence.models import TinyTransformer

    torch.manual_seed(0)
    model = TinyTransformer(VOCABULARY, 96, layers=3, heads=4, length=LENGTH)
    return model, torch.randint(VOCABULARY, (BATCH, LENGTH))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token loss."""
    return nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def raw(case: Case) -> Step:
    """What a careful person writes by hand."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, tokens = parts()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    kinds: dict[str, torch.dtype] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if case.bf16 else {}
    inner, outer = MixedPrecisionPolicy(**kinds), MixedPrecisionPolicy(**kinds, output_dtype=torch.float32)
    for name, block in model.blocks.named_children():
        if case.checkpointing:
            model.blocks.register_module(name, checkpoint_wrapper(block))
        fully_shard(model.blocks.get_submodule(name), mesh=mesh, mp_policy=inner)
    fully_shard(model, mesh=mesh, mp_policy=outer if case.bf16 else inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    position = cycle(range(1, case.accumulate + 1))

    def step() -> None:
        due = next(position) == case.accumulate
        if case.accumulate > 1:
            model.set_requires_gradient_sync(due)
        loss = loss_of(model, tokens)
        (loss / case.accumulate if case.accumulate > 1 else loss).backward()
        if due:
            if case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return step


def accel(case: Case) -> Step:
    """The loop of the README, with sharding."""
    from accel import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if case.bf16 else "no",
        gradient_accumulation_steps=case.accumulate,
        fsdp_plugin=FullyShardedDataParallelPlugin(activation_checkpointing=case.checkpointing),
    )
    model, tokens = parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    quiet = nullcontext()

    def step() -> None:
        with accelerator.accumulate(model) if case.accumulate > 1 else quiet:
            accelerator.backward(loss_of(model, tokens))
            if case.clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return step


MAKERS: dict[str, Callable[[Case], Step]] = {"raw": raw, "accel": accel}


def measure_time(case: Case, *, rounds: int, steps: int) -> dict[str, Any]:
    """Milliseconds of the step by hand, and how much longer ours takes, on the clock and in processor time."""
    loops = {name: make(case) for name, make in MAKERS.items()}
    found = timed(loops, rounds=rounds, steps=steps * case.accumulate)
    return {"case": case.name, **found, "raw_ms": found["raw_ms"] * case.accumulate}


def timed(loops: Mapping[str, Step], *, rounds: int, steps: int) -> dict[str, float]:
    """Milliseconds of the step ``raw``, and how much longer ``accel`` takes, as one rank sees it."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    spent: dict[str, list[float]] = {name: [] for name in loops}

    def run(name: str) -> Step:
        def many() -> None:
            started = time.thread_time()
            for _ in range(steps):
                loops[name]()
            spent[name].append(time.thread_time() - started)

        return many

    times = interleave({name: run(name) for name in loops}, rounds, warmup=2, before=dist.barrier)
    busy = {name: seconds[-rounds:] for name, seconds in spent.items()}
    ratios = [ours / theirs for ours, theirs in zip(busy["accel"], busy["raw"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "raw_ms": statistics.median(times["raw"]) / steps * 1e3,
        "wall_ratio": ratio(times, "accel", "raw"),
        "cpu_ratio": statistics.median(ratios),
        "+-": (high - low) / 2 / rounds**0.5,
    }


def measure_memory(case: Case, name: str) -> int:
    """The most bytes that a rank held from making the model to the end of three steps."""
    from accel_testing.faults.memory import peak_allocated, settled

    def run() -> None:
        step = MAKERS[name](case)
        for _ in range(3 * case.accumulate):
            step()

    with settled():
        return peak_allocated(run)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2, help="number of processes to measure with")
    names = [case.name for case in CASES]
    options.add_argument("--cases", nargs="*", choices=names, default=names, help="what a step does besides the plain")
    args = options.parse_args()
    rounds, steps = (2, 1) if args.quick else (args.rounds, 4)
    columns = ["case", "raw_ms", "wall_ratio", "cpu_ratio", "+-", "raw_MiB", "memory_ratio"]
    report = Report(f"A sharded step over the same by hand, {args.ranks} ranks (goals: 1.02, 1.01)", columns)
    from accel_testing import RankPool

    with RankPool(args.ranks, timeout=900, preload=["torch._dynamo"]) as pool:
        for case in [one for one in CASES if one.name in args.cases]:
            rows = pool.run(measure_time, case, rounds=rounds, steps=steps)
            row = {key: rows[0][key] for key in ("case", "raw_ms")}
            for key in ("wall_ratio", "cpu_ratio", "+-"):
                row[key] = statistics.median(one[key] for one in rows)
            # In turn; the least of several, if a machine is so slow that threads of the collectives let go too late.
            runs = [
                (name, pool.run(measure_memory, case, name)) for _ in range(1 if args.quick else 3) for name in MAKERS
            ]
            held = {name: min(max(ranks) for one, ranks in runs if one == name) for name in MAKERS}
            report.add(**row, raw_MiB=held["raw"] / 2**20, memory_ratio=held["accel"] / held["raw"])
    report.show(args.json)


if __name__ == "__main__":
    main()
