"""``accel ckpt prune`` and ``accel ckpt repair``."""

import rich_click as click

from accel.cli.ckpt_options import PLACE
from accel.cli.options import as_json
from accel.cli.printing import print_json, print_table


@click.command()
@click.argument("folder", type=PLACE, metavar="DIR")
@click.option("--keep_last", type=int, metavar="N", help="Keep the N newest.")
@click.option("--keep_every", type=int, metavar="K", help="Keep those whose number is a multiple of K.")
@click.option("--yes", is_flag=True, help="Remove them; without it, they are only listed.")
@as_json
def prune(folder: str, *, keep_last: int | None, keep_every: int | None, yes: bool, as_json: bool) -> int:
    """Removes numbered checkpoints in DIR that neither rule keeps; first shows which.

    The newest checkpoint stays in any case, and so does the newest that is whole.
    """
    import accel_ckpt

    rules = [] if keep_last is None else [accel_ckpt.keep_last(keep_last)]
    rules += [] if keep_every is None else [accel_ckpt.keep_every(keep_every)]
    if not rules:
        raise click.UsageError("say what to keep: --keep_last N, --keep_every K, or both")
    series = accel_ckpt.CheckpointDirectory(folder, retention=accel_ckpt.keep_union(*rules))
    every = [entry.path for entry in series.entries()]
    going = series.prune(thorough=True) if yes else [entry.path for entry in series.surplus(thorough=True)]
    if as_json:
        kept = [str(path) for path in every if path not in going]
        print_json({"removed" if yes else "would_remove": [str(path) for path in going], "kept": kept})
        return 0
    fate = "removed" if yes else "would go"
    print_table(["checkpoint", ""], [(path.name, fate if path in going else "stays") for path in every])
    if going and not yes:
        print("nothing was removed; add --yes to remove them")
    return 0


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

    Saves that are under way are left alone. What is damaged stays where it is: loading the latest passes over it.
    """
    import accel_ckpt
    from accel_ckpt.inspection import list_checkpoints, verify

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
