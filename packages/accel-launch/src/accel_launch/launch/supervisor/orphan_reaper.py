"""Cleanup process of a launcher that was killed: ends its processes' groups and removes its temporary folder."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import final

# Each input line is the full list of groups; the end of the input means that the launcher has ended.
_SCRIPT = """
trap '' HUP INT TERM
while read -r line; do groups=$line; done
for group in $groups; do kill -KILL "-$group" 2>/dev/null; done
rm -rf -- "$1"
"""


@final
class Guard:
    """A temporary folder and process groups that do not outlive this launcher, however it ends.

    A shell reads from a pipe whose other end only the launcher holds. Even SIGKILL closes that end, and the shell then
    kills the groups of the last line and removes the folder. Without a shell, a regular exit still cleans up.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="accel_launch_"))
        self._shell: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "accel-guard", str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )

    def __enter__(self) -> "Guard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._shell is not None:
            assert self._shell.stdin is not None
            with contextlib.suppress(OSError):
                self._shell.stdin.close()
            self._shell.wait()

    def watch(self, groups: Collection[int]) -> None:
        """Replaces the groups that end with the launcher."""
        if self._shell is not None:
            assert self._shell.stdin is not None
            with contextlib.suppress(OSError):
                os.write(self._shell.stdin.fileno(), f"{' '.join(map(str, groups))}\n".encode())
