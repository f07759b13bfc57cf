"""A run's own log as one page: what happened, how fast, and with which settings."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in _PLACE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
