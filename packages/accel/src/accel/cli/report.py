"""``accel report``: the run log as one HTML page, and its plots as images."""

from pathlib import Path

import rich_click as click


@click.command()
@click.argument("run", metavar="RUN")
@click.option("-o", "--output", metavar="FILE", help="Where the page goes; if not given, report.html beside the log.")
@click.option("--png", metavar="DIR", help="Also draw each plot as DIR/<name>.png; needs Chromium or Chrome.")
def report(run: str, *, output: str | None, png: str | None) -> int:
    """Writes one HTML page about the run at RUN: its log's folder, or any folder above (the newest run is taken)."""
    from accel_observe.report import find_run, page_of, plots_of, read_history
    from accel_observe.report.pictures import draw

    journal = find_run(run)
    history = read_history(journal)
    plots = plots_of(history)
    target = journal.parent / "report.html" if output is None else Path(output).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page_of(history, plots), encoding="utf-8")
    print(target)
    if png is not None:
        for picture in draw(plots, Path(png).expanduser()):
            print(picture)
    return 0
