"""``accel launch``."""

import os

import rich_click as click

from accel.cli.options import as_json, config_file, config_from, setting_options
from accel.cli.printing import print_json


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
@setting_options
@config_file
@click.option("--dry_run", is_flag=True, help="Print argv and environment of every process, and start none.")
@as_json
def launch(
    program: tuple[str, ...], config_file: str | None, *, dry_run: bool, as_json: bool, **flags: str | bool | None
) -> int:
    """Starts SCRIPT on as many processes as this machine has accelerators, or as many as are asked for. Everything
    after SCRIPT belongs to it.

    Every --flag_name may be written --flag-name. A setting also comes from the variable ACCEL_FLAG_NAME or from a
    configuration file; a flag wins over both, and --no_flag_name turns off a switch that was turned on there.
    """
    from accel.launch.starting import prepare

    start = prepare(config_from(flags, config_file), program, os.environ)
    if not dry_run:
        return start.run()
    if as_json:
        print_json(start.plan.to_json())
    else:
        print(start.plan, end="")
    return 0
