"""Cost of a step through an Accelerator beyond the same step by DeepSpeed's own calls, in pairs, by stage.

Both loops run in one process, each with an engine of its own, a few steps in turn. ``raw`` is forward,
``engine.backward`` and ``engine.step``; ``accel`` the ordinary loop with accumulate, backward, clip_grad_norm_, step
and zero_grad. With ``clip`` the raw engine clips by its configuration, which computes the norm it needs anyhow.

Each pair of blocks gives a ratio; shown are the median of the ratios and an interval in which the true one lies with
95 %. Where in memory an engine lies is part of it: ``--control`` shows by what two raw ones differ, and with
``--one-engine`` both loops drive the one that accel has prepared, so that it is not. How many pages are given back and
fetched again in a step differs from process to process, for either loop: ``--pools`` takes several. ``wall`` is what
the slowest rank takes, ``cpu`` the processor time of all ranks together, which others on the machine change less.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.harness import CLOCKS, Blocks, Report, paired, parser

STAGES, STEPS = (0, 1, 2, 3), 3
OF_CLOCK = ("percent", "interval")


@dataclass(frozen=True)
class Case:
    """One loop: the stage of ZeRO, what is done in a step, and how large the model's layers and a batch are."""

    stage: int
    clip: bool
    offload: bool
    width: int
    batch: int


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())))


def settings(case: Case) -> dict[str, Any]:
    """DeepSpeed's configuration for both loops."""
    zero: dict[str, Any] = {"stage": case.stage, "reduce_bucket_size": 2_000_000, "allgather_bucket_size": 2_000_000}
    if case.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "zero_optimization": zero,
        "gradient_clipping": 1.0 if case.clip else 0.0,
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 2**31 - 1,
    }


def optimizer_of(model: nn.Module, *, offload: bool) -> torch.optim.Optimizer:
    if offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        made: torch.optim.Optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-3)
        return made
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def raw_step(case: Case, batch: torch.Tensor) -> Callable[[], None]:
    import deepspeed

    model = make_model(case.width)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer_of(model, offload=case.offload),
        config=settings(case),
        dist_init_required=False,
    )
    return by_hand(engine, batch)


def by_hand(engine: Any, batch: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        loss = engine(batch).pow(2).mean()
        engine.backward(loss)
        engine.step()

    return step


def accel_step(accelerator: Any, batch: torch.Tensor, case: Case) -> tuple[nn.Module, Callable[[], None]]:
    plain = make_model(case.width)
    model, optimizer = accelerator.prepare(plain, optimizer_of(plain, offload=case.offload))

    def step() -> None:
        with accelerator.accumulate(model):
            loss = model(batch).pow(2).mean()
            accelerator.backward(loss)
            if case.clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return model, step


def several(step: Callable[[], None], steps: int) -> Callable[[], None]:
    def block() -> None:
        for _ in range(steps):
            step()

    return block


def measure(case: Case, *, pairs: int, steps: int, control: bool, one_engine: bool) -> list[Blocks]:
    """Blocks of steps by the clock on the wall and in processor time, as one rank sees them."""
    import torch.distributed as dist

    from accel import Accelerator

    torch.set_num_threads(1)
    batch = torch.randn(case.batch, case.width)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=settings(case))
    model, ours = accel_step(accelerator, batch, case)
    if control:
        ours = raw_step(case, batch)
    first = several(ours, steps)
    if one_engine:
        prepared = accelerator.backend._engines.find(model)
        hand = several(by_hand(model, batch), steps)

        def second() -> None:
            reduces, model.enable_backward_allreduce = model.enable_backward_allreduce, True
            prepared.gradients.at_boundary(True)
            hand()
            model.enable_backward_allreduce = reduces
            prepared.open = False
    else:
        second = several(raw_step(case, batch), steps)
    before = dist.barrier if dist.is_initialized() else None
    found = paired(first, second, pairs, clocks=list(CLOCKS.values()), before=before)
    accelerator.free_memory()
    accelerator.end_training()
    return found


def over_pools(pools: Sequence[Sequence[Blocks]]) -> list[Blocks]:
    """What one rank measured in several sets of processes, by clock."""
    return [
        Blocks([time for one in blocks for time in one.first], [time for one in blocks for time in one.second])
        for blocks in zip(*pools, strict=True)
    ]


def row(ranks: Sequence[Sequence[Blocks]], steps: int) -> dict[str, Any]:
    """The slowest rank's wall time of every block, and the processor time of all ranks together."""
    joined = {}
    for place, (clock, join) in enumerate(zip(CLOCKS, (max, sum), strict=True)):
        firsts, seconds = ([join(block) for block in zip(*lists, strict=True)] for lists in _sides(ranks, place))
        joined[clock] = Blocks(firsts, seconds)
    result: dict[str, Any] = {"raw_ms": statistics.median(joined["wall"].second) / steps * 1e3}
    for clock, blocks in joined.items():
        result[f"{clock}_percent"], low, high = blocks.excess()
        result[f"{clock}_interval"] = f"{low:.1f} to {high:.1f}"
    return result


def _sides(ranks: Sequence[Sequence[Blocks]], place: int) -> tuple[list[list[float]], list[list[float]]]:
    return [one[place].first for one in ranks], [one[place].second for one in ranks]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2, help="number of processes")
    options.add_argument("--stages", type=int, nargs="*", default=STAGES, help="of ZeRO")
    options.add_argument("--offload", action="store_true", help="also with the optimizer on the host")
    engines = options.add_mutually_exclusive_group()
    engines.add_argument("--control", action="store_true", help="DeepSpeed's own calls on both sides")
    engines.add_argument("--one-engine", action="store_true", help="both loops drive the same engine")
    options.add_argument("--width", type=int, default=512, help="of the four layers")
    options.add_argument("--batch", type=int, default=128, help="samples of a step on each rank")
    options.add_argument("--steps", type=int, default=STEPS, help="of a loop in turn")
    options.add_argument(
        "--pools", type=int, default=1, help="sets of fresh processes, in each of which all is measured"
    )
    args = options.parse_args()
    pairs, steps = (3, 1) if args.quick else (4 * args.rounds, args.steps)
    columns = ["stage", "clip", "offload", "raw_ms", *(f"{clock}_{what}" for clock in CLOCKS for what in OF_CLOCK)]
    report = Report("A step through an Accelerator beyond DeepSpeed's own calls (goal: 2 % of a step of 5 ms)", columns)
    from accel_testing import RankPool

    kinds = [(stage, clip, False) for stage in args.stages for clip in (False, True)]
    kinds += [(stage, True, True) for stage in args.stages if stage and args.offload]
    how = {"pairs": pairs, "steps": steps, "control": args.control, "one_engine": args.one_engine}
    measured: dict[tuple[int, bool, bool], list[list[list[Blocks]]]] = {kind: [] for kind in kinds}
    for _ in range(args.pools):
        with RankPool(args.ranks, timeout=900) as pool:
            for kind, pools in measured.items():
                pools.append(pool.run(measure, Case(*kind, args.width, args.batch), **how))
    for (stage, clip, offload), pools in measured.items():
        ranks = [over_pools(one) for one in zip(*pools, strict=True)]
        report.add(stage=stage, clip=clip, offload=offload, **row(ranks, steps))
    report.show(args.json)


if __name__ == "__main__":
    main()
