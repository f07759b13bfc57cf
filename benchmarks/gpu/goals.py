"""Goals of the measurements on a GPU, and whether the measured rows reach them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """A bound of one metric; the row that is farthest from it counts."""

    name: str
    text: str
    bound: float
    unit: str = ""
    at_least: bool = False

    def worst(self, values: Iterable[float]) -> float:
        """The value that counts."""
        return min(values) if self.at_least else max(values)

    def reached(self, value: float) -> bool:
        """Whether ``value`` is within the bound; NaN is not."""
        return value >= self.bound if self.at_least else value <= self.bound

    @property
    def limit(self) -> str:
        """The bound as text."""
        return f"{'>=' if self.at_least else '<='} {self.bound:g}{' ' + self.unit if self.unit else ''}"


GOALS = (
    Goal("step_us", "time that accel adds to a step of a tiny MLP", 20, "us"),
    Goal("step_ratio", "step of a 1.1B Llama over the same step in raw PyTorch", 1.005),
    Goal("hidden_syncs", "waits of the host for the device in a step, per kind of loop", 0),
    Goal("h2d_exposed", "part of the copy of batches to the device that the step does not hide", 0.05),
    Goal("second_stall", "stall of the second asynchronous save over its bytes at pinned bandwidth", 1.1),
    Goal("planner_peak", "error of the planner's peak of memory", 0.03),
    Goal("compile_ratio", "step of a compiled model over the same compiled in raw PyTorch", 1.01),
    Goal("fp8_speed", "tokens per second in fp8 over torchao by hand", 0.98, at_least=True),
)
BY_NAME = {goal.name: goal for goal in GOALS}


def judged(rows: Iterable[Line]) -> dict[str, dict[str, Any]]:
    """For each goal: its text and limit, the worst value and its case, and the verdict.

    The verdict is "reached", "missed" or "not measured".
    """
    by_goal: dict[str, list[Line]] = {}
    for row in rows:
        if row.get("goal"):
            by_goal.setdefault(row["goal"], []).append(row)
    found = {}
    for goal in GOALS:
        measured = by_goal.get(goal.name, [])
        facts: dict[str, Any] = {"text": goal.text, "limit": goal.limit, "value": None, "case": None}
        if not measured:
            found[goal.name] = facts | {"verdict": "not measured"}
            continue
        missed = [row for row in measured if not goal.reached(row["value"])]
        value = goal.worst(row["value"] for row in missed or measured)
        worst = next(row for row in missed or measured if row["value"] == value or value != value)
        verdict = "missed" if missed else "reached"
        found[goal.name] = facts | {"value": value, "case": worst["case"], "verdict": verdict}
    return found
