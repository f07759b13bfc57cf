"""``accel ckpt``: inspection and maintenance of checkpoints, without the model and without a process group."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from accel_launch.cli.ckpt.export import export
from accel_launch.cli.ckpt.importing import import_checkpoint
from accel_launch.cli.ckpt.options import PLACE
from accel_launch.cli.ckpt.reshard import reshard
from accel_launch.cli.ckpt.upkeep import prune, repair
from accel_launch.cli.options import as_json
from accel_launch.cli.printing import outlined, print_json, print_table
from accel_state.sizes import readable_bytes

if TYPE_CHECKING:
    from accel_ckpt.tools.inspection import Comparison, DescribedState, ListedCheckpoint


@click.group()
def ckpt() -> None:
    """List, check, compare, export, import, reshard and remove checkpoints."""


ckpt.add_command(export)
ckpt.add_command(import_checkpoint)
ckpt.add_command(prune)
ckpt.add_command(reshard)
ckpt.add_command(repair)


@ckpt.command()
@click.argument("folder", type=PLACE, metavar="DIR")
@as_json
def ls(folder: str, *, as_json: bool) -> int:
    """Lists the checkpoints in DIR with the metrics they were saved with. Ends with 1 if a manifest is damaged."""
    from accel_ckpt.series.retention import metrics_of
    from accel_ckpt.tools.inspection import list_checkpoints

    listed = list_checkpoints(folder)
    if as_json:
        print_json([_listed_as_data(one) for one in listed])
    elif listed:
        rows = [
            (
                one.path.name,
                one.created,
                one.world_size,
                readable_bytes(one.nbytes),
                ", ".join(f"{name}={value:.6g}" for name, value in metrics_of(one.metadata).items()),
                one.problem or "",
            )
            for one in listed
        ]
        print_table(["checkpoint", "created", "ranks>", "size>", "metrics", "problem"], rows)
    else:
        print(f"no checkpoints in {folder}{'' if '://' in folder else _where_else(Path(folder))}")
    return int(any(one.problem for one in listed))


@ckpt.command()
@click.argument("path")
@click.option("--name", metavar="STATE", help="Only the state of this name, like model or optimizer.")
@as_json
def show(path: str, *, name: str | None, as_json: bool) -> int:
    """Shows what the checkpoint at PATH holds: names, tensors, values, metadata. No tensor is read."""
    from accel_ckpt import open_checkpoint
    from accel_ckpt.tools.inspection import describe

    states = describe(path)
    names = [state.name for state in states]
    if name is not None and name not in names:
        raise click.UsageError(f"{path} holds no {name!r}; it holds {', '.join(names)}")
    states = [state for state in states if name in (None, state.name)]
    with open_checkpoint(path, verify=False) as saved:
        manifest = saved.manifest
        facts = {
            "path": str(saved.path),
            "created": manifest.created,
            "ranks": manifest.world_size,
            "bytes": manifest.nbytes,
            "files": len(manifest.files),
            "writer": manifest.writer,
            "metadata": saved.metadata,
        }
    if as_json:
        print_json(facts | {"states": [_state_as_data(state) for state in states]})
        return 0
    for key, value in (facts | {"bytes": readable_bytes(manifest.nbytes)}).items():
        print("\n".join(outlined(key, value)))
    for state in states:
        _print_state(state)
    return 0


@ckpt.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@as_json
def verify(paths: tuple[str, ...], *, as_json: bool) -> int:
    """Compares every byte of the checkpoints at PATH with what was written. Ends with 1 if one is damaged."""
    from accel_ckpt import open_checkpoint
    from accel_state.errors import CheckpointCorruptError

    found: dict[str, str | None] = {}
    for path in paths:
        try:
            open_checkpoint(path).close()
            found[path] = None
        except CheckpointCorruptError as error:
            found[path] = str(error)
    if as_json:
        print_json([{"path": path, "ok": problem is None, "problem": problem} for path, problem in found.items()])
    else:
        for path, problem in found.items():
            print(problem or f"{path}: every byte is as it was written")
    return int(any(found.values()))


@ckpt.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@as_json
def diff(first: str, second: str, *, as_json: bool) -> int:
    """Shows which tensors and values of two checkpoints differ, and by how much. Ends with 1 if any differ.

    For each tensor: the largest absolute difference, and the norm of the difference divided by the norm of A's tensor.
    Memory holds two tensors at a time.
    """
    from accel_ckpt.tools.inspection import compare_checkpoints

    found = compare_checkpoints(first, second)
    if as_json:
        print_json(_comparison_as_data(found))
    else:
        _print_comparison(found)
    return int(bool(found.only_first or found.only_second or found.tensors or found.values))


def _listed_as_data(one: "ListedCheckpoint") -> dict[str, object]:
    return {
        "number": one.number,
        "path": str(one.path),
        "created": one.created or None,
        "ranks": one.world_size,
        "bytes": one.nbytes,
        "metadata": one.metadata,
        "problem": one.problem,
    }


def _state_as_data(state: "DescribedState") -> dict[str, object]:
    tensors = [
        {"name": one.place, "dtype": one.dtype, "shape": one.shape, "bytes": one.nbytes, "parts": one.parts}
        for one in state.tensors
    ]
    return {"name": state.name, "tensors": tensors, "values": dict(state.values)}


def _comparison_as_data(found: "Comparison") -> dict[str, object]:
    return {
        "only_first": found.only_first,
        "only_second": found.only_second,
        "tensors": [
            {"name": one.place, "max_abs": one.largest, "relative": one.relative, "reason": one.reason or None}
            for one in found.tensors
        ],
        "values": {place: {"first": one, "second": other} for place, (one, other) in found.values.items()},
        "same": found.same,
    }


def _print_state(state: "DescribedState") -> None:
    print(f"\n{state.name}: {len(state.tensors)} tensors, {readable_bytes(sum(one.nbytes for one in state.tensors))}")
    if state.tensors:
        rows = [
            (one.place, one.dtype, " x ".join(map(str, one.shape)) or "scalar", readable_bytes(one.nbytes), one.parts)
            for one in state.tensors
        ]
        print_table(["tensor", "dtype", "shape", "size>", "parts>"], rows)
    if state.values:
        print_table(["value", ""], state.values.items())


def _print_comparison(found: "Comparison") -> None:
    if found.tensors:
        rows = [
            (one.place, one.reason, "") if one.reason else (one.place, f"{one.largest:.3g}", f"{one.relative:.3g}")
            for one in found.tensors
        ]
        print_table(["tensor", "max abs", "relative"], rows)
    if found.values:
        print_table(["value", "A", "B"], [(place, *both) for place, both in found.values.items()])
    _print_places("only in A", found.only_first)
    _print_places("only in B", found.only_second)
    print(f"{found.same} tensors and values are the same")


def _print_places(title: str, places: Iterable[str]) -> None:
    for place in places:
        print(f"{title}: {place}")


def _where_else(folder: Path) -> str:
    """A hint for users who pass the checkpoint itself, or the project folder that holds the checkpoints."""
    from accel_ckpt.format.manifest import MANIFEST

    if (folder / MANIFEST).exists():
        return f"; it is one itself: accel ckpt show {folder}"
    near = sorted({path.parent.parent for path in folder.glob(f"*/*/{MANIFEST}")})
    return f"; there are some in {near[0]}" if near else ""
