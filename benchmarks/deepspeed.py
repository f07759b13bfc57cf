"""What a step through an Accelerator costs beyond the same step by DeepSpeed's own calls, interleaved, by stage.

Both loops run in one process, each with an engine of its own, in turn. ``raw`` is forward, ``engine.backward`` and
``engine.step``; ``accel`` the ordinary loop with accumulate, backward, clip_grad_norm_, step and zero_grad. With
``clip`` the raw engine clips by its configuration, which computes the norm it needs anyhow. By default processor time
counts, which others on the machine change little; a rank that waits for another burns none.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.harness import CLOCKS, Report, interleave, parser, ratio

STAGES, WIDTH, BATCH = (0, 1, 2, 3), 384, 32


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def settings(stage: int, *, clip: bool, offload: bool) -> dict[str, Any]:
    """DeepSpeed's configuration for both loops."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 2_000_000, "allgather_bucket_size": 2_000_000}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "zero_optimization": zero,
        "gradient_clipping": 1.0 if clip else 0.0,
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 2**31 - 1,
    }


def optimizer_of(model: nn.Module, *, offload: bool) -> torch.optim.Optimizer:
    if offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        made: torch.optim.Optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-3)
        return made
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def raw_step(config: dict[str, Any], batch: torch.Tensor, *, offload: bool) -> Callable[[], None]:
    import deepspeed

    model = make_model()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer_of(model, offload=offload), config=dict(config), dist_init_required=False
    )

    def step() -> None:
        engine.backward(engine(batch).pow(2).mean())
        engine.step()

    return step


def accel_step(accelerator: Any, batch: torch.Tensor, *, clip: bool, offload: bool) -> Callable[[], None]:
    plain = make_model()
    model, optimizer = accelerator.prepare(plain, optimizer_of(plain, offload=offload))

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).pow(2).mean())
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


def measure(stage: int, *, clip: bool, offload: bool, rounds: int, steps: int, clock: str) -> dict[str, Any]:
    """One row, as one rank sees it."""
    from accel import Accelerator

    torch.set_num_threads(1)
    batch = torch.randn(BATCH, WIDTH)
    config = settings(stage, clip=clip, offload=offload)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=config)
    ours = accel_step(accelerator, batch, clip=clip, offload=offload)
    loops = {"accel": ours, "raw": raw_step(config, batch, offload=offload)}

    def run(step: Callable[[], None]) -> Callable[[], None]:
        def many() -> None:
            for _ in range(steps):
                step()

        return many

    times = interleave({name: run(step) for name, step in loops.items()}, rounds, warmup=2, clock=CLOCKS[clock])
    raw = statistics.median(times["raw"]) / steps * 1e3
    beyond = (ratio(times, "accel", "raw") - 1) * 100
    accelerator.free_memory()
    accelerator.end_training()
    return {"stage": stage, "clip": clip, "offload": offload, "raw_ms": raw, "overhead_percent": beyond}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2, help="number of processes")
    options.add_argument("--clock", choices=CLOCKS, default="cpu", help="what is measured")
    options.add_argument("--offload", action="store_true", help="also with the optimizer on the host")
    args = options.parse_args()
    rounds, steps = (2, 2) if args.quick else (args.rounds, 10)
    columns = ["stage", "clip", "offload", "raw_ms", "overhead_percent"]
    report = Report("A step through an Accelerator beyond DeepSpeed's own calls (goal: 2 % of a step of 5 ms)", columns)
    from accel_testing import RankPool

    cases = [(stage, clip, False) for stage in STAGES for clip in (False, True)]
    cases += [(stage, True, True) for stage in STAGES[1:] if args.offload]
    with RankPool(args.ranks, timeout=900) as pool:
        for stage, clip, offload in cases:
            how = {"rounds": rounds, "steps": steps, "clock": args.clock}
            rows = pool.run(measure, stage, clip=clip, offload=offload, **how)
            report.add(**max(rows, key=lambda row: row["overhead_percent"]))
    report.show(args.json)


if __name__ == "__main__":
    main()
