"""Tables of pages that are generated from kept results, between a comment with their command and an end comment."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import final

ROOT = Path(__file__).resolve().parents[1]
END = "<!-- end -->"


@final
@dataclass(frozen=True)
class GeneratedTables:
    """The generated part of one page.

    Attributes:
        page: the page.
        command: what writes it, with ``--update``.
    """

    page: Path
    command: str

    @property
    def begin(self) -> str:
        """The comment above the generated part."""
        return f"<!-- begin: {self.command} --update -->"

    def written(self, text: str, tables: str) -> str:
        """The text of the page with other tables."""
        before, rest = text.split(self.begin)
        return f"{before}{self.begin}\n\n{tables}\n\n{END}{rest.split(END)[1]}"

    def settle(self, tables: str, *, write: bool) -> int:
        """Writes the page, or compares it; returns the exit status, which is 1 if the page has other tables."""
        text = self.page.read_text(encoding="utf-8")
        expected = self.written(text, tables)
        if write:
            self.page.write_text(expected, encoding="utf-8")
        elif text != expected:
            print(f"{self.page.relative_to(ROOT)} has other results than those kept; run: {self.command} --update")
            return 1
        return 0


def options_of(description: str | None, keep: str) -> argparse.ArgumentParser:
    """The options that the commands have in common; ``keep``: what ``--keep`` is given."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--update", action="store_true", help="write the page; otherwise it is only compared")
    options.add_argument("--keep", type=Path, metavar=keep, help="keep these results, and write the page")
    return options
