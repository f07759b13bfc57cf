"""Errors of the ranks of a test.

They are not part of ``accel_state.errors``, because the harness must work without the library that it tests.
"""


class RankError(RuntimeError):
    """A rank failed; the text includes its traceback. Also the cause of an exception that was rebuilt from a rank."""


class RankHung(RankError):
    """Ranks did not answer in time; the text names them and their positions, and includes all stacks."""


class RankDied(RankError):
    """The process of a rank ended during its work; the text says which rank and how."""


class LeakError(AssertionError):
    """A test leaked a resource; the text names it."""
