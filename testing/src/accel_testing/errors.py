"""Errors of the ranks of a test.

These are not part of ``accel_state.errors``: what judges the library must not need it in order to speak.
"""


class RankError(RuntimeError):
    """A rank failed; the text holds its traceback. Also the cause of an exception that was rebuilt from a rank."""


class RankHung(RankError):
    """Ranks did not answer in time; the text names them, where they stood, and shows all stacks."""


class RankDied(RankError):
    """The process of a rank ended while it had work; the text says which and how."""


class LeakError(AssertionError):
    """A test left something behind; the text names what."""
