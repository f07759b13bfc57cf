"""``python -m accel.explained_script SCRIPT ...``: runs a script until its steps have been seen, and explains them."""

import runpy
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final

from accel.accelerator import Accelerator


@final
class _SeenEnough(BaseException):
    """Ends the script: no ``except Exception`` of its own stops that."""


@final
class _Spectator:
    """Stands before ``backward``: counts what is sent from the first one of the second window to that of the third."""

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
        accelerator.print(accelerator.explain(), flush=True)


def main(words: list[str]) -> None:
    """Runs the script ``words[0]`` with the rest as its arguments."""
    spectator = _Spectator()
    backward = Accelerator.backward

    def watched(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        spectator.before(self)
        backward(self, *args, **kwargs)

    Accelerator.backward = watched  # type: ignore[method-assign]
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
