"""Saving and loading against what the machine needs for the same bytes: one write and fsync, one copy, one read.

All ranks hold the same state, so a save writes each tensor once, and a rank's part is the state over the ranks.
``--peers`` adds torch's own ways: distributed checkpoint (DCP) and ``torch.save``, which gets an fsync here too.
"""

import ctypes
import os
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Report, Rounds, extra_memory, interleave, parser, ratio

MIB = 2**20
BLOCK = 8 * MIB
Tensors = dict[str, dict[str, torch.Tensor]]


def state_of(size: int) -> Tensors:
    """About ``size`` bytes as a transformer trained with Adam has them: matrices and vectors, and two more of each."""
    generator = torch.Generator().manual_seed(0)
    width = 1024 if size >= 64 * MIB else 128
    layers = max(1, size // (3 * 4 * (4 * width * width + 4 * width)))
    shapes = {"qkv": (3 * width, width), "out": (width, width), "norm": (width,), "bias": (3 * width,)}
    names = {f"layers.{layer}.{name}": shape for layer in range(layers) for name, shape in shapes.items()}
    return {
        kind: {name: torch.randn(shape, generator=generator) for name, shape in names.items()}
        for kind in ("model", "exp_avg", "exp_avg_sq")
    }


def bytes_of(state: Tensors) -> int:
    return sum(tensor.nbytes for group in state.values() for tensor in group.values())


def flattened(state: Tensors) -> torch.Tensor:
    """All bytes in a row."""
    return torch.cat([tensor.view(-1).view(torch.uint8) for group in state.values() for tensor in group.values()])


def written(path: Path, content: torch.Tensor) -> None:
    """The cheapest way to have bytes on the disk: one file, in order, and an fsync."""
    view = memoryview(content.numpy())
    with path.open("wb", buffering=0) as file:
        for begin in range(0, len(view), BLOCK):
            file.write(view[begin : begin + BLOCK])
        os.fsync(file.fileno())


def read(path: Path, size: int) -> torch.Tensor:
    """The cheapest way to have bytes in new memory."""
    content = torch.empty(size, dtype=torch.uint8)
    view = memoryview(content.numpy())
    with path.open("rb", buffering=0) as file:
        position = 0
        while position < size:
            position += file.readinto(view[position : position + BLOCK])
    return content


def torch_saved(path: Path, state: Tensors) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def forget(folder: Path) -> None:
    """Drops the files of ``folder`` from the page cache, so that reading them means the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def return_memory() -> None:
    """Gives what is free back to the system: who allocates next then pays for new pages, as a new process does."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def alone(run: Callable[[], object]) -> Callable[[], None]:
    """What rank 0 does while the others wait for it."""

    def together() -> None:
        if dist.get_rank() == 0:
            run()
        dist.barrier()

    return together


def by_all(run: Callable[[], object]) -> Callable[[], list[object]]:
    """What every rank does by itself, until the last has done it: as loading together ends."""

    def together() -> list[object]:
        kept = [run()]
        dist.barrier()
        return kept

    return together


def clearing(folder: Path, run: Callable[[], object]) -> Callable[[], Callable[[], None]]:
    """``run``, after which rank 0 removes what it has written, behind the clock."""

    def clear() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def both() -> Callable[[], None]:
        run()
        return clear

    return both


def saving(folder: Path, state: Tensors, *, peers: bool, rounds: int) -> Rounds:
    """Saving while the caller waits."""
    import accel_ckpt

    content = flattened(state)
    variants: dict[str, Callable[[], object]] = {
        "base": alone(lambda: written(folder / "base", content)),
        "accel": lambda: accel_ckpt.save(folder / "accel", state),
    }
    if peers:
        from torch.distributed import checkpoint

        variants["dcp"] = lambda: checkpoint.save(state, checkpoint_id=folder / "dcp")
        variants["torch_save"] = alone(lambda: torch_saved(folder / "torch.pt", state))
    return interleave({name: clearing(folder, run) for name, run in variants.items()}, rounds, before=dist.barrier)


def stalling(folder: Path, state: Tensors, *, peers: bool, rounds: int) -> Rounds:
    """How long a save in the background holds up its caller, from the second on: warming up is the first."""
    import accel_ckpt

    part = flattened(state).chunk(dist.get_world_size())[dist.get_rank()]
    buffer = torch.empty_like(part)
    with accel_ckpt.AsyncSaver() as saver:

        def accel() -> Callable[[], object]:
            return saver.save(folder / "accel", state).wait

        def dcp() -> Callable[[], object]:
            from torch.distributed import checkpoint

            started: Any = checkpoint.async_save(state, checkpoint_id=folder / "dcp")
            return started.result  # type: ignore[no-any-return]

        variants: dict[str, Callable[[], object]] = {
            "base": lambda: [buffer.copy_(part)],
            "accel": accel,
            **({"dcp": dcp} if peers else {}),
        }
        return interleave(variants, rounds, warmup=2, before=dist.barrier)


def loading(folder: Path, state: Tensors, *, cold: bool, peers: bool, rounds: int) -> Rounds:
    """Loading all of it on every rank as load_state does; ``cold``: from the disk, else from the page cache."""
    import accel_ckpt

    size = bytes_of(state)
    alone(lambda: written(folder / "base", flattened(state)))()
    accel_ckpt.save(folder / "accel", state)

    def accel() -> None:
        world = dist.group.WORLD
        checkpoint = accel_ckpt.open_checkpoint(folder / "accel", verify=False, group=world)
        put = checkpoint.fetch(dict.fromkeys(checkpoint.names), group=world)  # blocks are compared as they are read
        checkpoint.verify(group=world)  # and now those that nobody has read
        for tensors in put.values():
            tensors()

    variants: dict[str, Callable[[], object]] = {"base": by_all(lambda: read(folder / "base", size)), "accel": accel}
    if peers:
        from torch.distributed import checkpoint

        checkpoint.save(state, checkpoint_id=folder / "dcp")
        alone(lambda: torch_saved(folder / "torch.pt", state))()
        variants["dcp"] = lambda: checkpoint.load(state, checkpoint_id=folder / "dcp")
        variants["torch_save"] = by_all(lambda: torch.load(folder / "torch.pt", weights_only=True))

    def before() -> None:
        if cold:
            alone(lambda: forget(folder))()
        return_memory()
        dist.barrier()

    return interleave(variants, rounds, before=before)


def slowing(folder: Path, state: Tensors, *, every: int, rows: int = 256, rounds: int) -> Rounds:
    """Steps, ``every`` of few rows (tokens), without saving, and with one save in the background of what they train.

    A step multiplies ``rows`` rows with each matrix three times, forwards and backwards. What the save takes beyond its
    stall, it takes from the steps.
    """
    import accel_ckpt

    matrices = [tensor for tensor in state["model"].values() if tensor.dim() == 2]
    batch = torch.randn(rows, matrices[0].shape[1])

    def steps() -> None:
        for _ in range(every):
            for matrix in 3 * matrices:
                batch @ matrix.T
            if dist.get_world_size() > 1:
                dist.all_reduce(batch.sum())

    with accel_ckpt.AsyncSaver() as saver:

        def accel() -> Callable[[], object]:
            handle = saver.save(folder / "accel", state)
            steps()
            return handle.wait

        return interleave({"base": steps, "accel": accel}, rounds, before=dist.barrier)


def remembering(folder: Path, state: Tensors) -> dict[str, float | None]:
    """Resident memory beyond the state, in parts of a rank: of saving, of saving in the background, of loading."""
    import accel_ckpt

    part = bytes_of(state) / dist.get_world_size()
    kept: list[object] = []

    def load() -> None:
        checkpoint = accel_ckpt.open_checkpoint(folder / "accel")
        kept.extend(checkpoint.read(name) for name in checkpoint.names)

    accel_ckpt.save(folder / "small", {"model": {"one": torch.ones(8)}})  # imports
    sync = extra_memory(lambda: accel_ckpt.save(folder / "accel", state))
    with accel_ckpt.AsyncSaver() as saver:
        background = extra_memory(lambda: saver.save(folder / "accel", state).wait())
    loaded = extra_memory(load)
    beyond = None if loaded is None else loaded - bytes_of(state)
    found = {"save": sync, "stall of a background save": background, "load, cached": beyond}
    return {what: None if extra is None else extra / part for what, extra in found.items()}


def measure(folder: str, *, size: int, peers: bool, rounds: int, every: int) -> list[dict[str, Any]]:
    """The rows of one number of processes, as rank 0 sees them; ``every`` so many steps there is a save."""
    warnings.simplefilter("ignore")  # DCP's, about its own deprecated parts
    ranks = dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    state, place = state_of(size), Path(folder)
    kinds: dict[str, tuple[str, Callable[..., Rounds], float]] = {
        "save": ("write + fsync", saving, 1.3 if ranks == 1 else 1.5),
        "stall of a background save": ("copy of a part", stalling, 1.2),
        "load, cached": ("read", partial(loading, cold=False), 1.3),
        "load from disk": ("read", partial(loading, cold=True), 1.3),
    }
    memory = remembering(place, state)
    slowed = slowing(place, state, every=every, rounds=max(1, rounds // 2))  # of many steps each
    row = {"what": f"{every} steps and a save", "ranks": ranks, "mib": bytes_of(state) / MIB, "base": f"{every} steps"}
    row |= {"base_ms": statistics.median(slowed["base"]) * 1e3, "goal": 1.05, "accel": ratio(slowed, "accel", "base")}
    rows = [row]
    for what, (base, run, goal) in kinds.items():
        clearing(place, lambda: None)()()
        dist.barrier()
        times = run(place, state, peers=peers, rounds=rounds)
        row = {"what": what, "ranks": ranks, "mib": bytes_of(state) / MIB, "base": base, "goal": goal}
        row["base_ms"] = statistics.median(times["base"]) * 1e3
        row |= {name: ratio(times, name, "base") for name in times if name != "base"}
        rows.append(row | {"extra_memory": memory.get(what)})
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--mib", type=int, default=288, help="size of the state in MiB")
    options.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="numbers of processes to measure with")
    options.add_argument("--folder", type=Path, default=None, help="where to write (the system's temporary folder)")
    args = options.parse_args()
    columns = ["what", "ranks", "mib", "base", "base_ms", "goal", "accel", "extra_memory"]
    report = Report("Checkpoints, as ratios to the machine's time for the same bytes", columns)
    report.columns = [*columns, *(("dcp", "torch_save") if args.peers else ())]
    from accel_testing import RankPool

    rounds, every, size = (1, 5, 4 * MIB) if args.quick else (args.rounds, 50, args.mib * MIB)
    for ranks in args.ranks:
        with RankPool(ranks, timeout=1800) as pool, tempfile.TemporaryDirectory(dir=args.folder) as folder:
            for row in pool.run(measure, folder, size=size, peers=args.peers, rounds=rounds, every=every)[0]:
                report.add(**row)
    report.show(args.json)


if __name__ == "__main__":
    main()
