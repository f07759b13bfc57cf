"""Exceptions of this package, and the hints of their messages."""

from collections.abc import Iterable


class PrecisionError(ValueError):
    """A precision that cannot be parsed, or that this device, library or model cannot compute."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'name'?" for the nearest of the known names; empty if none resembles the word."""
    from difflib import get_close_matches

    near = get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
