"""``accel check``: compares a program's training under layouts with its training in one process."""

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from accel_testing.equivalence.layouts import expand
from accel_testing.errors import RankError

if TYPE_CHECKING:
    from accel_testing.equivalence.equivalence import Report


@click.command()
@click.argument("target", metavar="SCRIPT.py:FUNCTION")
@click.option(
    "--layouts", default="ddp:2", metavar="LIST", help="With commas, as in ddp:2,ddp:4/bf16/acc=3; ddp:2 if not given."
)
@click.option(
    "--precisions", default="fp64,fp32", metavar="LIST", help="Of layouts that name none; fp64,fp32 if not given."
)
@click.option("--gpu", is_flag=True, help="Run layouts on this machine's accelerators.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(target: str, *, layouts: str, precisions: str, gpu: bool, as_json: bool) -> int:
    """Trains the program of FUNCTION, an accel_testing.Program, in one process without accel, then under each layout.

    Losses, gradient norms, learning rates and weights are compared after every step. Ends with 1 if a layout differs,
    with the first tensor that differs, the step and the distance.
    """
    try:
        expand(layouts, precisions.split(","))  # help and usage errors must not import torch, which takes seconds
        from accel_testing.equivalence.equivalence import run_check

        report = run_check(target, layouts, precisions=precisions.split(","), cpu=not gpu)
    except (ValueError, RankError) as error:
        raise click.UsageError(_without_own_traceback(str(error))) from error
    print(json.dumps(as_data(report), indent=2) if as_json else report)
    return 0 if report.ok else 1


def _without_own_traceback(text: str) -> str:
    """A rank's error, without its traceback if that has lines of this package only, as for a misspelt name."""
    own = str(Path(__file__).parents[1])
    files = re.findall(r'^  File "([^"]+)"', text, re.MULTILINE)
    return text if any(not file.startswith(own) for file in files) else text.partition("\n\nTraceback")[0]


def as_data(report: "Report") -> dict[str, object]:
    """The report as JSON; a distance that is not a number becomes null."""
    return {
        "ok": report.ok,
        "steps": report.steps,
        "layouts": [
            {
                "layout": str(result.layout),
                "ok": result.ok,
                "distance": result.distance if math.isfinite(result.distance) else None,
                "tolerance": result.tolerance,
                "departure": str(result.departure) if result.departure is not None else None,
                "error": result.error or None,
                "seconds": round(result.seconds, 3),
            }
            for result in report.results
        ],
    }
