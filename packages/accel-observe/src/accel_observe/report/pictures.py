"""Plots of a report as images, drawn by a browser without a window."""

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from accel_observe.report.page import picture_of
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_observe.report.plots import Plot

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SIZE = (1120, 560)


def draw(plots: "list[Plot]", folder: Path) -> list[Path]:
    """Renders each plot in a browser, as it looks on the page, with its heading and legend.

    Raises:
        ConfigError: there is no browser, or it fails.
    """
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
