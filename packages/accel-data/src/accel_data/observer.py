"""Observer of a loader's passes."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from accel_data.loader import PreparedLoader


class LoaderObserver(Protocol):
    """Called when a pass of a loader begins and ends, for example to track the active loader."""

    def began(self, loader: "PreparedLoader") -> None:
        """Called before the first batch is read."""

    def ended(self, loader: "PreparedLoader") -> None:
        """Called when the pass has ended, was left, or has failed."""
