"""Main module of each process that a launcher supervises: ends with its launcher, and records its error in a file.

    python -P -m accel_launch.launch.child_main {script|module|command|compat-script|compat-module} TARGET [ARGS]...

With ``compat-``, the program's ``import accelerate`` is accel, by the distribution accel-compat.

The program runs as the main module, as if Python had started it. An uncaught exception is written to the launcher's
error file (in torch elastic's format, so its own tools read it too) and not printed here, so that the launcher prints
the first one once instead of all of them at the same time. ``sys.exit`` is recorded there too, because other ranks may
be waiting for this one.
"""

import contextlib
import importlib
import json
import os
import runpy
import sys
import sysconfig
import time
import traceback
from collections.abc import Mapping
from functools import partial
from io import TextIOWrapper
from types import ModuleType, TracebackType

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
LAUNCHER_VARIABLE = "ACCEL_LAUNCHER_PID"
WORKER_MODULE, COMMAND = "accel_launch.launch.child_main", "command"
COMPAT = "compat-"
_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def main(argv: list[str]) -> None:
    """Runs ``argv`` (kind, target, arguments) in this process."""
    kind, target, *arguments = argv
    end_with_launcher()
    if kind == COMMAND:
        _become_command([target, *arguments])
    import faulthandler

    faulthandler.enable()
    process = os.getpid()
    sys.excepthook = partial(record_exception, process)
    sys.argv = [target, *arguments]
    _write_whole_lines(sys.stdout)
    _write_whole_lines(sys.stderr)
    try:
        if kind.startswith(COMPAT):
            importlib.import_module("accel.compat").install()
        {"script": run_script, "module": run_module}[kind.removeprefix(COMPAT)](target)
    except SystemExit as error:
        if os.getpid() == process:
            _record_exit(error)
        raise
    if os.getpid() == process:
        _record_exit(None)


def end_with_launcher() -> None:
    """Makes the kernel kill this process when its launcher ends."""
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    end_with_parent(None if launcher is None else int(launcher))


def end_with_parent(launcher: int | None) -> None:
    """Makes the kernel kill this process when its parent ends for any reason (Linux, prctl(2)).

    The parent is process ``launcher``, if that is given; exits if the parent has ended already.
    """
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if launcher is not None and os.getppid() != launcher:
        sys.exit(f"the launcher (process {launcher}) ended before this process began")


def record_exception(
    process: int, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Writes an exception that ends ``process`` to the launcher's error file; prints it if that fails.

    A forked child inherits this hook; its exit is not that of the rank, so it prints its errors as usual.
    """
    if issubclass(kind, KeyboardInterrupt):
        return  # the launcher, which forwarded the interrupt, reports it once
    error.__traceback__ = _program_part(trace)
    text = "".join(traceback.format_exception(error))
    path = os.environ.get(ERROR_FILE_VARIABLE)
    from accel_state.errors import is_relayed

    try:
        if not path or os.getpid() != process:
            raise OSError("the file is not for this process")
        _write_error(path, _summary(error), text, {"relayed": is_relayed(error)})
    except OSError:
        sys.stderr.write(text)


def _record_exit(error: SystemExit | None) -> None:
    """Records the exit of a program that called ``sys.exit``: a failure only due to its status or other ranks."""
    summary, status = "after the last line of the program", 0
    if error is not None:
        status = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
        summary = f"sys.exit({'' if error.code is None else repr(error.code)}){_place(error.__traceback__)}"
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if path:
        with contextlib.suppress(OSError):
            _write_error(path, summary, "", {"exit": status})


def _place(trace: TracebackType | None) -> str:
    """Last line of the program itself in a traceback, as `` at FILE:LINE``."""
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    place = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and not file.startswith(("<", *libraries)):
            place = f" at {file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _summary(error: BaseException) -> str:
    """First line of the message with its type, without the additions of a SyntaxError or of notes."""
    lines = traceback.format_exception_only(error)
    return next(line for line in lines if not line.startswith(" ")).strip().splitlines()[0]


def _write_whole_lines(stream: object) -> None:
    """Makes the stream line-buffered: a crash loses no line, and ranks' lines do not mix, despite PYTHONUNBUFFERED."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(line_buffering=True, write_through=False)


def _write_error(path: str, summary: str, text: str, facts: Mapping[str, int]) -> None:
    now = time.time()
    extra = {"py_callstack": text, "timestamp": str(int(now)), "seconds": now, "pid": os.getpid(), **facts}
    staged = f"{path}.{os.getpid()}"
    with open(staged, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": summary, "extraInfo": extra}}, file)
    os.replace(staged, path)


def _program_part(trace: TracebackType | None) -> TracebackType | None:
    notebook = os.path.join(os.path.dirname(os.path.dirname(__file__)), "notebook", "child_main.py")
    ours = {__file__, notebook, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def run_script(path: str) -> None:
    """Runs a file, or a folder with a __main__.py, as the main module; ``sys.path`` begins with its folder."""
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    if os.path.isdir(path):  # a folder with a __main__.py
        runpy.run_path(path, run_name="__main__")
        return
    path = os.path.abspath(path)
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    # The module stays in place until the interpreter exits, because exit handlers and pickling look it up.
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)


def run_module(name: str) -> None:
    """Runs a module as the main module; ``sys.path`` begins with the current folder."""
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _become_command(argv: list[str]) -> None:
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"cannot run {argv[0]!r}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
