"""Checks the built site with axe in headless Chromium: widths of a phone and a desk, light and dark.

    hatch run docs:build && hatch run accessibility:check            # playwright install chromium, once
    hatch run accessibility:check --browser /usr/bin/chromium --pictures pictures

Prints each violation with its page, rule and first element, and pages that are wider than the window. ``--pictures``
also writes a picture of each page in each form.
"""

import argparse
import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "index.html",
    "get-started/first-script.html",
    "get-started/cheat-sheet.html",
    "tutorials/transformers.html",
    "concepts/strategies.html",
    "guides/training.html",
    "guides/hangs.html",
    "reference/comparison.html",
    "reference/command-line.html",
    "reference/settings.html",
    "reference/api/accel.html",
    "internals/architecture.html",
)
WIDTHS, SCHEMES = (375, 1440), ("light", "dark")
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


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


def complaints(page: Any, axe: Any, form: str) -> Iterator[str]:
    """Violations of the page that is open, and its overflow."""
    for found in axe.run(page).response["violations"]:
        first = found["nodes"][0]
        target = " ".join(first["html"].split())[:140]
        yield f"{form}: {found['id']} ({found['impact']}, {len(found['nodes'])}): {found['help']}: {target}"
    if (extra := page.evaluate(OVERFLOW)) > 0:
        yield f"{form}: the page is {extra} pixels wider than the window"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("site", type=Path, nargs="?", default=ROOT / "site")
    options.add_argument("--browser", help="path of a Chromium; otherwise playwright's own")
    options.add_argument("--pages", nargs="+", default=PAGES, metavar="PATH", help="instead of a sample of all kinds")
    options.add_argument("--pictures", type=Path, metavar="DIR")
    given = options.parse_args()

    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import sync_playwright

    server, found = serve(given.site), []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given.browser, args=["--no-sandbox"])
        for width in WIDTHS:
            for scheme in SCHEMES:
                context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
                page = context.new_page()
                for path in given.pages:
                    page.goto(f"http://127.0.0.1:{server.server_port}/{path}")
                    page.wait_for_timeout(300)
                    form = f"{path} at {width}, {scheme}"
                    for complaint in complaints(page, Axe(), form):
                        print(complaint, flush=True)
                        found.append(complaint)
                    if given.pictures:
                        given.pictures.mkdir(parents=True, exist_ok=True)
                        name = f"{path.removesuffix('.html').replace('/', '-')}-{width}-{scheme}.png"
                        page.screenshot(path=str(given.pictures / name))
                context.close()
        browser.close()
    server.shutdown()
    print(f"{len(found)} complaints about {len(given.pages)} pages in {len(WIDTHS) * len(SCHEMES)} forms")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
