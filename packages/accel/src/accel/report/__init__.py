"""A run's own log as one page: what happened, how fast, and with which settings."""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel.report.history import History as History
    from accel.report.history import find_run as find_run
    from accel.report.history import read_history as read_history
    from accel.report.page import page_of as page_of
    from accel.report.plots import plots_of as plots_of

_PLACE_OF = {
    "History": "history",
    "find_run": "history",
    "page_of": "page",
    "plots_of": "plots",
    "read_history": "history",
}
__all__ = sorted(_PLACE_OF)
__getattr__, __dir__ = lazy_names(__name__, {name: f".{module}" for name, module in _PLACE_OF.items()})
