"""Output of commands: JSON for programs, tables for people."""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def print_json(value: object) -> None:
    """Prints plain data as JSON; numbers that JSON lacks (NaN, infinity) become text."""
    json.dump(_finite(value), sys.stdout, indent=2, allow_nan=False)
    print()


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    dimmed: Sequence[bool] = (),
    width: int | None = None,
) -> None:
    """Prints rows under headings, in ``width`` columns of text at most (None: those of the terminal).

    See ``table_of`` for the other arguments.
    """
    from rich.console import Console

    Console(highlight=False, width=width).print(table_of(columns, rows, dimmed=dimmed))


def table_of(columns: Sequence[str], rows: Iterable[Sequence[object]], *, dimmed: Sequence[bool] = ()) -> "Table":
    """Returns the table of rows under headings; a column whose heading ends in ``>`` is right-aligned.

    ``dimmed`` marks the rows that matter less.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    for number, row in enumerate(rows):
        style = "dim" if number < len(dimmed) and dimmed[number] else None
        table.add_row(*(Text(str(cell)) for cell in row), style=style)
    return table


def outlined(name: str, value: object, indent: str = "") -> list[str]:
    """Formats plain data as indented lines: mappings as a name with its entries below, other values in one line."""
    if isinstance(value, list | tuple) and all(isinstance(item, str | int | float) for item in value):
        return [f"{indent}{name}: {', '.join(map(str, value)) or 'none'}"]
    if not isinstance(value, Mapping) or not value:
        return [f"{indent}{name}: {value if value != {} else 'none'}"]
    return [f"{indent}{name}:", *(line for key in value for line in outlined(str(key), value[key], indent + "  "))]


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
