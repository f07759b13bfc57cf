"""What ``accel launch`` promises, on real processes: one first traceback, the exit status, restarts, no orphan."""

import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from accel_testing.ranks.launchers import free_port

LAUNCH = [sys.executable, "-m", "accel", "launch"]
SHOW = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
print(json.dumps({"argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0],
                  "config": json.loads(os.environ["ACCEL_CONFIG"])["values"],
                  **{name: os.environ.get(name) for name in names}}))
"""
ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
if dist.get_rank() == 0:
    print("attempt", attempt, "sum", total.item(), flush=True)
if attempt < int(os.environ.get("FAILURES", "0")):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(total)
dist.destroy_process_group()
"""
SLEEP = """
import os, sys, time
open(f"ready_{os.environ['RANK']}", "w").close()
time.sleep(600)
"""


def clean_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("ACCEL", "OMP_", "TORCHELASTIC"))}
    return own | dict(extra or {})


def launch(
    folder: Path, *argv: str, script: str = SHOW, env: Mapping[str, str] | None = None, timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    return subprocess.run(
        [*LAUNCH, *argv], cwd=folder, env=clean_env(env), capture_output=True, text=True, timeout=timeout
    )


def shown(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    assert done.returncode == 0, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda row: str(row["RANK"]))


def hear_signals() -> None:
    """Undoes what a suite started by nohup or in the background hands on: signals that are ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def take_terminal() -> None:
    """Makes the standard input, a terminal, the one whose keys this process and its group hear."""
    hear_signals()
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def wait_for(file: Path, process: subprocess.Popen[str] | None = None) -> None:
    """Waits until the file is there; the process that is to make it must not have ended."""
    deadline = time.monotonic() + 200
    while not file.exists():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"nobody made {file}"
        time.sleep(0.01)


@contextmanager
def started(
    folder: Path, *argv: str, script: str = SLEEP, ranks: int = 2, terminal: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A launch whose ranks have all begun, in a terminal if one is given; what is left of it at the end is killed."""
    (folder / "script.py").write_text(script)
    process = subprocess.Popen(
        [*LAUNCH, *argv],
        cwd=folder,
        env=clean_env({"TMPDIR": str(folder)}),
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_signals if terminal is None else take_terminal,
    )
    try:
        for rank in range(ranks):
            wait_for(folder / f"ready_{rank}", process)
        yield process
    finally:
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for child in left:
            child.kill()
        process.kill()
        process.communicate()


def processes_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """What a launcher has started, and that in turn; without the shell that cleans up after it."""
    children = psutil.Process(launcher.pid).children(recursive=True)
    return [child for child in children if "accel-guard" not in child.cmdline()]


def survivors(children: list[psutil.Process], seconds: float = 60.0) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(children, timeout=seconds)
    return [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


def test_every_process_learns_its_place_and_runs_the_script_as_main(tmp_path: Path) -> None:
    rows = shown(launch(tmp_path, "--num-processes", "2", "script.py", "--lr", "1", "--cpu"))
    script = str(tmp_path / "script.py")
    assert [(row["RANK"], row["LOCAL_RANK"], row["WORLD_SIZE"]) for row in rows] == [("0", "0", "2"), ("1", "1", "2")]
    assert [row["argv"] for row in rows] == [["script.py", "--lr", "1", "--cpu"]] * 2
    assert [(row["name"], row["file"], row["path"]) for row in rows] == [("__main__", script, str(tmp_path))] * 2
    assert rows[0]["MASTER_PORT"] == rows[1]["MASTER_PORT"] != "0"


def test_the_script_receives_the_resolved_settings(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("mixed_precision: bf16\nseed: 1\n")
    argv = ["--config_file", "mine.yaml", "--num_processes=2", "--gradient-accumulation-steps", "4", "script.py"]
    (row, _) = shown(launch(tmp_path, *argv, env={"ACCEL_SEED": "2"}))
    assert row["config"] == {"mixed_precision": "bf16", "seed": 2, "num_processes": 2, "gradient_accumulation_steps": 4}


def test_settings_of_an_outer_launcher_do_not_reach_an_inner_one(tmp_path: Path) -> None:
    document = {"values": {"num_processes": 4}, "origins": {"num_processes": ["flag", "--num_processes"]}}
    rows = shown(launch(tmp_path, "--cpu", "script.py", env={"ACCEL_CONFIG": json.dumps(document), "RANK": "3"}))
    assert [(row["RANK"], row["WORLD_SIZE"]) for row in rows] == [("0", "1")]


@pytest.mark.parametrize("count", ["1", "2"])
@pytest.mark.parametrize(
    ("argv", "seen"),
    [(["script.py"], "script.py"), (["-m", "pkg.tool"], "tool.py"), (["--no_python", "./run.sh"], "sh")],
)
def test_scripts_modules_and_commands_are_run(count: str, argv: list[str], seen: str, tmp_path: Path) -> None:
    source = "import sys; print(sys.argv[0].rpartition('/')[2], *sys.argv[1:])"
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "tool.py").write_text(source)
    (tmp_path / "run.sh").write_text('#!/bin/sh\necho sh "$@"\n')
    (tmp_path / "run.sh").chmod(0o755)
    done = launch(tmp_path, "--num_processes", count, *argv, "--flag", script=source)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{seen} --flag"] * int(count)


def test_one_process_is_the_launcher_itself(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os; print(os.getpid())")
    process = subprocess.Popen([*LAUNCH, "--cpu", "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert int(process.communicate(timeout=200)[0]) == process.pid


def test_classes_of_the_script_can_be_pickled_and_spawned(tmp_path: Path) -> None:
    script = """
import multiprocessing, pickle
class Thing: pass
def double(x): return 2 * x
if __name__ == "__main__":
    assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [21])[0])
"""
    done = launch(tmp_path, "--num_processes", "2", "script.py", script=script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n42\n", "")


def test_dry_run_prints_every_process_and_starts_none(tmp_path: Path) -> None:
    argv = ["--num_processes", "2", "--dry-run", "--main_process_port", "29777", "script.py", "a b"]
    script = "open('ran', 'w')"
    data = json.loads(launch(tmp_path, "--json", *argv, script=script).stdout)
    text = launch(tmp_path, *argv, script=script).stdout
    assert [process["env"]["RANK"] for process in data["processes"]] == ["0", "1"]
    assert data["processes"][0]["argv"][-2:] == ["script.py", "a b"]
    assert "RANK=1" in text
    assert "script.py 'a b'" in text
    assert not (tmp_path / "ran").exists()


def test_the_environment_of_a_dry_run_is_the_one_that_a_run_has(tmp_path: Path) -> None:
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    argv = ["--num_processes", "2", "--seed", "3", "script.py"]
    planned = json.loads(launch(tmp_path, "--dry_run", "--json", *argv, script=script).stdout)["processes"]
    real = {row["RANK"]: row for row in map(json.loads, launch(tmp_path, *argv, script=script).stdout.splitlines())}
    assert len(planned) == 2
    for process in planned:
        assert process["env"].items() <= real[process["env"]["RANK"]].items()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num_processes", "0", "script.py"], "at least 1"),
        (["--num_processes", "2", "scrip.py"], "did you mean script.py?"),
        (["--num_processes", "2", "absent/train.py"], "there is no script"),
        (["-m", "no_such_module"], "there is no module 'no_such_module'"),
        (["-m", "script.py"], "name the module script"),
        ([], "no program to launch"),
        (["--num_proceses", "2", "script.py"], "did you mean --num_processes?"),
        (["--main_process_port", "70000", "script.py"], "0 to 65535"),
        (["--num_machines", "2", "--machine_rank", "2", "script.py"], "expected 0 to 1"),
        (["--multi_gpu", "--cpu", "script.py"], "cpu and multi_gpu"),
        (["--config_file", "absent.yaml", "script.py"], "absent.yaml"),
        (["--config_file", "bad.yaml", "script.py"], "bad.yaml:1: unknown key 'sede'; did you mean seed?"),
        (["--mixed_precision", "bf61", "script.py"], "nearest that works: bf16"),
        (["--cpu", "--no_python", "./absent"], "./absent"),
        (["--num_processes", "2", "--no_python", "./absent"], "./absent"),
        (["--num_processes", "2", "--log_dir", "script.py/logs", "script.py"], "log_dir"),
    ],
)
@pytest.mark.sampled(4)
def test_bad_input_is_refused_within_seconds(argv: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("sede: 3\n")
    done = launch(tmp_path, *argv, timeout=60)
    assert done.returncode not in (0, None)
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_more_processes_than_accelerators_are_refused(tmp_path: Path) -> None:
    import torch

    count = torch.accelerator.device_count()
    done = launch(tmp_path, "--multi_gpu", "--num_processes", str(count + 2), "script.py")
    assert done.returncode == 2
    assert "accelerator" in done.stderr


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = busy.getsockname()[1]
        done = launch(tmp_path, "--num_processes", "2", "--main_process_port", str(port), "script.py")
    assert done.returncode == 2
    assert f"main_process_port {port}" in done.stderr
    assert "0 takes a free port" in done.stderr


# The second failure begins once the first is written down, and the first process ends once the second's is.
FIRST = """
import atexit, os, sys, time
def wait_for_error_of(rank):
    folder = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
    while not os.path.exists(os.path.join(folder, f"error_{rank}.json")):
        time.sleep(0.001)
if os.environ["RANK"] == "1":
    if sys.argv[1] == "fails":
        atexit.register(wait_for_error_of, 0)
    raise ValueError("the cause")
if sys.argv[1] == "waits":
    time.sleep(600)
wait_for_error_of(1)
raise RuntimeError("a consequence")
"""


@pytest.mark.parametrize("other", ["waits", "fails"])
def test_the_first_traceback_is_printed_last_and_once(other: str, tmp_path: Path) -> None:
    done = launch(tmp_path, "--num_processes", "2", "script.py", other, script=FIRST)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.rstrip().endswith("ValueError: the cause")
    assert "rank 1 of 2 failed first" in done.stderr
    assert ("rank 0 then failed too" in done.stderr) == (other == "fails")
    assert "exit status 1" in done.stderr or "stopped after its error" in done.stderr
    assert "accel/launch" not in done.stderr


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("os.kill(os.getpid(), 9)", 137, "SIGKILL"),
        pytest.param("raise SystemExit(7)", 7, "exit status 7", marks=pytest.mark.slow),
        pytest.param("sys.exit('in words')", 1, "in words", marks=pytest.mark.slow),
        pytest.param("os._exit(9)", 9, "exit status 9", marks=pytest.mark.slow),
        pytest.param("import ctypes; ctypes.string_at(0)", 139, "SIGSEGV", marks=pytest.mark.slow),
        pytest.param("x = (", 1, "SyntaxError", marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_end_is_passed_on(code: str, status: int, words: str, tmp_path: Path) -> None:
    script = f"import os, sys, time\nif os.environ['RANK'] == '0': time.sleep(600)\n{code}\n"
    done = launch(tmp_path, "--num_processes", "2", "script.py", script=script)
    assert done.returncode == status
    assert words in done.stderr


def test_a_rank_that_fails_and_then_hangs_does_not_hold_the_others(tmp_path: Path) -> None:
    script = """
import os, threading, time
if os.environ["RANK"] == "1":
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise ValueError("the cause")
time.sleep(600)
"""
    done = launch(tmp_path, "--num_processes", "2", "--grace_period", "1s", "script.py", script=script)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: the cause")


def test_output_is_prefixed_and_logged_by_rank(tmp_path: Path) -> None:
    script = """
import os, sys
print("out", os.environ["RANK"]); print("bar 1", end="\\r"); print("half", end="", flush=True)
print("err", os.environ["RANK"], file=sys.stderr)
if os.environ["RANK"] == "1":
    while not os.path.exists("printed"): pass
    raise ValueError("boom")
open("printed", "w").close()
"""
    done = launch(tmp_path, "--num_processes", "2", "--prefix_output", "--log_dir", "logs", "script.py", script=script)
    assert {"[rank 0] out 0", "[rank 1] out 1", "[rank 0] bar 1", "[rank 1] half"} <= set(done.stdout.splitlines())
    assert "[rank 1] err 1" in done.stderr
    log = (tmp_path / "logs" / "attempt_0" / "rank_1.log").read_text().splitlines()
    # Lines of one stream are in their order; which of two streams comes first at the end is a matter of speed.
    assert log.index("out 1") < log.index("bar 1") < log.index("half")
    assert log.index("err 1") < log.index("ValueError: boom")


def test_a_forked_child_that_fails_does_not_fail_its_rank(tmp_path: Path) -> None:
    script = """
import os
child = os.fork()
if child == 0: raise ValueError("only the child")
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
"""
    done = launch(tmp_path, "--num_processes", "2", "script.py", script=script)
    assert done.returncode == 0
    assert done.stderr.count("ValueError: only the child") == 2


def test_processes_go_on_when_nobody_reads_their_output_any_more(tmp_path: Path) -> None:
    script = "for line in range(20000): print('x' * 100)\nopen(f'done_{__import__(\"os\").environ[\"RANK\"]}', 'w')"
    (tmp_path / "script.py").write_text(script)
    argv = [*LAUNCH, "--num_processes", "2", "--prefix_output", "script.py"]
    process = subprocess.Popen(argv, cwd=tmp_path, env=clean_env(), stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(100)
    process.stdout.close()
    assert process.wait(timeout=200) == 0
    assert {path.name for path in tmp_path.glob("done_*")} == {"done_0", "done_1"}


def test_processes_meet_and_reduce(tmp_path: Path) -> None:
    done = launch(tmp_path, "--num_processes", "2", "script.py", script=ALL_REDUCE)
    assert (done.returncode, done.stdout) == (0, "attempt 0 sum 3.0\n"), done.stderr


def restarted(folder: Path, count: int, *argv: str) -> None:
    done = launch(
        folder,
        *("--num_processes", "2", "--max_restarts", str(count), *argv, "script.py"),
        script=ALL_REDUCE,
        env={"FAILURES": str(count)},
        timeout=200 + 40 * count,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"attempt {attempt} sum 3.0" for attempt in range(count + 1)]
    assert done.stderr.count("killed by SIGKILL") == count


def test_a_killed_rank_leads_to_a_restart_that_works(tmp_path: Path) -> None:
    restarted(tmp_path, 1)


@pytest.mark.slow
def test_restarts_work_on_one_port_too(tmp_path: Path) -> None:
    restarted(tmp_path, 1, "--main_process_port", str(free_port()))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_restarts_all_work(tmp_path: Path) -> None:
    restarted(tmp_path, 20)


def test_when_the_restarts_are_used_up_the_status_is_passed_on(tmp_path: Path) -> None:
    script = "import os, sys; print('try', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True); sys.exit(5)"
    done = launch(tmp_path, "--num_processes", "1", "--max_restarts", "2", "script.py", script=script)
    assert done.returncode == 5
    assert done.stdout.splitlines() == ["try 0", "try 1", "try 2"]
    assert "restart 2 of 2" in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.sampled(1)
def test_a_signal_ends_all_processes_within_seconds(number: signal.Signals, status: int, tmp_path: Path) -> None:
    with started(tmp_path, "--num_processes", "2", "--grace_period", "60", "script.py") as process:
        children = processes_of(process)
        begin = time.monotonic()
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert time.monotonic() - begin < 30
    assert process.returncode == status
    assert number.name in stderr
    assert "Traceback" not in stderr
    assert len(children) == 2
    assert survivors(children) == []


def test_ctrl_c_in_a_terminal_ends_all_processes(tmp_path: Path) -> None:
    keyboard, terminal = pty.openpty()
    try:
        with started(tmp_path, "--num_processes", "2", "script.py", terminal=terminal) as process:
            children = processes_of(process)
            os.write(keyboard, b"\x03")
            _, stderr = process.communicate(timeout=60)
    finally:
        os.close(terminal)
        os.close(keyboard)
    assert process.returncode == 130
    assert "SIGINT" in stderr
    assert "Traceback" not in stderr
    assert len(children) == 2
    assert survivors(children) == []


LISTEN = """
import os, signal, subprocess, sys
def told(number, frame):
    helper.kill()
    os.write(1, f"rank {os.environ['RANK']} heard {signal.Signals(number).name}\\n".encode())
    sys.exit(0)
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
signal.signal(signal.SIGUSR1, told)
open(f"ready_{os.environ['RANK']}", "w").close()
helper.wait()
sys.exit("its helper was signalled too")
"""


def test_a_signal_that_means_something_to_the_processes_alone_is_passed_on_to_them(tmp_path: Path) -> None:
    """Slurm's ``--signal=USR1`` reaches the launcher; it must neither end by it nor signal the loaders' workers."""
    with started(tmp_path, "--num_processes", "2", "script.py", script=LISTEN) as process:
        process.send_signal(signal.SIGUSR1)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert sorted(stdout.splitlines()) == [f"rank {rank} heard SIGUSR1" for rank in range(2)]


STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
signal.signal(signal.SIGTERM, lambda *_: open(f"heard_{os.environ['RANK']}", "w").close())
"""


@pytest.mark.parametrize("impatient", [False, True])
def test_processes_that_ignore_signals_are_killed_with_their_children(impatient: bool, tmp_path: Path) -> None:
    argv = ["--num_processes", "2", "--grace_period", "300s" if impatient else "0.5", "script.py"]
    with started(tmp_path, *argv, script=STUBBORN + SLEEP) as process:
        children = processes_of(process)
        process.terminate()
        if impatient:
            wait_for(tmp_path / "heard_1")  # signals that come together are one
            process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 143
    assert len(children) == 4
    assert survivors(children) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_the_death_of_the_launcher_ends_its_processes(tmp_path: Path) -> None:
    with started(tmp_path, "--num_processes", "2", "script.py") as process:
        children = processes_of(process)
        process.kill()
        process.communicate(timeout=60)
    assert len(children) == 2
    assert survivors(children) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_a_killed_launcher_leaves_no_folder_and_no_children_of_its_processes(tmp_path: Path) -> None:
    with started(tmp_path, "--num_processes", "2", "script.py", script=STUBBORN + SLEEP) as process:
        children = processes_of(process)
        folders = list(tmp_path.glob("accel_launch_*"))
        process.kill()
        process.communicate(timeout=60)
    assert len(children) == 4
    assert len(folders) == 1
    assert survivors(children) == []
    deadline = time.monotonic() + 60
    while folders[0].exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_a_failed_rank_left_running_is_ended(tmp_path: Path) -> None:
    script = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
os._exit(3)
"""
    done = launch(tmp_path, "--num_processes", "2", "script.py", script=script)
    assert done.returncode == 3
    pids = [int(line) for line in done.stdout.split()]
    assert pids
    assert survivors([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]) == []


@contextmanager
def machines(
    folder: Path, *argv: str, script: str, env: Mapping[str, str] | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """The launchers of two machines, which here are one."""
    (folder / "script.py").write_text(script)
    shared = ["--cpu", "--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    shared += ["--main_process_port", str(free_port()), *argv]
    made = [
        subprocess.Popen(
            [*LAUNCH, *shared, "--machine_rank", rank, "script.py"],
            cwd=folder,
            env=clean_env(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        yield made
    finally:
        for process in made:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_two_machines_form_one_job_and_restart_together(tmp_path: Path) -> None:
    with machines(tmp_path, "--max_restarts", "1", script=ALL_REDUCE, env={"FAILURES": "1"}) as made:
        outputs = [process.communicate(timeout=200) for process in made]
    assert [process.returncode for process in made] == [0, 0], outputs
    assert outputs[0][0].splitlines() == ["attempt 0 sum 3.0", "attempt 1 sum 3.0"]


@pytest.mark.slow
@pytest.mark.parametrize("preempted", [0, 1])
def test_a_run_of_which_one_machine_is_preempted_ends_on_both(preempted: int, tmp_path: Path) -> None:
    """The ranks agree on where to stop, all save, and end with 75; the other machine's take a little longer."""
    script = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: open("saved", "w").close())
open("ready_" + os.environ["RANK"], "w").close()
while not os.path.exists("saved"): time.sleep(0.02)
if os.environ["RANK"] != os.environ["PREEMPTED"]: time.sleep(1)
sys.exit(75)
"""
    with machines(tmp_path, script=script, env={"PREEMPTED": str(preempted)}) as made:
        for rank, process in enumerate(made):
            wait_for(tmp_path / f"ready_{rank}", process)
        made[preempted].terminate()
        said = [process.communicate(timeout=20)[1] for process in made]
    assert [process.returncode for process in made] == [75, 75], said
    assert all("1 processes have saved and ended" in text for text in said)


@pytest.mark.slow
def test_a_failure_on_one_machine_ends_the_job_on_the_other(tmp_path: Path) -> None:
    script = """
import os, time
if os.environ["RANK"] == "1": raise ValueError("the cause")
time.sleep(600)
"""
    with machines(tmp_path, script=script) as made:
        (_, zero), (_, one) = [process.communicate(timeout=200) for process in made]
    assert [process.returncode for process in made] == [1, 1]
    assert one.rstrip().endswith("ValueError: the cause")
    assert "rank 1 failed on machine 1" in zero


def test_a_machine_that_finds_nobody_says_so(tmp_path: Path) -> None:
    argv = ["--num_machines", "2", "--machine_rank", "1", "--num_processes", "2", "--cpu", "--join_timeout", "0.5"]
    done = launch(
        tmp_path, *argv, "--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port()), "script.py"
    )
    assert done.returncode == 2
    assert "nobody listens at 127.0.0.1" in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def foreign_server(kind: str) -> Iterator[int]:
    """The port of something that is no launcher: it listens and is silent, answers as HTTP, or has another store."""
    with ExitStack() as stack:
        if kind == "store":
            from torch.distributed import TCPStore

            store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            yield store.port
            return
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        if kind == "http":

            def answer() -> None:
                with suppress(OSError):
                    while True:
                        connection, _ = server.accept()
                        with connection:
                            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

            thread = threading.Thread(target=answer)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown, socket.SHUT_RDWR)
        yield server.getsockname()[1]


def join_line(port: int, patience: str) -> list[str]:
    argv = ["--cpu", "--num_machines", "2", "--machine_rank", "1", "--num_processes", "2", "--join_timeout", patience]
    return [*argv, "--main_process_ip", "127.0.0.1", "--main_process_port", str(port), "script.py"]


@pytest.mark.parametrize(
    "kind",
    [pytest.param("silent", marks=pytest.mark.slow), "http", pytest.param("store", marks=pytest.mark.slow)],
)
def test_a_foreign_answer_at_the_rendezvous_is_one_line_after_join_timeout(kind: str, tmp_path: Path) -> None:
    with foreign_server(kind) as port:
        done = launch(tmp_path, *join_line(port, "2s"), timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"what answers at 127.0.0.1:{port} is no launcher of machine 0" in line
    assert "after 2 s (join_timeout)" in line


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_meets_something_foreign_can_be_ended(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SHOW)
    with foreign_server("silent") as port:
        process = subprocess.Popen(
            [*LAUNCH, *join_line(port, "10m")],
            cwd=tmp_path,
            env=clean_env(),
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=hear_signals,
        )
        assert process.stderr is not None
        assert "what answers at" in process.stderr.readline()  # it says for what it waits
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        said = process.communicate(timeout=20)[1]
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number
        assert f"ended by {number.name}" in said
    assert survivors(children) == []


def test_a_flag_of_the_launcher_after_the_script_gets_a_note(tmp_path: Path) -> None:
    done = launch(tmp_path, "--cpu", "script.py", "--num-processes", "2", "--lr=1", "--mixed_precision", "bf16")
    (row,) = shown(done)
    assert row["argv"] == ["script.py", "--num-processes", "2", "--lr=1", "--mixed_precision", "bf16"]
    (note,) = done.stderr.splitlines()
    assert note.startswith("accel launch: note: --num-processes stands after script.py, so the script gets it")
