"""Differences between a saved tree and the tree that it is loaded into."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from accel_ckpt.format.tree import Path, show_path

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Difference:
    """Paths that are wanted but not saved, saved but not wanted, and present in both with another shape or kind."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        parts = []
        if self.missing:
            parts.append(f"missing: {_few(self.missing)}")
        if self.unexpected:
            near = get_close_matches(self.unexpected[0], self.missing, n=1)
            parts.append(f"unexpected: {_few(self.unexpected)}{f' (nearest wanted: {near[0]})' if near else ''}")
        if self.mismatched:
            parts.append(f"mismatched: {_few(self.mismatched)}")
        return "; ".join(parts) or "none"


def compare(saved: Mapping[Path, Any], wanted: Mapping[Path, Any]) -> Difference:
    """Compares two trees given by their leaves: shapes of tensors, and whether a leaf is a tensor; not values."""
    mismatched = [
        f"{show_path(path)} ({_kind(saved[path])} saved, {_kind(value)} wanted)"
        for path, value in wanted.items()
        if path in saved and not is_lazy(value) and _kind(saved[path]) != _kind(value)
    ]
    return Difference(
        tuple(show_path(path) for path in wanted if path not in saved),
        tuple(show_path(path) for path in saved if path not in wanted),
        tuple(mismatched),
    )


def _kind(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "a value"


def _few(items: Sequence[str]) -> str:
    more = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
