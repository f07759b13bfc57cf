"""Probe for a launcher's store at an address."""

import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from accel_launch.launch.child_main import end_with_parent


@final
class StoreProbe:
    """Connection that is tried in a child process, because torch's client cannot be interrupted.

    The client ignores signals, exceeds its timeout if another program answers, and prints long messages at each try.
    The child can be killed at once, is silent, and ends with this process.

    Args:
        keys: the keys that distinguish a launcher's store from that of another program.
    """

    def __init__(self, address: str, port: int, timeout: timedelta, keys: Sequence[str]) -> None:
        self._place = address, port
        self._timeout = timeout
        self._keys = list(keys)
        self._child: int | None = None

    def __enter__(self) -> "StoreProbe":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child is not None:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)

    def answered(self) -> bool:
        """Whether the store has answered by now; restarts a try that failed. Does not wait."""
        if self._child is None:
            self._child = self._fork()
        ended, status = os.waitpid(self._child, os.WNOHANG)
        if not ended:
            return False
        self._child = None
        return status == 0

    def _fork(self) -> int:
        launcher = os.getpid()
        child = os.fork()
        if child:
            return child
        try:
            end_with_parent(launcher)
            silence = os.open(os.devnull, os.O_RDWR)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            address, port = self._place
            store = TCPStore(address, port, None, False, self._timeout, wait_for_workers=False)
            store.wait(self._keys, self._timeout)
            os._exit(0)
        finally:
            os._exit(1)
