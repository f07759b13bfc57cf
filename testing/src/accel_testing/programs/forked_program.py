"""Program of Python in a process that was forked after torch had been imported.

The process becomes what ``python script.py`` or ``python -m module`` would be: arguments, variables, folder, signal
handlers, the main module, and the interpreter's own end with its exit handlers. A launcher that runs this way forks its
ranks, too, so that each process has the parent, the id and the exit status that it has under exec. It differs from a
started program in what was imported before it, and in the hash seed, which it has from the process that it is forked
from.
"""

import atexit
import builtins
import ctypes
import importlib
import inspect
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, NoReturn, final

from accel_testing.programs.sibling_forks import SiblingForks, is_possible
from accel_testing.ranks.fork_server import print_to

#: Modules that start ranks by ``subprocess.Popen``.
_LAUNCHERS = ("accel", "torch.distributed.run")
#: Installed scripts, beside this Python, that run a module.
_SCRIPTS = {"accel": "accel", "torchrun": "torch.distributed.run"}
_OURS = "accel"
_OPTIONS = ("-P", "-u")
# Variables that Python, torch or a library that torch loads reads once, at its start.
_READ_AT_START = (
    "PYTHON",
    "TORCH",
    "PYTORCH",
    "OMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS",
    "LD_",
    "CUDA",
    "MALLOC_",
    "LC_",
    "LANG",
)
_READ_LATER = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR")


@final
@dataclass(frozen=True, slots=True)
class PythonProgram:
    """A script or module with its arguments, and the options of the interpreter."""

    target: str
    arguments: tuple[str, ...]
    is_module: bool
    options: frozenset[str]

    @property
    def is_launcher(self) -> bool:
        """Whether its own processes are programs of Python that should be forked, too."""
        return self.is_module and self.target in _LAUNCHERS

    def run(self) -> None:
        """Runs the program as the main module of this process."""
        sys.argv = [self.target, *self.arguments]
        main = ModuleType("__main__")
        # The module stays in place until the interpreter exits, because exit handlers and pickling look it up.
        sys.modules["__main__"] = main
        safe_path = "-P" in self.options or bool(os.environ.get("PYTHONSAFEPATH"))
        if self.is_module:
            if not safe_path:
                sys.path.insert(0, os.getcwd())
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            return
        if not safe_path:
            sys.path.insert(0, os.path.dirname(os.path.realpath(self.target)))
        with open(self.target, "rb") as file:
            code = compile(file.read(), self.target, "exec")
        main.__dict__.update(__file__=self.target, __builtins__=builtins, __cached__=None, __annotations__={})
        exec(code, main.__dict__)


def parse(command: Sequence[str | os.PathLike[str]]) -> PythonProgram | None:
    """Program that a command runs in this Python; None for other commands, other options and ``python -c``."""
    executable, *words = (os.fspath(word) for word in command)
    options = set()
    if module := _SCRIPTS.get(os.path.basename(executable)):
        is_ours = os.path.dirname(executable) == os.path.dirname(sys.executable)
        return PythonProgram(module, tuple(words), is_module=True, options=frozenset()) if is_ours else None
    if executable != sys.executable:
        return None
    while words and words[0] in _OPTIONS:
        options.add(words.pop(0))
    match words:
        case ["-m", name, *arguments]:
            return PythonProgram(name, tuple(arguments), is_module=True, options=frozenset(options))
        case [path, *arguments] if path.endswith(".py"):
            return PythonProgram(path, tuple(arguments), is_module=False, options=frozenset(options))
    return None


def can_serve(here: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a process that was started with ``here`` can be one with the variables ``wanted``."""

    def fixed(variables: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in variables.items()
            if name.startswith(_READ_AT_START) and not name.startswith(_READ_LATER)
        }

    return fixed(here) == fixed(wanted)


def prepare(modules: Sequence[str]) -> None:
    """Imports ``modules`` in a fork server."""
    for name in modules:
        importlib.import_module(name)


def become(files: Sequence[int]) -> NoReturn:
    """Makes this process, a child of a fork server, the program of a request; it prints to the second file."""
    request, output = files
    print_to(output)
    with os.fdopen(request, "rb") as file:
        command, environment, folder = json.load(file)
    become_command(command, environment, folder)


def _run(program: PythonProgram, command: Sequence[str], environment: Mapping[str, str], folder: str) -> NoReturn:
    os.environ.clear()
    os.environ.update(environment)
    _show(command, environment)
    os.chdir(folder)
    _reset_signals()
    tempfile.tempdir = None
    for library in ("numpy.random", "torch"):
        if (module := sys.modules.get(library)) is not None:
            module.seed()  # otherwise each program draws what the others draw
    for name in [name for name in sys.modules if name.partition("_")[0].partition(".")[0] == _OURS]:
        del sys.modules[name]  # what is tested is imported anew
    atexit.register(_spare, [module for name, module in sys.modules.items() if _is_library(name)])
    sys.orig_argv = [*command]
    if "-u" in program.options:
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper)
            stream.reconfigure(write_through=True)
    if program.is_launcher and is_possible():
        fork_children(environment)
    try:
        program.run()
    except SystemExit as error:
        _exit(error.code)
    except KeyboardInterrupt as error:
        _report(error)
        _end_by(signal.SIGINT)
    except BaseException as error:
        _report(error)
        _exit(1)
    _exit(0)


def fork_children(environment: Mapping[str, str]) -> None:
    """Makes ``subprocess.Popen`` fork the programs of Python that a fork of this process can become."""
    start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    parameters = inspect.signature(start)
    forks = SiblingForks(become_command)

    def execute_child(process: Any, *args: Any, **kwargs: Any) -> None:
        given = parameters.bind(process, *args, **kwargs).arguments
        command = given["args"]
        wanted = os.environ if given["env"] is None else given["env"]
        plain = not given["shell"] and given["preexec_fn"] is None and not given["pass_fds"]
        if not plain or isinstance(command, str) or parse(command) is None or not can_serve(environment, wanted):
            start(process, *args, **kwargs)
            return
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        try:
            process.pid = forks.fork(
                [os.fspath(word) for word in command],
                wanted,
                os.fspath(given["cwd"] or os.getcwd()),
                streams=[number if stream == -1 else stream for number, stream in enumerate(streams)],
                new_session=given["start_new_session"],
            )
        except OSError:  # for example where a container forbids the call
            start(process, *args, **kwargs)
            return
        process._child_created = True
        process._close_pipe_fds(*(given[name] for name in _PIPES))

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def become_command(command: Sequence[str], environment: Mapping[str, str], folder: str) -> NoReturn:
    """Makes this process, which was just forked, what ``command`` would start.

    Raises:
        AssertionError: ``parse`` refuses the command.
    """
    program = parse(command)
    assert program is not None, command
    _run(program, command, environment, folder)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Writes the command and the variables to where ``/proc`` reads them (Linux), so that orphans are found by them."""
    if sys.platform != "linux":
        return
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    # proc(5): fields 48 to 51, of which the first after the name is the third.
    arguments, arguments_end, variables, variables_end = (int(field) for field in fields[45:49])
    _write(arguments, arguments_end, [*command])
    _write(variables, variables_end, [f"{name}={value}" for name, value in environment.items()])


def _write(start: int, end: int, words: Sequence[str]) -> None:
    """Writes as many of the words as there is room for, each with a zero byte after it; fills the rest with zeros."""
    text = b""
    for word in map(os.fsencode, words):
        if len(text) + len(word) + 1 > end - start:
            break
        text += word + b"\0"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _is_library(name: str) -> bool:
    return name.partition(".")[0] not in sys.stdlib_module_names and name != "__main__"


def _spare(modules: Sequence[ModuleType]) -> None:
    """Excludes modules that were imported before the fork from the interpreter's end, which takes 0.3 s for torch.

    The program's own modules and objects are destroyed as usual, after all other exit handlers.
    """
    for module in modules:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
    spared = {id(module) for module in modules}
    for name in [name for name, module in sys.modules.items() if id(module) in spared]:
        del sys.modules[name]


def _report(error: BaseException) -> None:
    """Reports an exception as the interpreter does, without the frames of this module."""
    error.__traceback__ = _program_part(error.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.excepthook(type(error), error, error.__traceback__)


def _program_part(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _exit(code: object) -> NoReturn:
    """Ends the interpreter as ``sys.exit(code)`` does at the top of a program, whatever frames there are below."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    status = code if isinstance(code, int) else 0 if code is None else 1
    ctypes.pythonapi.Py_Exit(status)
    raise AssertionError("Py_Exit does not return")


def _end_by(number: signal.Signals) -> NoReturn:
    """Ends the process by a signal, after its threads and exit handlers."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(1)
