"""Pages with code: the README and docs pages, cut into the blocks that a reader would run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = "README.md"
# The READMEs of the other packages are tested beside them.
PAGES = [README, "packages/accel/README.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"# ([\w/.-]+\.(?:py|yaml))\n")
# On a machine with accelerators, too, tests of pages are about processes and not about devices.
ON_CPU = {"ACCEL_CPU": "true"}


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: its language, its text, its first line's number, and the file it is to be written to."""

    language: str
    text: str
    line: int
    file: str | None


def blocks_of(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        named = FILE_NAME.match(found[2])
        yield Block(found[1], found[2], text.count("\n", 0, found.start()) + 2, named[1] if named else None)


def shown(page: str) -> list[Block]:
    """The Python of a page that is no file of its own."""
    return [block for block in blocks_of(page) if block.language == "python" and block.file is None]


def script_of(page: str) -> str:
    """The Python of a page as one script, each line at its number in the page, so that errors point into it."""
    lines: list[str] = []
    for block in shown(page):
        lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines) + "\n"


WITH_PYTHON = [page for page in PAGES if shown(page)]
