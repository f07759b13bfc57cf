"""Fork server of one rank: imports torch once and forks the rank, and its replacements, in milliseconds.

Each rank of a pool has its own server, started by exec, so that ranks differ in what real processes differ in: the hash
seed, the addresses of objects, and the modules imported before. A server is never forked from the test process and runs
one thread only, because otherwise forking from it is unsafe. The server and its rank end when the test process ends,
however that happens.
"""

import contextlib
import ctypes
import faulthandler
import gc
import os
import selectors
import shutil
import signal
import socket
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK = 2.0


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when the thread that started it ends (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


class _ForkServer:
    def __init__(self, control: socket.socket, folder: str, serve: Callable[[int, int], None], *, parent: int) -> None:
        self.control = control
        self.folder = folder
        self.serve = serve
        self.parent = parent
        self.ranks: set[int] = set()
        self.wakeup, self.waker = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self.waker, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.waker)

    def run(self) -> None:
        self.send("ready")
        selector = selectors.DefaultSelector()  # ``select`` itself refuses descriptors of 1024 and above
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
        while self.ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self.ranks.discard(pid)
            self.send(f"ended {pid} {os.waitstatus_to_exitcode(status)}")

    def fork(self, files: list[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self.become_rank(files, parent)
            finally:
                os._exit(70)
        for file in files:
            os.close(file)
        self.ranks.add(pid)
        self.send(f"forked {pid}")

    def become_rank(self, files: list[int], parent: int) -> None:
        # A session of its own lets the test process end it with all of its children.
        os.setsid()
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.control.close()
        os.close(self.wakeup)
        os.close(self.waker)
        connection, output, stacks = files
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        for text in (sys.stdout, sys.stderr):
            text.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        faulthandler.enable()
        os.environ.pop("PYTHONHASHSEED", None)  # for this process only, not for programs that a test starts
        self.serve(connection, stacks)

    def end_ranks(self) -> None:
        for pid in self.ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the last server removes the common folder
            os.rmdir(os.path.dirname(self.folder))


def main(control_file: int, folder: str, modules: list[str]) -> None:
    """Imports the modules that the rank needs, then forks ranks on request until the test process ends."""
    parent = os.getppid()  # read before the imports, which take seconds in which the parent may end
    control = socket.socket(fileno=control_file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    from accel_testing.ranks.rank import serve, warm

    warm(modules)
    gc.collect()
    gc.freeze()
    server = _ForkServer(control, folder, serve, parent=parent)
    try:
        server.run()
    finally:
        server.end_ranks()
    server.remove_folder()  # not after an error, whose message the test process reads there


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
