"""Results of work on a rank, in a form that can be sent to the test process."""

import traceback
from pathlib import Path
from typing import Any

from accel_launch.notebook.pickle_by_value import dumps, loads
from accel_testing.ranks.wire import Answer, Outcome, TestCall


def judge(error: BaseException) -> Answer | None:
    """Answer for pytest's own outcomes, skip and xfail; None for any other exception."""
    import pytest

    outcomes: tuple[tuple[type[BaseException], Outcome], ...] = (
        (pytest.skip.Exception, "skipped"),
        (pytest.xfail.Exception, "xfailed"),
    )
    for kind, outcome in outcomes:
        if isinstance(error, kind):
            return Answer(outcome, reason=str(getattr(error, "msg", error)))
    return None


def report_failure(error: BaseException, *, style: TestCall | None, start: str | None) -> Answer:
    """Answer for an exception: the traceback from ``start``'s file on, in pytest's format for a test."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = (last[0].filename, last[0].lineno or 0) if last else ("", 0)
    reason, report = _one_line(error), _report(error, style=style, start=start)
    return Answer("failed", value=_pack_exception(error), reason=reason, report=report, place=place)


def _one_line(error: BaseException) -> str:
    text = str(error).strip()
    name = type(error).__name__
    return f"{name}: {text.splitlines()[0]}" if text else name


def _report(error: BaseException, *, style: TestCall | None, start: str | None) -> str:
    if style is None or start is None:
        return "".join(traceback.format_exception(error))
    import pytest

    info = pytest.ExceptionInfo.from_exception(error)
    cut = info.traceback.cut(path=Path(start))
    info.traceback = cut
    form: Any = {"auto": "long", "no": "line"}.get(style.style, style.style)
    try:
        return str(info.getrepr(style=form, showlocals=style.show_locals, chain=True))
    except Exception:  # a failing repr must not hide the failure
        return "".join(traceback.format_exception(error))


def _pack_exception(error: BaseException) -> bytes:
    """Pickles an exception without its traceback; empty if it cannot be rebuilt in the test process."""
    bare = error.with_traceback(None)
    bare.__cause__ = bare.__context__ = None
    try:
        data = dumps(bare)
        loads(data)
    except Exception:
        return b""
    return data
