"""Share of a batch that is padding, for the lengths of real text: the sources of Python's standard library."""

import ast
import re
import statistics
import sysconfig
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import Report, parser

_TOKEN = re.compile(r"\w+|[^\w\s]")
LONGEST = 1024
"""Tokens after which a sample is cut, as every model must."""
BATCH = 32
BUDGET = 8192


class Texts(Dataset[dict[str, Any]]):
    """One sample for each length; what the tokens are does not matter here."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": torch.ones(self.lengths[index], dtype=torch.int64), "index": index}


def sources(limit: int | None) -> Iterator[str]:
    """The text of the standard library's modules, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    for path in found[:limit]:
        try:
            yield path.read_text()
        except UnicodeDecodeError:
            continue


def functions(text: str) -> Iterator[str]:
    """Every function and method, with what is nested in it."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # there are files that test just that
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield "".join(lines[node.lineno - 1 : node.end_lineno])


def paragraphs(text: str) -> Iterator[str]:
    """What stands between blank lines."""
    yield from (part for part in re.split(r"\n\s*\n", text) if part.strip())


def lengths_of(texts: Iterable[str]) -> list[int]:
    """Tokens of each text: words and single signs, cut at ``LONGEST``."""
    return [min(max(len(_TOKEN.findall(text)), 1), LONGEST) for text in texts]


def strategies(lengths: list[int]) -> dict[str, "DataLoader[Any]"]:
    """Ways to batch the same samples, by name; the first pads all to the longest there is."""
    from accel_data import LengthGrouped, OrderSampler, PaddingCollator, TokenBudget, TokenBudgetSampler

    torch.manual_seed(0)
    collate = partial(PaddingCollator, keys=("tokens",), mask="mask")
    eight = collate(multiple_of=8)
    loader = partial(DataLoader, Texts(lengths), batch_size=BATCH)
    grouped = OrderSampler(LengthGrouped(lengths, group_size=64 * BATCH))
    budget = TokenBudgetSampler(lengths, TokenBudget(max_tokens=BUDGET, multiple_of=8))
    return {
        "longest of all": loader(shuffle=True, collate_fn=collate(multiple_of=max(lengths))),
        "longest of the batch": loader(shuffle=True, collate_fn=collate()),
        "... multiples of 8": loader(shuffle=True, collate_fn=eight),
        "length-grouped, multiples of 8": loader(sampler=grouped, collate_fn=eight),
        "token budget, multiples of 8": DataLoader(Texts(lengths), batch_sampler=budget, collate_fn=eight),
    }


def measure(loader: "DataLoader[Any]", samples: int) -> dict[str, Any]:
    """Counts positions in the batches themselves, and checks that each sample comes once."""
    real, sizes, rows = 0, [], []
    for batch in loader:
        real += int(batch["mask"].sum())
        sizes.append(batch["mask"].numel())
        rows += batch["index"].tolist()
    assert sorted(rows) == list(range(samples))
    spread = max(sizes) / statistics.mean(sizes)
    return {"padding": 1 - real / sum(sizes), "batches": len(sizes), "positions": sum(sizes), "largest_to_mean": spread}


def main() -> None:
    args = parser(__doc__).parse_args()
    report = Report(
        f"Padding in batches of {BATCH} (or {BUDGET} tokens), tokens of the standard library",
        ["what", "samples", "median_length", "batching", "padding", "saved", "work", "batches", "largest_to_mean"],
    )
    texts = list(sources(60 if args.quick else None))
    for what, cut in {"functions": functions, "paragraphs": paragraphs}.items():
        lengths = lengths_of(part for text in texts for part in cut(text))
        tokens = sum(lengths)
        rows = {name: measure(loader, len(lengths)) for name, loader in strategies(lengths).items()}
        worst = max(row["positions"] for row in rows.values())
        for name, row in rows.items():
            positions = row.pop("positions")
            report.add(
                what=what,
                samples=len(lengths),
                median_length=statistics.median(lengths),
                batching=name,
                saved=(worst - positions) / (worst - tokens),
                work=positions / tokens,
                **row,
            )
    report.show(args.json)


if __name__ == "__main__":
    main()
