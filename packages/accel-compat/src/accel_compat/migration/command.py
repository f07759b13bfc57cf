"""``accel migrate``: what to change in scripts that are written for Accelerate."""

from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from accel_launch.cli.options import as_json
from accel_launch.cli.printing import print_json

if TYPE_CHECKING:
    from accel_compat.migration.script import ScriptReport


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path))
@click.option("--write", is_flag=True, help="Rename the imports in the files.")
@click.option("--strict", is_flag=True, help="End with 1 for notes too.")
@as_json
def migrate(paths: tuple[Path, ...], *, write: bool, strict: bool, as_json: bool) -> int:
    """Lists what to change in the scripts at PATH (files or folders) that are written for Accelerate; runs none of them.

    A rename is done by --write, a change by hand; a note is a call that works and means something else. Ends with 0 if
    nothing has to be done, with 1 if a rename or a change is left, and with 2 if a file cannot be read.
    """
    from accel_compat.migration.script import check_scripts

    reports = check_scripts(paths, write=write)
    if as_json:
        print_json([report.document() for report in reports])
    else:
        _print(reports, write=write)
    if any(report.error for report in reports):
        return 2
    kinds = ["change", *(["note"] if strict else []), *([] if write else ["rename"])]
    return int(any(finding.kind in kinds for report in reports for finding in report.findings))


def _print(reports: "list[ScriptReport]", *, write: bool) -> None:
    for report in reports:
        if report.error:
            print(f"error: {report.error}")
        for finding in report.findings:
            if not (finding.kind == "rename" and write):
                print(f"{report.path}:{finding}")
        if report.renamed:
            print(f"{report.path}: renamed the imports")
    renames, changes, notes = (sum(report.count(kind) for report in reports) for kind in ("rename", "change", "note"))
    done = "renamed" if write else "to rename with --write"
    files, imports, remarks = _counted(len(reports), "file"), _counted(renames, "import"), _counted(notes, "note")
    print(f"{files}: {imports} {done}, {changes} to change by hand, {remarks}")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
