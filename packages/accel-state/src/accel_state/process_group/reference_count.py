"""Reference count of torch's default process group: the last session closes the group if accel opened it."""

import atexit
import weakref
from typing import TYPE_CHECKING, final

from accel_state.process_group import group as groups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_state.session import Session
    from accel_state.watchdog.monitor import Watchdog

_EXIT_PATIENCE = 5.0

# The open sessions, oldest first. torch has one default group per process, so the list of its users is per process too.
# Weak references, so that the list keeps no session alive.
_open: "list[weakref.ref[Session]]" = []


@final
class GroupLease:
    """Reference-counted default group: the last session to leave closes the group if accel opened it.

    An exit handler closes a group that accel opened if its sessions were dropped without being closed.
    """

    def __init__(self, group: "ProcessGroup", *, owned: bool) -> None:
        self.group = group
        self.owned = owned
        self.watchdog: Watchdog | None = None
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._guard = _ExitGuard(group)
        if owned:
            atexit.register(self._guard)

    def join(self, session: "Session") -> None:
        """Counts ``session`` as a user of the group."""
        self._sessions.add(session)

    def watch(self) -> None:
        """Starts the watchdog for the group, which runs until the group is closed.

        Collective: every rank of the group must call this.
        """
        from accel_state.watchdog.monitor import Watchdog

        if self.watchdog is None:
            self.watchdog = Watchdog(self.group).start()

    def leave(self, session: "Session", *, patience: float | None) -> None:
        """Removes ``session`` from the count; closes an owned group after the last one (``patience`` in seconds)."""
        self._sessions.discard(session)
        if self.owned and not self._sessions:
            atexit.unregister(self._guard)
            if self.watchdog is not None:
                self.watchdog.close()
            if self.group is groups.default_group():
                groups.close_group(self.group, patience=patience)


def current_lease() -> GroupLease | None:
    """Returns the lease on the default group: that of an open session, or a new one for an adopted group."""
    default = groups.default_group()
    if default is None:
        return None
    shared = (session.lease for session in open_sessions())
    return next((lease for lease in shared if lease and lease.group is default), GroupLease(default, owned=False))


def open_sessions() -> "list[Session]":
    """Returns the sessions of this process that are open and still referenced, oldest first."""
    return [session for session in (reference() for reference in _open) if session is not None]


def add_session(session: "Session") -> None:
    """Adds ``session`` to the open sessions."""
    _open[:] = [reference for reference in _open if reference() is not None]
    _open.append(weakref.ref(session))


def remove_session(session: "Session") -> None:
    """Removes ``session`` from the open sessions."""
    _open[:] = [reference for reference in _open if reference() not in {None, session}]


@final
class _ExitGuard:
    """Closes a group at exit if it is still the default one; holds the group weakly, so it does not keep it alive."""

    def __init__(self, group: "ProcessGroup") -> None:
        self._group = weakref.ref(group)

    def __call__(self) -> None:
        group = self._group()
        if group is not None and group is groups.default_group():
            groups.close_group(group, patience=_EXIT_PATIENCE)
