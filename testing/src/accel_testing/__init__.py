"""Ranks, leaks, faults and equivalence for tests of distributed training code.

Names are imported on first use: the pytest plugin is loaded in every run, and must cost next to nothing there.
"""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_names
from accel_testing._version import __version__ as __version__

if TYPE_CHECKING:
    from accel_testing.compare import Difference as Difference
    from accel_testing.compare import assert_close_state as assert_close_state
    from accel_testing.compare import assert_equal_state as assert_equal_state
    from accel_testing.compare import compare_trees as compare_trees
    from accel_testing.equivalence import Report as Report
    from accel_testing.equivalence import assert_equivalent as assert_equivalent
    from accel_testing.equivalence import run_check as run_check
    from accel_testing.errors import LeakError as LeakError
    from accel_testing.errors import RankDied as RankDied
    from accel_testing.errors import RankError as RankError
    from accel_testing.errors import RankHung as RankHung
    from accel_testing.faults import Fault as Fault
    from accel_testing.faults import corrupt_file as corrupt_file
    from accel_testing.faults import injected as injected
    from accel_testing.faults import limited_file_size as limited_file_size
    from accel_testing.faults import make_read_only as make_read_only
    from accel_testing.faults import small_file_system as small_file_system
    from accel_testing.faults import truncate_file as truncate_file
    from accel_testing.launching import Finished as Finished
    from accel_testing.launching import launch as launch
    from accel_testing.launching import launch_by as launch_by
    from accel_testing.launching import run_command as run_command
    from accel_testing.launching import run_script as run_script
    from accel_testing.layouts import Layout as Layout
    from accel_testing.models import SyntheticData as SyntheticData
    from accel_testing.models import SyntheticTokens as SyntheticTokens
    from accel_testing.models import make_model as make_model
    from accel_testing.pool import RankPool as RankPool
    from accel_testing.program import Program as Program

_EXPORTS = {
    "accel_testing.compare": ("Difference", "assert_close_state", "assert_equal_state", "compare_trees"),
    "accel_testing.equivalence": ("Report", "assert_equivalent", "run_check"),
    "accel_testing.errors": ("LeakError", "RankDied", "RankError", "RankHung"),
    "accel_testing.faults": (
        "Fault",
        "corrupt_file",
        "injected",
        "limited_file_size",
        "make_read_only",
        "small_file_system",
        "truncate_file",
    ),
    "accel_testing.launching": ("Finished", "launch", "launch_by", "run_command", "run_script"),
    "accel_testing.layouts": ("Layout",),
    "accel_testing.models": ("SyntheticData", "SyntheticTokens", "make_model"),
    "accel_testing.pool": ("RankPool",),
    "accel_testing.program": ("Program",),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = ["__version__", *sorted(_MODULES)]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
