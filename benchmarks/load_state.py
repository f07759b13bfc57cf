"""``save_state`` and ``load_state`` of a run against the machine's time for the same bytes, by strategy.

The bases are the least that each rank has to do: write its share and wait for the disk; read its share out of the page
cache into memory that is allocated already. ``limit`` is the same reading with a CRC-32 of every byte, which the ranks
of a machine share where they read the same: no load that compares what it reads is faster. ``--peers`` adds torch's
distributed checkpoint (DCP) with the same model and optimizer. It compares nothing, and calls fsync for its files only,
where accel calls it for the folders too. All take turns; loads go into the same Accelerator again and again.
"""

import os
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.checkpoint import BLOCK, MIB, by_all, clearing, written
from benchmarks.harness import Report, interleave, parser, ratio

CASES = {"single": 1, "ddp": 2, "fsdp": 2}
LOAD_GOAL = 1.3
SAVE_GOALS = {"single": 1.1, "ddp": 1.3, "fsdp": 1.3}
PIECE = 2**20


def trained(strategy: str, size: int, width: int) -> tuple[Any, nn.Module, torch.optim.Optimizer, int]:
    """An Accelerator whose model and AdamW's states take about ``size`` bytes, those two, and how many bytes it is."""
    from accel import Accelerator

    layers = max(1, size // (3 * 4 * width * width))
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    nbytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, width)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model, optimizer.optimizer, nbytes


def read_into(
    path: Path, view: memoryview, *, piece: int, digested: Callable[[int], bool] = lambda position: False
) -> int:
    """Reads a file into ``view`` in pieces; returns the CRC-32 of those at positions that are to be ``digested``."""
    from zlib_ng import zlib_ng

    value = position = 0
    with path.open("rb", buffering=0) as file:
        while position < len(view):
            here = view[position : position + piece]
            count = file.readinto(here)
            if digested(position):
                value = zlib_ng.crc32(here[:count], value)
            position += count
    return value


def dcp_ways(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Saving and loading with torch's distributed checkpoint, as its tutorial has it."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def load() -> None:
        held = state()
        checkpoint.load(held, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])

    return lambda: checkpoint.save(state(), checkpoint_id=folder), load


def measure(folder: str, *, strategy: str, size: int, width: int, rounds: int, peers: bool) -> list[dict[str, Any]]:
    """The rows of saving and loading, as rank 0 sees them."""
    warnings.simplefilter("ignore")  # DCP's, about its own deprecated parts
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    accelerator, model, optimizer, nbytes = trained(strategy, size, width)
    place, saves = Path(folder), Path(folder) / "saves"
    save_dcp, load_dcp = dcp_ways(model, optimizer, place / "dcp")
    if rank == 0:
        saves.mkdir()
    part = torch.ones(nbytes // ranks, dtype=torch.uint8)
    dist.barrier()
    variants: dict[str, Callable[[], object]] = {
        "base": by_all(lambda: written(saves / f"raw{rank}", part)),
        "accel": lambda: accelerator.save_state(saves / "accel"),
    }
    if peers:
        variants["dcp"] = dcp_ways(model, optimizer, saves / "dcp")[0]
    times = interleave({name: clearing(saves, run) for name, run in variants.items()}, rounds, before=dist.barrier)
    row = {"ranks": ranks, "mib": nbytes / MIB}
    rows = [row | summary(times) | {"what": f"save {strategy}", "goal": SAVE_GOALS[strategy]}]

    accelerator.save_state(place / "saved")
    share = nbytes // ranks if strategy == "fsdp" else nbytes
    raw = place / f"raw{rank}"
    raw.write_bytes(bytes(share))
    view = memoryview(torch.ones(share, dtype=torch.uint8).numpy())

    def own(position: int) -> bool:
        return strategy != "ddp" or position // BLOCK % ranks == rank

    variants = {
        "base": by_all(lambda: read_into(raw, view, piece=BLOCK)),
        "limit": by_all(lambda: read_into(raw, view, piece=PIECE, digested=own)),
        "accel": lambda: accelerator.load_state(place / "saved") and None,
    }
    if peers:
        save_dcp()
        variants["dcp"] = load_dcp
    times = interleave(variants, rounds, before=dist.barrier)
    rows.append(row | summary(times) | {"what": f"load {strategy}", "goal": LOAD_GOAL})
    rows[-1]["to_limit"] = ratio(times, "accel", "limit")
    return rows


def summary(times: dict[str, list[float]]) -> dict[str, float]:
    """The base's time, and of the others medians of the ratios to it, and the ratio of the fastest rounds."""
    found = {name: ratio(times, name, "base") for name in times if name != "base"}
    fastest = min(times["accel"]) / min(times["base"])
    return {"base_ms": statistics.median(times["base"]) * 1e3, **found, "fastest": fastest}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--mib", type=int, default=288, help="size of the states in MiB")
    options.add_argument("--width", type=int, default=1024, help="features of each layer: width x width float32 values")
    options.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES, help="strategies to measure")
    options.add_argument("--folder", type=Path, default=None, help="where to write (the system's temporary folder)")
    args = options.parse_args()
    from accel_testing import RankPool

    columns = ["what", "ranks", "mib", "base_ms", "goal", "accel", "fastest", "limit", "to_limit"]
    report = Report("save_state and load_state, as ratios to a write with fsync and a warm read", columns)
    report.columns = [*columns, *(("dcp",) if args.peers else ())]
    rounds, size, width = (1, 4 * MIB, 64) if args.quick else (args.rounds, args.mib * MIB, args.width)
    for strategy in args.cases:
        with RankPool(CASES[strategy], timeout=1800) as pool, tempfile.TemporaryDirectory(dir=args.folder) as folder:
            given = {"strategy": strategy, "size": size, "width": width, "rounds": rounds, "peers": args.peers}
            for row in pool.run(measure, folder, **given)[0]:
                report.add(**row)
    report.show(args.json)


if __name__ == "__main__":
    main()
