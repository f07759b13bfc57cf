"""The report page: one self-contained HTML file."""

import math
import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from accel_observe.meters.phases import PHASES
from accel_observe.meters.progress import clock_text
from accel_observe.report.history import History
from accel_observe.report.plots import PHASE_COLOURS, Plot, number_text, plots_of
from accel_observe.report.read_amplification import read_text
from accel_observe.report.style import STYLE

_PHASE_TEXT = {
    "data": "waiting for data",
    "compute": "computing",
    "communication": "waiting for ranks",
    "save": "saving",
}
_EVENT_LIMIT = 200


def page_of(history: History, plots: Sequence[Plot] | None = None) -> str:
    """Renders a report. ``plots``: the result of ``plots_of``, if it has been computed already."""
    plots = plots_of(history) if plots is None else plots
    curves = [plot for plot in plots if not plot.phases]
    times = [plot for plot in plots if plot.phases]
    sections = [
        _section("Curves", _figures(curves)) if curves else "",
        _section("Where the time went", _legend() + _figures(times)) if times else "",
        _section("What happened", _events(history)),
        _section("Checkpoints", _checkpoints(history)),
        _section("The run", _description(history)),
        _section("Configuration", _configuration(history)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(history.name)}</title><style>{STYLE}</style></head><body><main>"
        f"{_head(history)}{''.join(sections)}"
        "<footer>written by <code>accel report</code> from the run's own log</footer></main></body></html>"
    )


def picture_of(plot: Plot) -> str:
    """Renders one plot with its heading and legend as a file of its own."""
    legend = _legend() if plot.phases else ""
    return (
        f'<!doctype html><meta charset="utf-8"><style>{STYLE} body{{background:var(--paper)}} '
        f"figure{{border:0}}</style>{_figure(plot, legend)}"
    )


def _head(history: History) -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(history.began))
    state = "ended" if history.finished else "not ended, or killed"
    cards = [("time", clock_text(history.seconds), f"{len(history.lives)} start{'s'[: len(history.lives) != 1]}")]
    curve = next(
        (history.curves[name] for name in ("loss", "train/loss", "train_loss") if name in history.curves), None
    )
    if curve:
        best = min(curve, key=lambda point: (math.isnan(point[1]), point[1]))
        cards.append(("loss", f"{curve[-1][1]:.4g}", f"lowest {best[1]:.4g} at step {best[0]:,}"))
        cards.append(("last step", f"{curve[-1][0]:,}", _lost_text(history)))
    if history.readings:
        last = history.readings[-1]
        cards.append(
            (
                "samples/s",
                number_text(last["samples_per_second"]),
                f"{last['seconds_per_step'] * 1e3:.1f} ms a step",
            )
        )
        if last.get("mfu") is not None:
            cards.append(("MFU", f"{100 * last['mfu']:.3g}%", "of the devices' peak"))
        cards.append(("goodput", f"{last['goodput']:.1%}", "of the time since the first start"))
        cards.append(("memory", f"{last['memory'] / 2**20:,.0f} MiB", f"host {last['host_memory'] / 2**20:,.0f} MiB"))
    shown = "".join(
        f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(note)}</small></div>'
        for name, value, note in cards
    )
    return (
        f'<header><h1>{escape(history.name)}</h1><p>started {started} &middot; <span class="state">{state}</span></p>'
        f'<div class="cards">{shown}</div></header>'
    )


def _lost_text(history: History) -> str:
    lost = max((sum(map(len, parts)) for parts in history.lost.values()), default=0)
    return f"{lost:,} steps done again" if lost else "no step lost"


def _figures(plots: Iterable[Plot]) -> str:
    return f'<div class="figures">{"".join(map(_figure, plots))}</div>'


def _figure(plot: Plot, legend: str = "") -> str:
    caption = f"<figcaption>{escape(plot.title)}</figcaption>"
    return f'<figure id="{escape(plot.name)}">{caption}{legend}{plot.svg}</figure>'


def _legend() -> str:
    entries = "".join(
        f'<span><i style="background:{colour}"></i>{_PHASE_TEXT[phase]}</span>'
        for phase, colour in zip(PHASES, PHASE_COLOURS, strict=True)
    )
    return f'<p class="legend">{entries}</p>'


def _events(history: History) -> str:
    rows = [
        (clock_text(event.seconds), _step(event.step), event.kind, event.text, event.life) for event in history.events
    ]
    hidden = len(rows) - _EVENT_LIMIT
    shown = _table(("time|", "step>", "event|", "", "start>"), rows[-_EVENT_LIMIT:])
    return (
        shown + (f"<p>{hidden} earlier ones are in the log.</p>" if hidden > 0 else "") if rows else "<p>Nothing.</p>"
    )


def _checkpoints(history: History) -> str:
    saved = [event for event in history.events if event.kind == "saved"]
    rows = [
        (clock_text(one.seconds), _step(one.step), one.facts.get("path", ""), f"{one.facts.get('seconds', 0.0):.2f} s")
        for one in saved
    ]
    return _table(("time|", "step>", "place", "took>"), rows) if rows else "<p>None was saved.</p>"


def _step(step: int | None) -> str:
    return "" if step is None else f"{step:,}"


def _description(history: History) -> str:
    facts = history.description
    if not facts:
        return "<p>The log does not say; it does once something is logged with models prepared.</p>"
    rows = [
        ("backend", f"{facts['backend']}: {'; '.join(facts['reasons'])}"),
        ("processes", f"{facts['processes']} on {facts['device']}; {facts['data_shards']} read different data"),
    ]
    if facts.get("timeout_seconds") is not None:
        rows.append(("timeout", f"{facts['timeout_seconds']:g} s for a collective"))
    for loader in facts["loaders"]:
        steps = "unknown" if loader["steps_per_epoch"] is None else f"{loader['steps_per_epoch']:,}"
        rows.append(
            (
                f"loader of {loader['dataset']}",
                f"effective batch {loader['effective_batch']:,} in {loader['accumulated']} micro-batches; "
                f"{steps} steps an epoch; {read_text(loader['read_amplification'])}",
            )
        )
    for model in facts["models"]:
        kinds = ", ".join(f"{count:,} {dtype}" for dtype, count in model["dtypes"].items())
        rows.append(
            (
                f"model {model['name']}",
                f"{model['parameters']:,} parameters on rank 0 ({kinds}), in {model['wrapped_as'][-1]}",
            )
        )
    rates = _rates(history)
    if rates:
        rows.append(("learning rate", rates))
    precision = f"<pre>{escape(facts['precision'])}</pre>"
    return _table(("", ""), rows) + precision


def _rates(history: History) -> str:
    curve = history.curves.get("lr") or history.curves.get("learning_rate")
    if not curve:
        return ""
    peak = max(curve, key=lambda point: point[1])
    first, last = curve[0], curve[-1]
    return (
        f"{first[1]:.3g} at step {first[0]:,}, highest {peak[1]:.3g} at step {peak[0]:,}, "
        f"{last[1]:.3g} at step {last[0]:,}"
    )


def _configuration(history: History) -> str:
    from accel_observe.tracking.values import flatten

    parts = []
    if history.configuration:
        rows = [(name, str(value)) for name, value in flatten(history.configuration, ".")]
        parts.append("<h3>given to init_trackers</h3>" + _table(("name", "value"), rows))
    settings = history.description.get("settings", [])
    chosen = [row for row in settings if row[2] != "default"]
    if chosen:
        parts.append("<h3>settings, with where they came from</h3>" + _table(("setting", "value", "from"), chosen))
    if settings:
        rest = _table(("setting", "value", "from"), [row for row in settings if row[2] == "default"])
        parts.append(f"<details><summary>{len(settings) - len(chosen)} defaults</summary>{rest}</details>")
    return "".join(parts) or "<p>None was recorded.</p>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Renders a table. A heading that ends with ``>`` marks a column of numbers, with ``|`` one without line breaks."""
    kinds = {">": ' class="right"', "|": ' class="short"'}
    sides = [kinds.get(column[-1:], "") for column in columns]
    head = "".join(f"<th{side}>{escape(column.rstrip('>|'))}</th>" for column, side in zip(columns, sides, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{side}>{escape(str(cell))}</td>" for cell, side in zip(row, sides, strict=True)) + "</tr>"
        for row in rows
    )
    heading = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    return f'<div class="scroll"><table>{heading}<tbody>{body}</tbody></table></div>'


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inside}</section>"
