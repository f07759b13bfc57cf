"""Runner that explains a script after two of its steps: ``python -m accel.observe.explain_script SCRIPT``.

Files of the project stay unchanged: the Accelerator of an explained script neither tracks, saves nor resumes.
"""

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from accel.accelerator import Accelerator
from accel.resilience.guard import PreemptionGuard
from accel_observe.tracking.trackers import Trackers

if TYPE_CHECKING:
    from accel_ckpt.io.storage import Location


@final
class _SeenEnough(BaseException):
    """Ends the script; not an ``Exception``, so that the script's own ``except Exception`` does not catch it."""


@final
class _Spectator:
    """Hook before ``backward``: counts communication from the start of the second window to that of the third."""

    def __init__(self) -> None:
        self._windows = 0
        self._ended = True
        self._stack = ExitStack()

    def before(self, accelerator: Accelerator) -> None:
        if self._ended:
            self._windows += 1
            if self._windows == 2:
                self._stack.enter_context(accelerator.count_communication())
            elif self._windows == 3:
                self.tell(accelerator)
                raise _SeenEnough
        self._ended = accelerator.sync_gradients

    def tell(self, accelerator: Accelerator) -> None:
        self._stack.close()
        told = accelerator.explain()
        own = tuple(row for row in told.settings if row[0] != "module")  # the setting that launched this module itself
        accelerator.print(replace(told, settings=own), flush=True)


@final
class _Silent:
    """Stands in for a profiler, or the object of a tracker's library: accepts every call and does nothing."""

    def __getattr__(self, name: str) -> "_Silent":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Silent":
        return self


@contextmanager
def _unprofiled(self: Accelerator, *args: Any, **kwargs: Any) -> Iterator[_Silent]:
    yield _Silent()


def _untracked(self: Accelerator, name: str, unwrap: bool = False) -> _Silent:
    return _Silent()


def _elsewhere(self: Accelerator, place: Any = None, *args: Any, **kwargs: Any) -> "Location":
    """Returns the folder that ``save_state`` and ``load_state`` return, without reading or writing."""
    from accel_ckpt.io.storage import locate

    return locate(place or str(self.project_dir or "."))


def _nothing(self: object, *args: Any, **kwargs: Any) -> None:
    """Does nothing instead of reading or writing."""


# Methods that read or write files of the project, and their replacements while a script is explained.
_WITHOUT_FILES: tuple[tuple[type, str, Callable[..., Any]], ...] = (
    *((Accelerator, name, _nothing) for name in ("init_trackers", "resume", "on_preemption", "save", "save_model")),
    *((Accelerator, name, _elsewhere) for name in ("save_state", "load_state")),
    (Accelerator, "profile", _unprofiled),
    (Accelerator, "get_tracker", _untracked),
    (PreemptionGuard, "listen_by_default", _nothing),
    (Trackers, "warn_untracked", _nothing),
)


def keep_files() -> None:
    """Makes the Accelerators of this process neither read nor write files of the project."""
    for kind, name, method in _WITHOUT_FILES:
        setattr(kind, name, method)


def main(words: list[str]) -> None:
    """Runs the script ``words[0]`` with the rest as its arguments."""
    spectator = _Spectator()
    backward = Accelerator.backward

    def watched(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        spectator.before(self)
        backward(self, *args, **kwargs)

    Accelerator.backward = watched  # type: ignore[method-assign]
    keep_files()
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).absolute().parent))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except _SeenEnough:
        from accel_state.session import Session

        session = Session.current()
        if session is not None:
            session.wait_for_everyone()
            session.close()
        return
    print(f"{words[0]} ended before two optimizer steps were taken, so there is nothing to explain", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
