"""The observer of a loader's passes."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from accel_data.loader import PreparedLoader


class LoaderObserver(Protocol):
    """Told when a loader's pass starts and ends, for instance to know which loader is the active one."""

    def began(self, loader: "PreparedLoader") -> None:
        """The first batch is about to be read."""

    def ended(self, loader: "PreparedLoader") -> None:
        """The pass is over, was broken out of, or failed."""
