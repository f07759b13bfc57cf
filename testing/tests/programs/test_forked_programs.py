"""A forked program is to its test and to itself what one started by exec is, but for what was imported before it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_testing.programs.forked_program import can_serve, parse
from accel_testing.programs.forked_programs import ForkedPrograms
from accel_testing.programs.runs import Finished, forked_programs, launch_by, run_command, run_script, started_programs
from accel_testing.programs.sibling_forks import is_possible
from accel_testing.ranks.environment import rank_environment
from accel_testing.ranks.processes import lives

PRELOADED = "import sys; early = 'torch' in sys.modules\n"
DESCRIBES = """
import __main__, json, os, signal, sys, threading
print(json.dumps({
    "argv": sys.argv,
    "original": sys.orig_argv[1:],
    "path": sys.path[0],
    "file": __main__.__file__,
    "names": sorted(set(vars(__main__)) - {"json", "os", "signal", "sys", "threading"}),
    "folder": os.getcwd(),
    "variable": os.environ.get("OF_THIS_TEST"),
    "inherited": sorted(set(os.environ) & {"RANK", "TMPDIR", "OMP_NUM_THREADS"}),
    "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    "leader": os.getpid() == os.getpgid(0) == os.getsid(0),
    "descriptors": [os.path.exists(f"/proc/self/fd/{number}") for number in range(3, 20)],
    "input": sys.stdin.read(),
    "threads": [thread.name for thread in threading.enumerate()],
    "module": __main__.__name__,
    "ours": sorted(name for name in sys.modules if name.startswith("accel")),
}))
"""


@pytest.fixture(scope="module", autouse=True)
def _forking() -> Iterator[None]:
    """A fork server of this module's tests, whatever the option of this run is."""
    with forked_programs():
        yield


def both(path: Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[Finished, Finished]:
    """Runs of a script, forked and started by exec."""
    path.write_text(PRELOADED + path.read_text() + "\nassert early, 'not forked'\n")
    forked = run_script(path, *arguments, env=env)
    path.write_text(path.read_text().replace("\nassert early, 'not forked'\n", "\nassert not early\n"))
    with started_programs():
        return forked, run_script(path, *arguments, env=env)


def written(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


def test_it_finds_the_same_process(tmp_path: Path) -> None:
    forked, started = both(written(tmp_path, DESCRIBES), "--x", "é", env={"OF_THIS_TEST": "a\nb=c"})
    assert json.loads(forked.check().output) == json.loads(started.check().output)


@pytest.mark.parametrize(
    "end",
    [
        "raise ValueError('what went wrong')",
        "sys.exit(3)",
        "sys.exit('a message')",
        "sys.exit(300)",
        "raise KeyboardInterrupt",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os._exit(5)",
        "1 +",
    ],
)
@pytest.mark.sampled(2)
def test_it_ends_in_the_same_way(tmp_path: Path, end: str) -> None:
    path = written(tmp_path, f"import atexit\natexit.register(print, 'the exit handler')\n{end}")
    path.write_text(PRELOADED + path.read_text())
    forked = run_script(path)
    with started_programs():
        started = run_script(path)
    assert forked.status == started.status != 0
    assert forked.output == started.output


def test_threads_exit_handlers_and_destructors_run_in_the_interpreters_order(tmp_path: Path) -> None:
    text = """
import atexit, threading, time, weakref
class Destroyed:
    def __del__(self): print("the destructor")
class Finalized: pass
kept, object = Destroyed(), Finalized()
weakref.finalize(object, print, "the finalizer")
atexit.register(print, "the exit handler")
def work():
    time.sleep(0.2)
    print("the thread")
threading.Thread(target=work).start()
print("the last line")
"""
    forked, started = both(written(tmp_path, text))
    assert forked.check().output == started.check().output
    assert forked.output.splitlines() == [
        "the last line",
        "the thread",
        "the exit handler",
        "the finalizer",
        "the destructor",
    ]


def test_a_rank_that_a_launcher_forked_can_signal_its_main_thread(tmp_path: Path) -> None:
    """By pthread_kill, as preemption does: the C library has to know the number of the thread after the fork."""
    (tmp_path / "rank.py").write_text(
        "import os, signal, threading\n"
        "heard = threading.Event()\n"
        "signal.signal(signal.SIGUSR1, lambda *_: heard.set())\n"
        "main = threading.main_thread().ident\n"
        "thread = threading.Thread(target=lambda: signal.pthread_kill(main, signal.SIGUSR1))\n"
        "thread.start()\n"
        "thread.join()\n"
        "assert heard.wait(20)\n"
    )
    command = ["-m", "accel", "launch", "--cpu", "--num_processes", "2", str(tmp_path / "rank.py")]
    run_command([sys.executable, *command], timeout=60).check()


def test_each_program_draws_its_own_numbers(tmp_path: Path) -> None:
    text = (
        "import random, numpy, torch\n"
        "print(random.random(), numpy.random.rand(), torch.rand(1, dtype=float).item())\n"
        "torch.manual_seed(1); print('seeded', torch.rand(1).item())"
    )
    path = written(tmp_path, text)
    first, second = (run_script(path).check().output.split() for _ in range(2))
    assert first[3:] == second[3:]
    for one, other in zip(first[:3], second[:3], strict=True):
        assert one != other


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are found through /proc")
def test_its_processes_that_stay_behind_are_found_and_ended(tmp_path: Path) -> None:
    text = "import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(61)\nprint('parent')"
    done = run_script(written(tmp_path, PRELOADED + text + "\nassert early"))
    assert done.output == "parent\n"
    (orphan,) = done.orphans
    assert str(tmp_path / "program.py") in orphan


@pytest.mark.skipif(not is_possible(), reason="needs clone(2) by a number that is known for this machine")
@pytest.mark.parametrize("launcher", ["accel", "torchrun"])
def test_a_launcher_forks_its_ranks(tmp_path: Path, launcher: str) -> None:
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by nohup, which programs inherit
    text = f"hang_up = {'SIG_IGN' if ignored else 'SIG_DFL'!r}"
    text += """
import os, signal, sys
signals = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
assert signals == [signal.SIG_DFL, getattr(signal, hang_up), signal.default_int_handler], signals
print(os.environ["RANK"], os.getpid(), os.getppid(), early, sorted(name for name in sys.modules if name == "torch"))
import torch
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""
    done = launch_by(launcher, written(tmp_path, PRELOADED + text), ranks=2).check()
    ranks = sorted(line.split() for line in done.output.splitlines() if "['torch']" in line)
    assert [(line[0], line[3]) for line in ranks] == [("0", "True"), ("1", "True")]
    assert len({line[1] for line in ranks}) == 2, "each rank is a process"
    assert len({line[2] for line in ranks}) == 1, "of one launcher"


def test_the_exit_of_a_rank_reaches_its_launcher(tmp_path: Path) -> None:
    text = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('of rank 1')\ntime.sleep(60)"
    done = launch_by("accel", written(tmp_path, PRELOADED + text), ranks=2).check_failed()
    assert "ValueError: of rank 1" in done.output
    assert "forked_program.py" not in done.output


def test_variables_that_are_read_at_a_start_need_one(tmp_path: Path) -> None:
    path = written(tmp_path, PRELOADED + "import torch; print(early, torch.get_num_threads())")
    assert run_script(path, env={"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}).check().output == "False 2\n"
    assert run_script(path).check().output == "True 1\n"
    here = {"PATH": "a", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}
    assert can_serve(here, here | {"PATH": "b", "TORCHELASTIC_RUN_ID": "y"})
    for changed in ({"PYTHONHASHSEED": "1"}, {"TORCH_LOGS": "+all"}, {"OMP_NUM_THREADS": "2"}):
        assert not can_serve(here, here | changed)


def test_only_programs_of_this_python_are_forked() -> None:
    script = parse([sys.executable, "-u", "-P", "train.py", "-m", "x"])
    assert script is not None
    assert (script.target, script.arguments, script.is_module) == ("train.py", ("-m", "x"), False)
    module = parse([sys.executable, "-m", "accel", "launch"])
    assert module is not None
    assert module.is_launcher
    for command in (
        ["python", "train.py"],
        [sys.executable],
        [sys.executable, "-c", "1"],
        [sys.executable, "-O", "a.py"],
    ):
        assert parse(command) is None


def test_a_run_beside_another_one_starts_its_programs(tmp_path: Path) -> None:
    text = """
import pathlib, time
here, other = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
here.touch()
while not other.exists(): time.sleep(0.01)
print(early)
"""
    path = written(tmp_path, PRELOADED + text)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    outputs: list[str] = []
    thread = threading.Thread(target=lambda: outputs.append(run_script(path, first, second).output))
    thread.start()
    while not Path(first).exists():
        assert thread.is_alive()
        time.sleep(0.01)
    assert run_script(path, second, first).check().output == "False\n"
    thread.join()
    assert outputs == ["True\n"]


@pytest.mark.slow
def test_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = written(tmp_path, "print('here')")
    programs = ForkedPrograms()
    environment = rank_environment(os.environ)

    def run() -> int:
        with (tmp_path / "output").open("w") as output:
            program = programs.start([sys.executable, str(path)], environment, folder=".", output=output.fileno())
            assert program is not None
            return program.wait(60)

    try:
        assert run() == 0
        assert programs._server is not None
        os.kill(programs._server._process.pid, signal.SIGKILL)
        programs._server._process.wait()
        assert run() == 0
    finally:
        programs.close()


def test_a_program_ends_with_its_test_process(tmp_path: Path) -> None:
    path = written(
        tmp_path, f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    )
    test = f"""
import os, signal, sys
from accel_testing.programs.runs import forked_programs, run_script
with forked_programs():
    run_script({str(path)!r})
"""
    process = subprocess.Popen([sys.executable, "-c", test], start_new_session=True)
    try:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 20.0
    while lives(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.05)


@pytest.mark.slow
def test_marked_tests_start_their_programs_by_exec(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys, pytest\n"
        "from accel_testing import run_script\n"
        "def early(folder):\n"
        "    (folder / 'p.py').write_text(\"import sys; print('torch' in sys.modules)\")\n"
        "    return run_script(folder / 'p.py').check().output\n"
        "def test_forked(tmp_path): assert early(tmp_path) == 'True\\n'\n"
        "@pytest.mark.executed\n"
        "def test_executed(tmp_path): assert early(tmp_path) == 'False\\n'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", "base", "test_it.py"]
    assert "2 passed" in run_command([*command, "--programs", "fork"], cwd=tmp_path).check().output
    failed = run_command([*command, "--programs", "exec"], cwd=tmp_path).check_failed()
    assert "1 failed, 1 passed" in failed.output, "by exec without the option"
