"""``accel ckpt import``."""

from collections.abc import Callable
from typing import Any

import rich_click as click

from accel_launch.cli.options import as_json
from accel_launch.cli.printing import print_json
from accel_state.entry_points import find_entry_point
from accel_state.errors import ConfigError

IMPORTERS = "accel.importers"
"""Entry-point group of functions ``(folder, out, model, trust_pickle)`` that import other libraries' checkpoints."""

_ACCELERATE = "accelerate"


@click.command("import")
@click.argument("folder")
@click.argument("out")
@click.option(
    "--model",
    metavar="MODULE:BUILD",
    help="Builds what was saved: the model, or (model, optimizer); for optimizers that number their parameters.",
)
@click.option(
    "--trust-pickle", "--trust_pickle", is_flag=True, help="Unpickle registered objects, which runs their code."
)
@as_json
def import_checkpoint(folder: str, out: str, *, model: str | None, trust_pickle: bool, as_json: bool) -> int:
    """Writes the checkpoint OUT from FOLDER, which save_state of Accelerate wrote (one process, DDP, FSDP, DeepSpeed).
    load_state(OUT) then restores weights, optimizers, schedules, loss scale, random states and registered objects.

    Files are read without running code in them. MODULE:BUILD is called on the meta device, so that the model takes no
    memory; it is needed if the shapes of parameters do not tell their names.
    """
    report = _importer()(folder, out, model, trust_pickle)
    if as_json:
        print_json(report)
        return 0
    ranks = report["ranks"]
    print(
        f"wrote {report['path']} from {report['layout']}: {', '.join(report['states'])}; random states of {ranks} ranks"
    )
    for note in report["notes"]:
        print(f"note: {note}")
    return 0


def _importer() -> Callable[[str, str, str | None, bool], dict[str, Any]]:
    entry = find_entry_point(IMPORTERS, _ACCELERATE, ConfigError)
    if entry is None:
        raise ConfigError(
            "accel ckpt import comes with accel-compat, which is not installed here; from a checkout: "
            "pip install ./packages/*"
        )
    try:
        importer: Callable[[str, str, str | None, bool], dict[str, Any]] = entry.load()
    except Exception as error:
        raise ConfigError(f"the importer {entry.name} cannot be loaded from {entry.value}: {error}") from error
    return importer
