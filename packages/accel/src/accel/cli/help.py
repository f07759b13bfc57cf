"""Help texts, drawn from the tables of commands and options."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from accel.cli.option import Option

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


def print_help(usage: str, text: str, options: Iterable[Option], commands: Sequence[tuple[str, str]] = ()) -> None:
    """Prints usage, what the command is for, its sub-commands and its options by group."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text.assemble(("Usage: ", "bold"), usage))
    console.print(Text("\n" + text + "\n"))
    if commands:
        rows = [(Text(name, "bold cyan"), Text(summary)) for name, summary in commands]
        console.print(Panel(_columns(rows), title="Commands", title_align="left", border_style="dim"))
    groups: dict[str, list[Option]] = {}
    for option in options:
        groups.setdefault(option.group, []).append(option)
    for title, members in groups.items():
        rows = [(_spelling(option), Text(option.help)) for option in members]
        console.print(Panel(_columns(rows), title=title, title_align="left", border_style="dim"))


def _spelling(option: Option) -> "Text":
    from rich.text import Text

    shown = Text(", ".join(filter(None, (option.short, option.flag))), "bold cyan")
    if option.metavar:
        shown.append(f" {option.metavar}", "yellow not bold")
    return shown


def _columns(rows: "Sequence[tuple[Text, Text]]") -> "Table":
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for left, right in rows:
        table.add_row(left, right)
    return table
