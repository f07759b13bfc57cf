"""Curves and bars as self-contained SVG, in both of a page's colour schemes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import final

from accel_observe.meters.phases import PHASES
from accel_observe.report.history import History

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 34
_SHOWN = 1_500
_SPOTS = 120
# Values beyond it are drawn at the edge, and ranges below its inverse as one value: both leave room for arithmetic.
_MOST = 1e300
PHASE_COLOURS = ("var(--c2)", "var(--c1)", "var(--c3)", "var(--c4)")


@final
@dataclass(frozen=True, slots=True)
class Plot:
    """A plot with its heading; ``name`` is its file name, ``phases`` means that its colours stand for phases."""

    name: str
    title: str
    svg: str
    phases: bool = False


def plots_of(history: History) -> list[Plot]:
    """All plots of a report, the most important first; each with a unique file name."""
    taken: set[str] = set()
    plots = []
    for plot in _drawn(history):
        name, number = plot.name, 1
        while name.casefold() in taken:
            number += 1
            name = f"{plot.name}-{number}"
        taken.add(name.casefold())
        plots.append(replace(plot, name=name))
    return plots


def _drawn(history: History) -> Iterator[Plot]:
    restarts = [float(step) for step in history.restarts]
    first = [name for name in ("loss", "train/loss", "train_loss", "lr") if name in history.curves]
    names = [*first, *(name for name in history.curves if name not in first and not name.startswith("meter/"))]
    for name in names:
        drawn = curve(history.curves[name], lost=history.lost.get(name, ()), marks=restarts, label=name)
        yield Plot(_file_name(name), name, drawn)
    readings = history.readings
    restarts = _first_readings(history)
    for key, title in (
        ("samples_per_second", "samples per second"),
        ("tokens_per_second", "tokens per second"),
        ("mfu", "model FLOPs utilisation"),
        ("memory", "memory, MiB"),
        ("goodput", "goodput"),
    ):
        scale = 2**20 if key == "memory" else 1
        points = [(float(one["step"]), one[key] / scale) for one in readings if isinstance(one.get(key), int | float)]
        if points:
            yield Plot(key, title, curve(points, marks=restarts, label=title, floor=True))
    if readings:
        bars = [(f"{one['step']}", one["shares"]) for one in _thinned(readings, 60)]
        yield Plot("shares", "where the time of rank 0 went", stacked(bars, "step"), phases=True)
        totals = rank_totals(history)
        if len(totals) > 1:
            spent = [(f"rank {rank}", row) for rank, row in enumerate(totals)]
            yield Plot("ranks", "ranks compared, seconds", stacked(spent, "", normed=False), phases=True)


def rank_totals(history: History) -> list[dict[str, float]]:
    """Seconds of each rank in each phase, summed over the readings with the same world size as the last one."""
    tables = [one["ranks"] for one in history.readings if one.get("ranks")]
    tables = [table for table in tables if len(table) == len(tables[-1])]
    count = len(tables[-1]) if tables else 0
    return [{phase: sum(table[rank].get(phase, 0.0) for table in tables) for phase in PHASES} for rank in range(count)]


def curve(
    points: Points, *, lost: Sequence[Points] = (), marks: Sequence[float] = (), label: str = "", floor: bool = False
) -> str:
    """Draws values over steps, with a running median if there are many; lost values are dashed, restarts are marked.

    Tooltips show step and value of every point, or of every n-th of more than 120. Outliers do not determine the scale:
    they are drawn as dots at the edge.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    gone = [[point for point in part if math.isfinite(point[1])] for part in lost]
    if not finite:
        return _frame("", (0.0, 1.0), (0.0, 1.0), label)
    spots = [*finite, *(point for part in gone for point in part)]
    xs, ys = _range([x for x, _ in spots]), _range(usual([y for _, y in spots]), zero=floor)
    parts = []
    for mark in marks:
        if xs[0] <= mark <= xs[1]:
            x = _x(mark, xs)
            parts.append(f'<line class="restart" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}"/>')
    parts += [_line_of("lost", part, xs, ys) for part in gone if part]
    smooth = running_median(finite) if len(finite) >= 60 else []
    parts.append(_line_of("raw" if smooth else "line", finite, xs, ys))
    if smooth:
        parts.append(_line_of("line", smooth, xs, ys))
    outside = [(x, min(max(y, ys[0]), ys[1])) for x, y in finite if not ys[0] <= y <= ys[1]]
    parts += [_dot("outside", point, xs, ys) for point in _thinned(outside, 200)]
    parts += [_spot(point, xs, ys) for point in _thinned(finite, _SPOTS)]
    return _frame("".join(parts), xs, ys, label)


def usual(values: Sequence[float]) -> list[float]:
    """The values without outliers, which are further from the 5 to 95 % range than ten times its width."""
    if len(values) < 20:
        return list(values)
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
    reach = 10 * (high - low) or math.inf
    return [value for value in values if low - reach <= value <= high + reach]


def _line_of(kind: str, points: Points, xs: tuple[float, float], ys: tuple[float, float]) -> str:
    """Draws a path, or a dot for a single point, clamped to the plot."""
    inside = [(x, min(max(y, ys[0]), ys[1])) for x, y in _thinned(points, _SHOWN)]
    return _dot(kind, inside[0], xs, ys) if len(inside) == 1 else f'<path class="{kind}" d="{_path(inside, xs, ys)}"/>'


def _dot(kind: str, point: tuple[float, float], xs: tuple[float, float], ys: tuple[float, float]) -> str:
    return f'<circle class="dot {kind}" cx="{_x(point[0], xs):.1f}" cy="{_y(point[1], ys):.1f}" r="3"/>'


def _spot(point: tuple[float, float], xs: tuple[float, float], ys: tuple[float, float]) -> str:
    """Draws an invisible dot whose tooltip shows the value, which may be outside of the plot."""
    x, y = point
    place = f'cx="{_x(x, xs):.1f}" cy="{_y(min(max(y, ys[0]), ys[1]), ys):.1f}"'
    return f'<circle class="spot" {place} r="6"><title>step {x:,.0f}: {y:.5g}</title></circle>'


def stacked(rows: Sequence[tuple[str, Mapping[str, float]]], label: str, *, normed: bool = True) -> str:
    """Draws a bar for each row, divided by phase; ``normed`` bars have equal heights."""
    highest = 1.0 if normed else max(sum(row.values()) for _, row in rows) or 1.0
    ys = (0.0, 1.0) if normed else _range([0.0, highest], zero=True)
    room = (_WIDTH - _LEFT - _RIGHT) / max(len(rows), 1)
    width = min(room * 0.86, 54)
    parts = []
    every = max(1, math.ceil(len(rows) / 10))
    for position, (name, row) in enumerate(rows):
        x = _LEFT + room * (position + 0.5) - width / 2
        below = 0.0
        for phase, colour in zip(PHASES, PHASE_COLOURS, strict=True):
            value = row.get(phase, 0.0)
            top, bottom = _y(below + value, ys), _y(below, ys)
            below += value
            parts.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{max(bottom - top, 0):.1f}" '
                f'style="fill:{colour}"><title>{escape(name)}: {phase} {value:.3g}</title></rect>'
            )
        if position % every == 0:
            middle = x + width / 2
            parts.append(f'<text class="tick" x="{middle:.1f}" y="{_HEIGHT - 17}" text-anchor="middle">{name}</text>')
    return _frame("".join(parts), None, ys, label)


def running_median(points: Points, window: int | None = None) -> list[tuple[float, float]]:
    """Replaces each value by the median of its neighbourhood, which is robust to single outliers."""
    from statistics import median

    reach = max(2, (window or max(5, len(points) // 40)) // 2)
    values = [y for _, y in points]
    every = max(1, len(points) // _SHOWN)
    return [
        (points[position][0], median(values[max(0, position - reach) : position + reach + 1]))
        for position in range(0, len(points), every)
    ]


def _frame(
    inside: str, xs: tuple[float, float] | None, ys: tuple[float, float], label: str, x_label: str = "step"
) -> str:
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    ]
    for value in ticks(*ys):
        y = _y(value, ys)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        text = number_text(value)
        parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    if xs is not None:
        for value in ticks(*xs, whole=True):
            x = _x(value, xs)
            text = number_text(value)
            parts.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 17}" text-anchor="middle">{text}</text>')
        parts.append(f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" text-anchor="end">{x_label}</text>')
    bottom = _HEIGHT - _BOTTOM
    parts.append(f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{_WIDTH - _RIGHT}" y2="{bottom}"/>')
    return "".join([*parts, inside, "</svg>"])


def ticks(low: float, high: float, *, whole: bool = False, count: int = 5) -> list[float]:
    """About ``count`` round numbers in a range."""
    if high <= low:
        return [low]
    # The lower bound keeps ticks apart: ticks closer than two neighbouring floats would coincide.
    raw = max((high - low) / count, math.ulp(max(abs(low), abs(high))))
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    if whole:
        step = max(1, round(step))
    first = math.ceil(low / step - 1e-9)
    marks = (number * step for number in range(first, math.floor(high / step + 1e-9) + 1))
    return list(dict.fromkeys(min(max(mark, low), high) for mark in marks))


def number_text(value: float) -> str:
    """Formats a number for an axis: ``12.5k``."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"


def _range(values: Sequence[float], *, zero: bool = False) -> tuple[float, float]:
    low, high = (max(-_MOST, min(value, _MOST)) for value in (min(values), max(values)))
    if zero:
        low = min(0.0, low)
    margin = (high - low) * 0.04
    if high - low <= 1 / _MOST:
        margin = abs(high) * 0.1 if abs(high) > 1 / _MOST else 1.0
    return (low if zero else low - margin), high + margin


def _x(value: float, xs: tuple[float, float]) -> float:
    return _LEFT + (value - xs[0]) / (xs[1] - xs[0]) * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, ys: tuple[float, float]) -> float:
    return _HEIGHT - _BOTTOM - (value - ys[0]) / (ys[1] - ys[0]) * (_HEIGHT - _BOTTOM - _TOP)


def _path(points: Points, xs: tuple[float, float], ys: tuple[float, float]) -> str:
    return "M" + "L".join(f"{_x(x, xs):.1f} {_y(y, ys):.1f}" for x, y in points)


def _thinned(points: Sequence, most: int) -> list:  # type: ignore[type-arg]
    every = max(1, math.ceil(len(points) / most))
    thin = list(points[::every])
    return thin if not points or thin[-1] is points[-1] else [*thin, points[-1]]


def _first_readings(history: History) -> list[float]:
    """Meter step of the first reading of each process but the first; the meter's steps differ from the logged ones."""
    first = {reading["life"]: float(reading["step"]) for reading in reversed(history.readings)}
    return [step for life, step in sorted(first.items()) if life > 1]


def _file_name(name: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "-_" else "_" for sign in name)
