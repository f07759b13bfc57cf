"""``accel launch``."""

import json
import os
import sys

from accel.cli.command import Command
from accel.cli.option import Option, Parsed, setting_options
from accel.config.model import DOCUMENT_VARIABLE, AccelConfig
from accel.config.resolve import resolve_config
from accel.launch.planning import LaunchPlan

CONFIG_FILE = Option("config_file", "Read settings from this YAML or JSON file.", metavar="PATH")
JSON = Option("json", "Print JSON.")
_DRY_RUN = Option("dry_run", "Print argv and environment of every process, and start none.")
_RESOLUTION = frozenset({CONFIG_FILE.name, JSON.name, _DRY_RUN.name})


def config_from(parsed: Parsed) -> AccelConfig:
    """The configuration that the flags, the environment and the named file give.

    A launcher's document in the environment is left out: this command may run inside a process that another launcher
    started, and that one's number of processes is not meant for it.
    """
    env = {name: value for name, value in os.environ.items() if name != DOCUMENT_VARIABLE}
    flags = {name: value for name, value in parsed.values.items() if name not in _RESOLUTION}
    return resolve_config({}, env, parsed.text(CONFIG_FILE.name), flags=flags)


def _launch(parsed: Parsed) -> int:
    from accel.launch.host import check_program, read_host
    from accel.launch.planning import check_settings, plan
    from accel.launch.running import run

    config = config_from(parsed)
    check_settings(config)
    check_program(config, parsed.rest)
    planned = plan(config, parsed.rest, read_host(config), env=os.environ)
    if parsed.on(_DRY_RUN.name):
        _print_plan(planned, as_json=parsed.on(JSON.name))
        return 0
    return run(planned)


def _print_plan(planned: LaunchPlan, *, as_json: bool) -> None:
    if as_json:
        json.dump(planned.to_json(), sys.stdout, indent=2)
        print()
        return
    import shlex

    how = "replaces the launcher" if planned.direct else f"{len(planned.processes)} started here"
    port = planned.main_port or "a free port"
    print(f"# {planned.num_processes} in all, {how}; main process at {planned.main_address}, {port}")
    for process in planned.processes:
        print(f"\n# rank {process.rank}")
        for name, value in process.env.items():
            print(f"{name}={shlex.quote(value)} \\")
        print(shlex.join(process.argv))


LAUNCH = Command(
    name="launch",
    usage="SCRIPT [ARGUMENTS]...",
    text=(
        "Starts SCRIPT on as many processes as this machine has accelerators, or as many as are asked for. Everything "
        "after SCRIPT belongs to it.\n\n"
        "Every --flag_name may be written --flag-name. A setting also comes from the variable ACCEL_FLAG_NAME or from "
        "a configuration file; a flag wins over both, and --no_flag_name turns off a switch that was turned on there."
    ),
    options=(*setting_options(launch=True), CONFIG_FILE, _DRY_RUN, JSON),
    run=_launch,
)
