"""``accel explain``: choices and communication of a script's run, read from the run itself, which then ends."""

import subprocess
import sys

import rich_click as click


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--num_processes", default=1, show_default=True, help="Processes to run the script in.")
@click.option("--cpu", is_flag=True, help="Stay on the CPU.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def explain(script: str, arguments: tuple[str, ...], *, num_processes: int, cpu: bool) -> int:
    """Runs SCRIPT for two optimizer steps, prints what was chosen and what the second step communicated, and ends it.

    Files of the project stay unchanged: trackers, save_state, load_state, resume and profile do nothing meanwhile.
    Files that the script itself writes are written.
    """
    from accel_launch.config import resolve_config
    from accel_launch.launch.host import check_program

    check_program(resolve_config({}, {}), (script,))
    where = ["--cpu"] if cpu else []
    launched = ["launch", "--num_processes", str(num_processes), *where, "-m", "accel.observe.explain_script"]
    return subprocess.run([sys.executable, "-m", "accel", *launched, script, *arguments]).returncode
