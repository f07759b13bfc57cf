"""A nested gather against one raw collective over the same bytes, flattened by hand and already packed."""

import statistics
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Report, interleave, parser, ratio


def shapes_of(leaves: int, size: int) -> dict[str, Any]:
    """A batch-like structure: a dict of lists of float32 tensors."""
    half = leaves // 2
    rest = {str(number): torch.randn(size) for number in range(leaves - half)}
    return {"logits": [torch.randn(size) for _ in range(half)], "rest": rest}


def leaves_of(tree: dict[str, Any]) -> list[torch.Tensor]:
    return [*tree["logits"], *tree["rest"].values()]


def measure(leaves: int, size: int, *, peers: bool, rounds: int, repeat: int) -> dict[str, Any]:
    from accel_state.collectives import tensors as collectives

    torch.set_num_threads(1)
    tree = shapes_of(leaves, size)
    world = dist.get_world_size()
    packed = torch.cat([leaf.view(-1) for leaf in leaves_of(tree)])

    def bare() -> None:
        out = torch.empty(world * packed.numel())
        dist.all_gather_into_tensor(out, packed)

    def by_hand() -> None:
        flat = torch.cat([leaf.view(-1) for leaf in leaves_of(tree)])
        out = torch.empty(world, flat.numel())
        dist.all_gather_into_tensor(out.view(-1), flat)
        [part.reshape(-1) for part in out.split(size, dim=1)]

    def accel() -> None:
        collectives.gather(tree)

    variants = {"bare": bare, "by_hand": by_hand, "accel": accel}
    if peers:
        from accelerate import PartialState
        from accelerate.utils import gather

        PartialState(cpu=True)
        variants["accelerate"] = lambda: gather(tree)

    def many(run: Any) -> Any:
        return lambda: [run() for _ in range(repeat)]

    times = interleave({name: many(run) for name, run in variants.items()}, rounds, warmup=2)
    row: dict[str, Any] = {
        "structure": f"{leaves} x {size * 4} B",
        "bare_us": statistics.median(times["bare"]) / repeat * 1e6,
    }
    for name in ("accel", *(("accelerate",) if peers else ())):
        row[f"{name}_to_bare"] = ratio(times, name, "bare")
        row[f"{name}_to_by_hand"] = ratio(times, name, "by_hand")
    row["by_hand_to_bare"] = ratio(times, "by_hand", "bare")
    return row


def main() -> None:
    args = parser(__doc__).parse_args()
    # Many short rounds: what disturbs a machine for longer than one of them then falls on all variants alike.
    rounds, repeat = (2, 5) if args.quick else (20 * args.rounds, 10)
    columns = ["structure", "bare_us", "by_hand_to_bare", "accel_to_bare", "accel_to_by_hand"]
    columns += ["accelerate_to_bare", "accelerate_to_by_hand"] if args.peers else []
    report = Report("Nested gather on two gloo processes, as ratios (goal: 1.2 to one raw collective)", columns)
    from accel_testing import RankPool

    with RankPool(2, timeout=900) as pool:
        for leaves, size in ((1, 1024), (8, 256), (8, 16384), (20, 1024), (20, 65536)):
            report.add(**pool.run(measure, leaves, size, peers=args.peers, rounds=rounds, repeat=repeat)[0])
    report.show(args.json)


if __name__ == "__main__":
    main()
