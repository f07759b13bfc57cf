"""Findings in a script: what to change, where, and how."""

from dataclasses import dataclass
from typing import Any, Literal, final

Kind = Literal["rename", "change", "note"]
"""``rename``: ``--write`` does it. ``change``: accel refuses it, or lacks the name. ``note``: it runs, and means
something else."""


@final
@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One finding.

    Attributes:
        line: line, from 1.
        column: character in the line, from 1.
        kind: what it asks for.
        rule: name of the rule, as in the table of differences.
        message: what is different.
        remedy: what to do, in one line; empty: nothing, if the meaning is accepted.
    """

    line: int
    column: int
    kind: Kind
    rule: str
    message: str
    remedy: str

    def document(self) -> dict[str, Any]:
        """The finding as JSON."""
        return {name: getattr(self, name) for name in ("line", "column", "kind", "rule", "message", "remedy")}

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.line}:{self.column}: {self.kind} [{self.rule}] {self.message}{remedy}"


@final
@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """Replacement of the bytes from ``start`` to ``end`` of a script in UTF-8."""

    start: int
    end: int
    text: str


def edited(source: bytes, edits: "list[Edit]") -> bytes:
    """Returns the source with all edits, which do not overlap; everything else keeps its bytes."""
    made, end = [], 0
    for edit in sorted(edits):
        assert edit.start >= end, edit
        made += [source[end : edit.start], edit.text.encode()]
        end = edit.end
    return b"".join([*made, source[end:]])
