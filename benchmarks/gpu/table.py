"""Tables and plots of a run's summary."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.goals import GOALS


def number(value: Any) -> str:
    """A value as text with three digits."""
    if isinstance(value, bool) or not isinstance(value, float | int):
        return "" if value is None else str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def goals_table(summary: Mapping[str, Any]) -> list[str]:
    """The goals with their limits, values and verdicts, as lines of a markdown table."""
    lines = ["| goal | limit | measured | of | verdict |", "| --- | --- | --- | --- | --- |"]
    for goal in GOALS:
        facts = summary["goals"][goal.name]
        case = facts["case"] or ""
        lines.append(f"| {goal.text} | {goal.limit} | {number(facts['value'])} | {case} | {facts['verdict']} |")
    return lines


def rows_table(summary: Mapping[str, Any]) -> list[str]:
    """Every row that was measured, and every case that was not."""
    lines = ["| section | case | metric | value |", "| --- | --- | --- | --- |"]
    for line in summary["lines"]:
        if line["kind"] == "row":
            value = f"{number(line['value'])} {line['unit']}".strip()
            lines.append(f"| {line['section']} | {line['case']} | {line['metric']} | {value} |")
        else:
            text = line.get("why") or line.get("error", "")
            lines.append(f"| {line['section']} | {line['case']} | {line['kind']} | {_cell(text)} |")
    return lines


def report(summary: Mapping[str, Any]) -> str:
    """The run as one page of markdown."""
    machine = ", ".join(f"{name} {value}" for name, value in summary["machine"].items())
    sections = [
        "| section | seconds | status |",
        "| --- | --- | --- |",
        *(f"| {name} | {facts['seconds']} | {_cell(facts['status'])} |" for name, facts in summary["sections"].items()),
    ]
    title = f"{summary['date']}: {'tiny sizes, ' if summary['tiny'] else ''}{summary['device']}, {machine}"
    return "\n\n".join([title, *map("\n".join, (goals_table(summary), sections, rows_table(summary)))]) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split())[:300].replace("|", "/")


def plot(summary: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws the ratios of each section to their base; returns no paths where matplotlib is missing."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return []
    paths = []
    rows = [line for line in summary["lines"] if line["kind"] == "row" and isinstance(line["value"], float | int)]
    for section in dict.fromkeys(row["section"] for row in rows):
        ratios = [row for row in rows if row["section"] == section and row["unit"] == "x"]
        if not ratios:
            continue
        figure, axes = pyplot.subplots(figsize=(9, 0.8 + 0.3 * len(ratios)), layout="constrained")
        axes.barh([f"{row['case']}: {row['metric']}" for row in ratios], [row["value"] for row in ratios])
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_title(f"{section}: ratios")
        paths.append(folder / f"{section}.png")
        figure.savefig(paths[-1])
        pyplot.close(figure)
    return paths
