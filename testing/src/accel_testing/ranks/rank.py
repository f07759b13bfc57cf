"""Main loop of a rank process: receives a job, opens its group, runs the work, answers, closes, and repeats."""

import faulthandler
import gc
import importlib
import io
import os
import random
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, final

from accel_launch.notebook.pickle_by_value import dumps, loads
from accel_testing.faults import leaks
from accel_testing.ranks.environment import rank_variables
from accel_testing.ranks.fork_server import print_to
from accel_testing.ranks.groups import enter_group, forget_groups, leave_group
from accel_testing.ranks.rewriting import import_source, rewriting_config
from accel_testing.ranks.stacks import DUMP_STACKS
from accel_testing.ranks.wire import Answer, Call, Closed, Job, TestCall

if TYPE_CHECKING:
    from accel_state import Session

# Seconds that a rank which has failed waits for the others when it leaves its group.
_PATIENCE = 5.0


def become(files: Sequence[int]) -> NoReturn:
    """Makes this process a rank of a pool: serves its connection, prints to a file, writes stacks to another one."""
    connection, output, stacks = files
    print_to(output)
    for text in (sys.stdout, sys.stderr):
        text.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    os.environ.pop("PYTHONHASHSEED", None)  # for this process only, not for programs that a test starts
    serve(connection, stacks)


def prepare(modules: Iterable[str] = ()) -> None:
    """Imports the modules that every job needs, and ``modules``, before the first job."""
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    rewriting_config()
    for name in modules:
        importlib.import_module(name)


def serve(connection_file: int, stacks_file: int) -> NoReturn:
    """Runs jobs until the test process closes the connection; never returns."""
    connection = Connection(connection_file)
    stacks: TextIO = os.fdopen(stacks_file, "w")
    stacks.write(f"{threading.get_ident():#018x}\n")
    stacks.flush()
    faulthandler.register(DUMP_STACKS, file=stacks, all_threads=True, chain=False)
    _serve(connection)
    # Skips destructors: threads of a group that a test left open must neither keep nor crash the process.
    os._exit(0)


def _serve(connection: Connection) -> None:
    while True:
        try:
            job = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        _empty_output()
        with ExitStack() as stack:
            stack.enter_context(_restored_process())
            os.environ.update(rank_variables(job.rank, job.world_size, job.port))
            _set_variables(job.variables)
            os.chdir(job.folder)
            work = _RankWork(job)
            connection.send(work.answer())
            try:
                connection.recv()
            except (EOFError, ConnectionResetError):
                return
            found = work.leaks()
            work.leave()
        _flush()
        connection.send(Closed(tuple(found)))
        forget_groups()
        # Excludes the objects that exist now (mostly modules) from the next garbage collections.
        gc.freeze()


@final
class _RankWork:
    """One job on this rank, with its open group."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._session: Session | None = None  # referenced here, because an open session is otherwise not kept alive
        self._before = leaks.snapshot(job.checks)

    def answer(self) -> Answer:
        """Opens the group, runs the work, and returns the answer."""
        try:
            return self._run()
        finally:
            gc.collect()
            _flush()

    def leaks(self) -> list[str]:
        """Leaks of the work; the group and its watchdog belong to the harness."""
        return leaks.settled_differences(self._before, group_expected=self._job.backend is not None)

    def leave(self, *, patience: float | None = None) -> None:
        """Leaves the group, waiting at most ``patience`` seconds (None: without limit)."""
        leave_group(patience=patience)
        self._session = None

    def _run(self) -> Answer:
        from accel_testing.ranks.result import judge, report_failure

        job = self._job
        style = job.work if isinstance(job.work, TestCall) else None
        start: str | None = None
        try:
            sys.path[:] = job.search_path
            module = import_source(job.source) if job.source else None
            self._session = enter_group(job)
            self._before = leaks.snapshot(job.checks)
            start = module.__file__ if module else None
            return Answer("passed", value=dumps(_call(job, module)))
        except BaseException as error:
            answer = judge(error) or report_failure(error, style=style, start=start)
            if job.backend is not None:
                # Other ranks may wait for this rank in a collective, which fails once its connections are closed.
                self.leave(patience=_PATIENCE)
            del error
            return answer


def _call(job: Job, module: ModuleType | None) -> Any:
    if isinstance(job.work, Call):
        fn, args, kwargs = loads(job.work.payload)
        return fn(*args, **kwargs)
    assert module is not None
    return _call_test(job, job.work, module)


def _call_test(job: Job, test: TestCall, module: ModuleType) -> None:
    import pytest

    *owners, name = test.qualname.split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part)
    arguments: dict[str, Any] = loads(test.payload)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        rewriting_config().filter_warnings(test.warning_filters)
        stack.enter_context(rewriting_config().explained_comparisons())
        if owners:
            owner = owner()
        function = getattr(owner, name)
        if owners and hasattr(owner, "setup_method"):
            _call_xunit(owner.setup_method, function)
        if owners and hasattr(owner, "teardown_method"):
            stack.callback(_call_xunit, owner.teardown_method, function)
        if "rank" in test.made_in_rank:
            arguments["rank"] = job.rank
        if "world_size" in test.made_in_rank:
            arguments["world_size"] = job.world_size
        if "monkeypatch" in test.made_in_rank:
            arguments["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
        function(**arguments)


def _call_xunit(method: Any, function: Any) -> None:
    import inspect

    if inspect.signature(method).parameters:
        method(function)
    else:
        method()


@contextmanager
def _restored_process() -> Iterator[None]:
    """Restores the process after every job: variables, working directory, torch's modes and its ``linear``.

    DeepSpeed's stage 3 replaces that function until its group is left. A library that a later job imported meanwhile,
    torchao for example, would know the replacement only.
    """
    import torch

    environment, folder, path = dict(os.environ), Path.cwd(), list(sys.path)
    dtype, determinism = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    device, linear = torch.get_default_device(), torch.nn.functional.linear
    torch.manual_seed(0)
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:] = path
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:  # in torch 2.9 a default of None breaks get_default_device
            torch.set_default_device(None)
        if torch.are_deterministic_algorithms_enabled() != determinism:  # the import that this needs takes a second
            torch.use_deterministic_algorithms(determinism)
        torch.nn.functional.linear = linear
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _empty_output() -> None:
    """Truncates the output of the last job; the file is in append mode, so writing continues at its start."""
    _flush()
    os.ftruncate(1, 0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOBase):
            stream.flush()
