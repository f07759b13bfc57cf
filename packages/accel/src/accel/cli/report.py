"""``accel report``: the run log as one HTML page, and its plots as images."""

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_observe.report.plots import Plot

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SIZE = (1120, 560)


@click.command()
@click.argument("run", metavar="RUN")
@click.option("-o", "--output", metavar="FILE", help="Where the page goes; if not given, report.html beside the log.")
@click.option("--png", metavar="DIR", help="Also draw each plot as DIR/<name>.png; needs Chromium or Chrome.")
def report(run: str, *, output: str | None, png: str | None) -> int:
    """Writes one HTML page about the run at RUN: its log's folder, or any folder above (the newest run is taken)."""
    from accel_observe.report import find_run, page_of, plots_of, read_history

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


def draw(plots: "list[Plot]", folder: Path) -> list[Path]:
    """Renders each plot in a browser, as it looks on the page, with its heading and legend.

    Raises:
        ConfigError: there is no browser, or it fails.
    """
    from accel_observe.report.page import picture_of

    browser = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise ConfigError(f"--png needs a browser to draw with; none of {', '.join(_BROWSERS)} is on the PATH")
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    with tempfile.TemporaryDirectory() as place:
        for plot in plots:
            page = Path(place) / f"{plot.name}.html"
            page.write_text(picture_of(plot), encoding="utf-8")
            target = folder.absolute() / f"{plot.name}.png"
            screenshot(browser, page, target, _SIZE)
            pictures.append(target)
    return pictures


def screenshot(browser: str, page: Path, target: Path, size: tuple[int, int]) -> None:
    """Renders a page to an image of ``size`` pixels.

    Raises:
        ConfigError: the browser writes no image.
    """
    with tempfile.TemporaryDirectory() as profile:
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        size_word = f"--window-size={size[0]},{size[1]}"
        done = subprocess.run(
            [browser, *words, size_word, f"--screenshot={target}", page.absolute().as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
        )
    if not target.exists():
        raise ConfigError(f"{browser} did not draw {page.name}: {done.stderr[-300:]}")
