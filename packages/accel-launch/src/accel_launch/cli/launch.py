"""``accel launch``."""

import os
import sys
from collections.abc import Iterator, Sequence

import rich_click as click

from accel_launch.cli.options import as_json, config_file, config_from, setting_options
from accel_launch.cli.printing import print_json
from accel_state.errors import LaunchError


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
@setting_options
@config_file
@click.option("--dry_run", is_flag=True, help="Print argv and environment of every process, and start none.")
@click.option(
    "--as",
    "world_size",
    type=click.IntRange(min=2),
    metavar="N",
    help="With --dry_run: run SCRIPT as one rank of N up to its first optimizer step, and report memory and traffic.",
)
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="With --as N: the rank to run; the default is 0.")
@as_json
def launch(
    program: tuple[str, ...],
    config_file: str | None,
    *,
    dry_run: bool,
    world_size: int | None,
    rank: int | None,
    as_json: bool,
    **flags: str | bool | None,
) -> int:
    """Starts SCRIPT on one process for each accelerator of this machine, or on as many processes as requested.
    Arguments after SCRIPT are passed to SCRIPT.

    Every --flag_name may be written --flag-name. A setting can also be given by the variable ACCEL_FLAG_NAME or in a
    configuration file; a flag overrides both, and --no_flag_name turns off a switch that was turned on there.
    """
    from accel_launch.launch.dispatch import prepare

    config = config_from(flags, config_file)
    if world_size is not None:
        if not dry_run:
            raise LaunchError(f"as {world_size}: one rank of {world_size} trains nothing; add --dry_run, or drop --as")
        from accel_launch.launch.one_rank import run_one_rank

        return run_one_rank(config, program, os.environ, rank=rank or 0, world_size=world_size, as_json=as_json)
    if rank is not None:
        raise LaunchError(f"rank {rank}: a launch starts every rank; add --dry_run --as N, or drop --rank")
    start = prepare(config, program, os.environ)
    if not dry_run:
        for note in misplaced(program):
            print(f"accel launch: note: {note}", file=sys.stderr, flush=True)
        return start.run()
    if as_json:
        print_json(start.plan.to_json())
    else:
        print(start.plan, end="")
    return 0


# Launcher flags that scripts hardly ever define themselves, unlike --cpu or --mixed_precision.
_LAUNCHERS_OWN = frozenset(
    [
        *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "nnodes"),
        *("multi_gpu", "gpu_ids", "use_fsdp", "use_deepspeed", "config_file", "max_restarts", "dry_run"),
    ]
)


def misplaced(program: Sequence[str]) -> Iterator[str]:
    """Yields a note for each launcher flag after the script's name, because the script receives that flag."""
    for word in program[1:]:
        name = word.partition("=")[0]
        if name.startswith("--") and name[2:].replace("-", "_") in _LAUNCHERS_OWN:
            yield f"{name} stands after {program[0]}, so the script gets it; accel launch reads what stands before it"
