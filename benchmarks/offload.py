"""Forwards of a model with offloaded weights against the longer of its computation and the reading of its bytes.

The model is a row of square Linear blocks. The batch is chosen so that the plain forward takes 0.2, 1 and 3 times as
long as reading the weights out of the page cache (``--cold`` drops them from it before each forward). ``cpu`` and
``disk`` are ``cpu_offload`` and ``disk_offload``, the latter with room for three blocks; the ratio is to the longer of
the two bases in the same round. ``beside`` is the plain forward with the same reading in another thread: a read out of
the page cache is work of a processor, so that on two of them no forward that reads is much faster.

``start`` is ``load_checkpoint_and_dispatch`` of a safetensors file against reading its bytes into memory that is
allocated already: with a copy (``cpu``), mapped and computing once with one row (``mapped``), and, beside them, the
same reading into new memory (``new``), whose pages the operating system clears first; the goal of ``start`` is for
``cpu_to_new``, the load with a copy over that. ``--peers`` adds Accelerate's functions.
"""

import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Report, Rounds, extra_memory, interleave, parser, ratio

MIB = 2**20
CASES = (0.2, 1.0, 3.0)
GOALS = {"cpu": 1.1, "disk": 1.15, "start": 1.2}
ROOM = 3


def build(width: int, blocks: int) -> nn.Sequential:
    """The model, with weights."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(blocks)))


def reading(files: list[Path], buffer: memoryview, *, cold: bool) -> Callable[[], None]:
    """Reads all files into one buffer, one after the other."""

    def read() -> None:
        for path in files:
            with path.open("rb", buffering=0) as file:
                if cold:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                position = 0
                while count := file.readinto(buffer[position:]):
                    position += count

    return read


def seconds(run: Callable[[], object], times: int = 3) -> float:
    """Least time of a few runs."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return min(found)


def batch_for(model: nn.Module, width: int, wanted: float) -> torch.Tensor:
    """Input with which a forward takes about so many seconds, or a single row if that takes longer."""

    def taken(rows: int) -> float:
        x = torch.ones(rows, width)
        return seconds(lambda: model(x), 2)

    rows = 1
    while rows < 2**16 and (measured := taken(rows)) < wanted:
        rows *= 2
    return torch.ones(max(1, int(rows * min(1.0, wanted / measured))), width)


def dropping(files: list[Path], run: Callable[[], object], *, cold: bool) -> Callable[[], None]:
    """``run`` after the files have left the page cache."""

    def dropped() -> None:
        for path in files if cold else ():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        run()

    return dropped


def together(read: Callable[[], object], compute: Callable[[], object]) -> Callable[[], None]:
    """``compute`` while another thread reads."""

    def both() -> None:
        thread = threading.Thread(target=read)
        thread.start()
        compute()
        thread.join()

    return both


def to_longest(times: Rounds, name: str) -> float:
    """Median over the rounds of a time over the longer of the computation's and the reading's."""
    rounds = zip(times[name], times["plain"], times["read"], strict=True)
    return statistics.median(taken / max(plain, read) for taken, plain, read in rounds)


@torch.no_grad()
def measure(
    case: float, *, width: int, blocks: int, rounds: int, peers: bool, cold: bool, folder: Path
) -> dict[str, Any]:
    """One row: a forward whose computation takes ``case`` times the reading."""
    from accel import cpu_offload, disk_offload

    size, plain = width * width * 4, build(width, blocks)
    disk_offload(disk := build(width, blocks), folder / "accel", resident_bytes=ROOM * size)
    files = sorted((folder / "accel").glob("*.dat"))
    read = reading(files, memoryview(bytearray(size)), cold=cold)
    x = batch_for(plain, width, case * seconds(read))
    on_cpu = cpu_offload(build(width, blocks))
    variants: dict[str, Callable[[], object]] = {
        "plain": lambda: plain(x) is None,
        "read": read,
        "beside": together(read, lambda: plain(x) is None),
        "cpu": lambda: on_cpu(x) is None,
        "disk": dropping(files, lambda: disk(x), cold=cold),
    }
    if peers:
        import accelerate

        peer_on_cpu = accelerate.cpu_offload(build(width, blocks))
        accelerate.disk_offload(peer := build(width, blocks), folder / "peer")
        peer_files = sorted((folder / "peer").glob("*.dat"))
        variants["peer_cpu"] = lambda: peer_on_cpu(x) is None
        variants["peer_disk"] = dropping(peer_files, lambda: peer(x), cold=cold)
    times = interleave(variants, rounds)
    extra = extra_memory(lambda: disk(x))
    row: dict[str, Any] = {
        "case": f"compute {case:g}x",
        "rows": x.shape[0],
        "plain_ms": statistics.median(times["plain"]) * 1e3,
        "read_ms": statistics.median(times["read"]) * 1e3,
        "blocks_extra": None if extra is None else extra / size,
    }
    return row | {name: to_longest(times, name) for name in variants if name not in ("plain", "read")}


@torch.no_grad()
def start(*, width: int, blocks: int, rounds: int, peers: bool, folder: Path) -> dict[str, Any]:
    """The row of loading a checkpoint onto the CPU, against reading its bytes into memory that is allocated already.

    A mapped model reads its weights when it computes first, so its time has a forward of one row in it.
    """
    from safetensors.torch import save_file

    from accel import load_checkpoint_and_dispatch

    file = folder / "model.safetensors"
    save_file(build(width, blocks).state_dict(), file, metadata={"format": "pt"})
    size, x = file.stat().st_size, torch.ones(1, width)
    read = reading([file], memoryview(bytearray(size)), cold=False)

    def mapped() -> None:
        load_checkpoint_and_dispatch(_empty(width, blocks), file, {"": "cpu"}, mapped=True)(x)

    variants: dict[str, Callable[[], object]] = {
        "read": read,
        "new": lambda: reading([file], memoryview(mmap.mmap(-1, size)), cold=False)(),
        "cpu": lambda: load_checkpoint_and_dispatch(_empty(width, blocks), file, {"": "cpu"}) is None,
        "mapped": mapped,
    }
    if peers:
        import accelerate

        load = accelerate.load_checkpoint_and_dispatch
        variants["peer_cpu"] = lambda: load(_empty(width, blocks), str(file), {"": "cpu"}) is None
    times = interleave(variants, rounds)
    row: dict[str, Any] = {"case": "start", "read_ms": statistics.median(times["read"]) * 1e3}
    row["cpu_to_new"] = ratio(times, "cpu", "new")
    return row | {name: ratio(times, name, "read") for name in variants if name != "read"}


def _empty(width: int, blocks: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False, device="meta") for _ in range(blocks)))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--mib", type=int, default=1024, help="size of the model in MiB")
    options.add_argument("--cold", action="store_true", help="read from the disk and not from the page cache")
    options.add_argument("--folder", type=Path, default=None, help="where to write (the system's temporary folder)")
    args = options.parse_args()
    width = 256 if args.quick else 4096
    blocks = 8 if args.quick else max(2, args.mib * MIB // (width * width * 4))
    rounds = 2 if args.quick else args.rounds
    columns = ["case", "rows", "plain_ms", "read_ms", "cpu", "beside", "disk", "blocks_extra"]
    columns += ["mapped", "new", "cpu_to_new"]
    report = Report("a forward with offloaded weights, as a ratio to the longer of computing and reading", columns)
    report.columns = [*columns, *(("peer_cpu", "peer_disk") if args.peers else ())]
    for case in CASES:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            report.add(
                **measure(
                    case,
                    width=width,
                    blocks=blocks,
                    rounds=rounds,
                    peers=args.peers,
                    cold=args.cold,
                    folder=Path(folder),
                )
            )
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        report.add(**start(width=width, blocks=blocks, rounds=rounds, peers=args.peers, folder=Path(folder)))
    report.show(args.json)
    print("goals:", ", ".join(f"{name} <= {goal}" for name, goal in GOALS.items()))


if __name__ == "__main__":
    main()
