"""Fork server: imports torch once and forks a rank, or a program, in milliseconds.

Each rank of a pool has its own server, started by exec, so that ranks differ in what real processes differ in: the hash
seed, the addresses of objects, and the modules imported before. A server is never forked from the test process and runs
one thread only, because otherwise forking from it is unsafe. The server and its children end when the test process
ends, however that happens.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK = 2.0


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when the thread that started it ends (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


class _ForkServer:
    def __init__(self, control: socket.socket, folder: str, kind: "Kind", *, parent: int) -> None:
        self.control = control
        self.folder = folder
        self.kind = kind
        self.parent = parent
        self.children: set[int] = set()
        self.selector = selectors.DefaultSelector()  # ``select`` itself refuses descriptors of 1024 and above
        self.wakeup, self.waker = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self.waker, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.waker)

    def run(self) -> None:
        self.send("ready")
        selector = self.selector
        selector.register(self.control, selectors.EVENT_READ)
        selector.register(self.wakeup, selectors.EVENT_READ)
        while True:
            readable = {key.fd for key, _ in selector.select(_PARENT_CHECK)}
            # The connection stays open if a process forked from the test process outlives the test process.
            if os.getppid() != self.parent:
                return
            if self.wakeup in readable:
                os.read(self.wakeup, 4096)
                self.reap()
            if self.control.fileno() in readable:
                message, files, _, _ = socket.recv_fds(self.control, 64, 3)
                if not message:
                    return
                self.fork(files)

    def send(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.control.sendall(text.encode() + b"\n")

    def reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self.children.discard(pid)
            self.send(f"ended {pid} {os.waitstatus_to_exitcode(status)}")

    def fork(self, files: list[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self.leave_server(parent)
                self.kind.become(files)
            finally:
                os._exit(70)
        for file in files:
            os.close(file)
        self.children.add(pid)
        self.send(f"forked {pid}")

    def leave_server(self, parent: int) -> None:
        # A session of its own lets the test process end it with all of its children.
        os.setsid()
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.control.close()
        self.selector.close()
        os.close(self.wakeup)
        os.close(self.waker)

    def end_children(self) -> None:
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the last server removes the common folder
            os.rmdir(os.path.dirname(self.folder))


class Kind(Protocol):
    """What a server's children are: a module with these functions."""

    def prepare(self, modules: Sequence[str]) -> None:
        """Imports what every child needs, and ``modules``, in the server."""

    def become(self, files: Sequence[int]) -> NoReturn:
        """Makes this process, which was just forked, the child that ``files`` describe."""


ROOM = "-"
"""Begin of an argument that only makes room in what ``/proc`` shows, which a forked program overwrites."""


def main(kind: str, control_file: int, folder: str, modules: list[str]) -> None:
    """Prepares for children of a ``Kind``, the module of that name, then forks them until the test process ends."""
    parent = os.getppid()  # read before the imports, which take seconds in which the parent may end
    control = socket.socket(fileno=control_file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    children: Kind = importlib.import_module(kind)
    children.prepare(modules)
    gc.collect()
    gc.freeze()
    server = _ForkServer(control, folder, children, parent=parent)
    try:
        server.run()
    finally:
        server.end_children()
    server.remove_folder()  # not after an error, whose message the test process reads there


def print_to(output: int) -> None:
    """Makes a file the standard output and error of this process, and closes its own descriptor."""
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], [name for name in sys.argv[4:] if not name.startswith(ROOM)])
