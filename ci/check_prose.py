"""Prose of docstrings and docs pages: module docstrings name their subject, terms are those of the glossary.

Refuses module docstrings that are indirect questions, words that ``docs/concepts/glossary.md`` bans, roles of Sphinx,
and sentences of more than 35 words on the docs pages. ``--sample N --seed S`` prints N docstrings drawn from all
sources, to be read and graded.
"""

import argparse
import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = ("What", "Which", "Where", "Who", "Whom", "Whose", "Whether", "How", "When", "Why")
MAX_WORDS = 35
BANNED = {
    r"lets? go of": "releases, drops",
    r"signs? of life": "heartbeat",
    r"whoever": "the rank, process or object that",
}
"""Words that code and pages do not use, and what to write instead."""
ROLE = re.compile(r":[a-z]+:`[^`]*`")
"""Cross-reference in the syntax of Sphinx."""


def modules() -> Iterator[Path]:
    for base in [*sorted(ROOT.glob("packages/*/src")), ROOT / "testing" / "src"]:
        yield from sorted(base.rglob("*.py"))


def docstrings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, name and text of each docstring of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            yield getattr(node, "lineno", 1), getattr(node, "name", "module"), text


def sentences(page: str) -> Iterator[str]:
    """Sentences of a page's running text; code, tables, lists' markers and headings are left out."""
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    blocks = re.split(r"\n\s*\n|\n(?=\s*[-*] )", text)
    for block in blocks:
        if block.lstrip().startswith(("|", "#", "    ")):
            continue
        running = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", block))
        yield from filter(None, re.split(r"(?<=[.!?:;])\s+", " ".join(running.split())))


def complaints() -> Iterator[str]:
    for path in modules():
        for line, name, text in docstrings(path):
            place = f"{path.relative_to(ROOT)}:{line}: {name}"
            if name == "module" and text.split()[0] in QUESTIONS:
                yield f"{place}: the docstring begins with {text.split()[0]!r}; name the thing"
            if role := ROLE.search(text):
                yield f"{place}: {role[0]!r}, which no page of ours resolves; write the name between double backticks"
            for pattern, instead in BANNED.items():
                if found := re.search(rf"\b{pattern}\b", text, re.IGNORECASE):
                    yield f"{place}: {found[0]!r}; write: {instead}"
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for sentence in sentences(page.read_text()):
            if (words := len(sentence.split())) > MAX_WORDS:
                yield f"{page.relative_to(ROOT)}: {words} words in one sentence: {sentence[:80]}..."


def sample(number: int, seed: int) -> None:
    every = [
        (path, line, name, text)
        for path in modules()
        for line, name, text in docstrings(path)
        if not name.startswith("__")
    ]
    for path, line, name, text in random.Random(seed).sample(every, number):
        print(f"{path.relative_to(ROOT)}:{line} {name}\n    {text.partition(chr(10) * 2)[0]}\n")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--sample", type=int, default=0)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    if given.sample:
        sample(given.sample, given.seed)
        return 0
    found = list(complaints())
    print("\n".join(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
