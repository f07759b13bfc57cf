"""Checks the built site with axe in headless Chromium: widths of a phone and a desk, light and dark.

    hatch run docs:build && hatch run accessibility:check            # every page in every form
    hatch run accessibility:check --pages index.html reference/comparison.html --pictures pictures

Prints each violation with its page, rule and first element, and pages that are wider than the window. The browser is
the system's Chromium (``apt-get install chromium``), otherwise the one that ``playwright install chromium`` fetched.
``--pictures`` also writes a picture of each page in each form, and ``--whole`` makes them as long as the page.
"""

import argparse
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDTHS, SCHEMES = (375, 1440), ("light", "dark")
BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
LONGEST = 8000
"""Pixels of the longest picture; Chromium makes none longer than 16,384."""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each request."""

    def log_message(self, *arguments: Any) -> None:
        """Drops the line."""


def serve(site: Path) -> http.server.ThreadingHTTPServer:
    """A server of the built site on a free port of the loopback."""
    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def pages_of(site: Path, wanted: Iterable[str] | None) -> list[str]:
    """Paths of the pages to check: those named, otherwise all that the site has.

    Raises:
        SystemExit: the site is not built, or has no page of that name.
    """
    found = sorted(file.relative_to(site).as_posix() for file in site.rglob("*.html"))
    if not found:
        sys.exit(f"{site} holds no pages; build them by: hatch run docs:build")
    named = list(wanted or found)
    if unknown := [name for name in named if name not in found]:
        sys.exit(f"no page {unknown[0]!r} in {site}; pages are named like {found[-1]!r}")
    return named


def browser_of(given: str | None, which: Callable[[str], str | None] = shutil.which) -> str | None:
    """Path of the browser: the one given, otherwise the system's; None stands for playwright's own."""
    return given or next((path for name in BROWSERS if (path := which(name))), None)


def complaints(page: Any, axe: Any, form: str) -> Iterator[str]:
    """Violations of the page that is open, and its overflow."""
    for found in axe.run(page).response["violations"]:
        first = found["nodes"][0]
        target = " ".join(first["html"].split())[:140]
        yield f"{form}: {found['id']} ({found['impact']}, {len(found['nodes'])}): {found['help']}: {target}"
    if (extra := page.evaluate(OVERFLOW)) > 0:
        yield f"{form}: the page is {extra} pixels wider than the window"


def picture(page: Any, target: Path, *, width: int, whole: bool) -> None:
    """Writes what the window shows of the page, or the whole page up to ``LONGEST`` pixels."""
    target.parent.mkdir(parents=True, exist_ok=True)
    height = min(page.evaluate("document.documentElement.scrollHeight"), LONGEST) if whole else 900
    page.set_viewport_size({"width": width, "height": height})
    page.screenshot(path=str(target))
    page.set_viewport_size({"width": width, "height": 900})


def check(browser: Any, base: str, given: argparse.Namespace, paths: list[str]) -> Iterator[str]:
    """Complaints about all pages in all forms; the pictures are made meanwhile."""
    from axe_playwright_python.sync_playwright import Axe

    page, axe = browser.new_page(), Axe()
    for path in paths:
        page.goto(f"{base}/{path}")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
                page.wait_for_timeout(400)  # colours fade for a quarter of a second
                if not given.only_pictures:
                    yield from complaints(page, axe, f"{path} at {width}, {scheme}")
                if given.pictures:
                    name = f"{path.removesuffix('.html').replace('/', '-')}-{width}-{scheme}.png"
                    picture(page, given.pictures / name, width=width, whole=given.whole)


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """The options; exits with status 2 where one would have no effect."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("site", type=Path, nargs="?", default=ROOT / "site")
    options.add_argument("--browser", help="path of a Chromium instead of the system's")
    options.add_argument("--pages", nargs="+", metavar="PATH", help="these instead of all")
    options.add_argument("--pictures", type=Path, metavar="DIR")
    options.add_argument("--only-pictures", action="store_true", help="without axe")
    options.add_argument("--whole", action="store_true", help="pictures of whole pages")
    given = options.parse_args(words)
    for name in ("only_pictures", "whole"):
        if getattr(given, name) and given.pictures is None:
            options.error(f"--{name.replace('_', '-')} is about pictures; give --pictures DIR, too")
    return given


def main() -> int:
    given = parsed()
    paths = pages_of(given.site, given.pages)

    from playwright.sync_api import sync_playwright

    server, count = serve(given.site), 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_of(given.browser), args=list(FLAGS))
        for complaint in check(browser, f"http://127.0.0.1:{server.server_port}", given, paths):
            print(complaint, flush=True)
            count += 1
        browser.close()
    server.shutdown()
    print(f"{count} complaints about {len(paths)} pages in {len(WIDTHS) * len(SCHEMES)} forms")
    return bool(count)


if __name__ == "__main__":
    sys.exit(main())
