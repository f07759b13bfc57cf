"""Forks of a launcher's ranks, by a process that has none of the launcher's threads, sockets and objects.

The launcher forks it before its own program begins. Its forks are children of the launcher (``CLONE_PARENT`` of
clone(2)), so that the launcher waits for them, signals them and sees their exit status as if it had started them.
"""

import ctypes
import json
import os
import platform
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, final

from accel_testing.ranks.fork_server import die_with_parent

Become = Callable[[Sequence[str], Mapping[str, str], str], NoReturn]
"""What a fork does with its command, its variables and its folder."""

_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_GET_TID_ADDRESS = 40
_OF_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_possible() -> bool:
    """Whether this system has the call, by a number that is known here."""
    return sys.platform == "linux" and platform.machine() in _CLONE


@final
class SiblingForks:
    """The process that forks, as seen from its launcher; it ends with the launcher."""

    def __init__(self, become: Become) -> None:
        self._socket, theirs = socket.socketpair()
        parent = os.getpid()
        if os.fork() == 0:
            try:
                self._socket.close()
                die_with_parent(parent)
                _serve(theirs, become)
            finally:
                os._exit(70)
        theirs.close()

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: str,
        *,
        streams: Sequence[int],
        new_session: bool,
    ) -> int:
        """Id of a new child of this process, whose standard streams are the three files ``streams``."""
        with tempfile.TemporaryFile() as request:
            request.write(json.dumps([list(command), dict(environment), folder, new_session]).encode())
            request.flush()
            request.seek(0)
            socket.send_fds(self._socket, [b"fork"], [request.fileno(), *streams])
            answer = self._socket.recv(64)
        if not answer.isdigit():
            raise OSError(f"no process was forked: {answer.decode() or 'the process that forks has ended'}")
        return int(answer)


def _serve(control: socket.socket, become: Become) -> None:
    # A signal for the launcher's group is not for this process, which ends with the launcher.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _OF_GROUP}
    while True:
        message, files, _, _ = socket.recv_fds(control, 64, 4)
        if not message:
            os._exit(0)
        request, *streams = files
        with os.fdopen(request, "rb") as file:
            command, environment, folder, new_session = json.load(file)
        try:
            pid = _fork_sibling()
        except OSError as error:
            control.sendall(str(error).encode())
            pid = -1
        if pid == 0:
            control.close()
            for number, handler in before.items():
                signal.signal(number, handler)
            _take(streams)
            if new_session:
                os.setsid()
            become(command, environment, folder)
        for stream in streams:
            os.close(stream)
        if pid > 0:
            control.sendall(str(pid).encode())


def _take(streams: Sequence[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number, inheritable=True)
    for stream in streams:
        os.close(stream)


def _fork_sibling() -> int:
    """``os.fork``, but that the child's parent is the parent of this process, which has one thread only.

    Raises:
        OSError: the system refuses another process.
    """
    api: Any = ctypes.pythonapi
    libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock, as os.fork does
    libc.syscall.restype = ctypes.c_long
    flags, thread = _CLONE_PARENT | signal.SIGCHLD, ctypes.c_void_p()
    if libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(thread), 0, 0, 0) == 0:
        # Where the C library keeps the number of the thread, by which pthread_kill finds it.
        flags |= _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
    api.PyOS_BeforeFork()
    place = thread.value or 0  # the fourth argument on x86-64, the fifth on AArch64; the other one is not read
    pid = int(libc.syscall(*map(ctypes.c_long, (_CLONE[platform.machine()], flags, 0, 0, place, place))))
    if pid == 0:
        api.PyOS_AfterFork_Child()
    else:
        api.PyOS_AfterFork_Parent()
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return pid
