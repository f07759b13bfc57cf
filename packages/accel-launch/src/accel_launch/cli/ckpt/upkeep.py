"""``accel ckpt prune`` and ``accel ckpt repair``."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

import rich_click as click

from accel_launch.cli.ckpt.options import PLACE
from accel_launch.cli.options import as_json
from accel_launch.cli.printing import print_json, print_table

if TYPE_CHECKING:
    from accel_ckpt import SavedCheckpoint
    from accel_ckpt.io.storage import Location


@click.command()
@click.argument("folder", type=PLACE, metavar="DIR")
@click.option("--keep_last", type=int, metavar="N", help="Keep the N newest.")
@click.option("--keep_every", type=int, metavar="K", help="Keep those whose number is a multiple of K.")
@click.option("--keep_best", type=int, metavar="N", help="Keep the N with the best --metric.")
@click.option("--metric", metavar="NAME", help="A number that the checkpoints were saved with, see accel ckpt ls.")
@click.option("--mode", type=click.Choice(["min", "max"]), help="Whether the smallest (default) or largest is best.")
@click.option("--yes", is_flag=True, help="Remove them; without it, they are only listed.")
@as_json
def prune(
    folder: str,
    *,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: int | None,
    metric: str | None,
    mode: Literal["min", "max"] | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Removes the numbered checkpoints in DIR that no rule keeps; without --yes, only lists them.

    The newest checkpoint is always kept, and so is the newest intact one. With --keep_best alone, checkpoints that were
    saved without the metric are kept too.
    """
    import accel_ckpt

    if (keep_best is None) != (metric is None) or (mode is not None and metric is None):
        raise click.UsageError("--keep_best N and --metric NAME belong together, and --mode with them")
    best = None if keep_best is None or metric is None else accel_ckpt.Best(metric, keep_best, mode or "min")
    if keep_last is None and keep_every is None and best is None:
        rules = "--keep_last N, --keep_every K, --keep_best N --metric NAME, or several"
        raise click.UsageError(f"say what to keep: {rules}")
    retention = accel_ckpt.keep_for_run(last=keep_last, every=keep_every, best=best)
    series = accel_ckpt.CheckpointDirectory(folder, retention=retention)
    entries = series.entries()
    values = {} if best is None else _measured(folder, entries, best.metric)
    going = [entry.path for entry in series.surplus(thorough=True)]
    left = []
    if yes:
        wanted, going = going, series.prune(thorough=True)
        left = [path.name for path in wanted if path not in going]
    if left:
        print(f"could not be removed: {', '.join(left)}", file=sys.stderr)
    every = [entry.path for entry in entries]
    if as_json:
        kept = [str(path) for path in every if path not in going]
        print_json({"removed" if yes else "would_remove": [str(path) for path in going], "kept": kept})
        return int(bool(left))
    fate = "removed" if yes else "would go"
    rows = [(path.name, *([values[path]] if values else []), fate if path in going else "stays") for path in every]
    print_table(["checkpoint", *([best.metric] if best is not None and values else []), ""], rows)
    if going and not yes:
        print("nothing was removed; add --yes to remove them")
    return int(bool(left))


def _measured(folder: str, entries: "Sequence[SavedCheckpoint]", metric: str) -> "dict[Location, str]":
    """Metric of each checkpoint, for the table.

    Raises:
        UsageError: no checkpoint has the metric; the message names the recorded ones.
    """
    from accel_ckpt.series.retention import metric_of, metrics_of

    found = {entry.path: metric_of(entry.metadata, metric) for entry in entries}
    if entries and all(value is None for value in found.values()):
        known = sorted({name for entry in entries for name in metrics_of(entry.metadata)})
        near = get_close_matches(metric, known, n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        there = ", ".join(known) or "none"
        raise click.UsageError(f"no checkpoint in {folder} was saved with a number {metric!r}{hint}; there are {there}")
    return {path: "" if value is None else f"{value:.6g}" for path, value in found.items()}


@click.command()
@click.argument("folder", type=PLACE, metavar="DIR")
@click.option(
    "--grace",
    type=float,
    metavar="SECONDS",
    help="Spare leftovers younger than this where no lock tells whether a save is under way (URLs: a day).",
)
@as_json
def repair(folder: str, *, grace: float | None, as_json: bool) -> int:
    """Removes what killed saves left in DIR, then verifies every checkpoint there. Ends with 1 if one is damaged.

    Saves in progress are not touched. Damaged checkpoints stay in place; loading the latest checkpoint skips them.
    """
    import accel_ckpt
    from accel_ckpt.tools.inspection import list_checkpoints, verify

    swept = [path.name for path in accel_ckpt.CheckpointDirectory(folder).sweep(grace=grace)]
    damaged = {str(one.path): problem for one in list_checkpoints(folder) if (problem := verify(one.path))}
    if as_json:
        print_json({"swept": swept, "damaged": damaged})
    else:
        for name in swept:
            print(f"cleared away: {name}")
        for path, problem in damaged.items():
            print(f"{path.rpartition('/')[2]}: {problem}")
        print(f"{len(swept)} leftovers of killed saves, {len(damaged)} damaged checkpoints")
    return int(bool(damaged))
