"""``accel launch``."""

import os

import rich_click as click

from accel.cli.options import as_json, config_file, config_from, setting_options
from accel.cli.printing import print_json
from accel.launch.planning import LaunchPlan


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
    from accel.launch.host import check_program, read_host
    from accel.launch.planning import check_settings, plan
    from accel.launch.running import run

    config = config_from(flags, config_file)
    check_settings(config)
    check_program(config, program)
    planned = plan(config, program, read_host(config), env=os.environ)
    if not dry_run:
        return run(planned)
    if as_json:
        print_json(planned.to_json())
    else:
        _print_plan(planned)
    return 0


def _print_plan(planned: LaunchPlan) -> None:
    import shlex

    how = "replaces the launcher" if planned.direct else f"{len(planned.processes)} started here"
    port = planned.main_port or "a free port"
    print(f"# {planned.num_processes} in all, {how}; main process at {planned.main_address}, {port}")
    for process in planned.processes:
        print(f"\n# rank {process.rank}")
        for name, value in process.env.items():
            print(f"{name}={shlex.quote(value)} \\")
        print(shlex.join(process.argv))
