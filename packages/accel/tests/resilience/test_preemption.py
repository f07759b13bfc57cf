"""What preemption promises, on real processes: saved at one step on all ranks in time, and nothing lost or repeated."""

import gc
import json
import os
import random
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, ProjectConfiguration
from accel.resilience.spot_notice import notice_at
from accel_launch.preemption.exit_status import PREEMPTED_STATUS
from accel_state.errors import ConfigError
from accel_testing import Finished, RankPool, run_command
from accel_testing.faults.faults import many_open_files

PROGRAM = Path(__file__).with_name("preempted_training.py")


def hear_signals() -> None:
    """Undoes what a suite started by nohup or in the background hands on: signals that are ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _heard() -> Any:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    hear_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def launched(folder: Path, *options: str, ranks: int = 2, after: float | None = None, **env: str) -> Finished:
    """One run of the program; ``after`` seconds from when it trains, its launcher is told to end."""
    folder.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "accel",
        "launch",
        "--cpu",
        "--num_processes",
        str(ranks),
        "--grace_period",
        "60",
        *options,
    ]
    command += [str(PROGRAM), str(folder)]
    if after is None:
        return run_command(command, timeout=240, env=env)
    for old in folder.glob("ready_*"):
        old.unlink()
    script = (
        "import pathlib, subprocess, signal, sys, time\n"
        "process = subprocess.Popen(sys.argv[3:])\n"
        "while not pathlib.Path(sys.argv[1], 'ready_0').exists() and process.poll() is None: time.sleep(0.005)\n"
        "time.sleep(float(sys.argv[2]))\n"
        "process.send_signal(signal.SIGTERM)\n"
        "sys.exit(process.wait())\n"
    )
    return run_command([sys.executable, "-c", script, str(folder), str(after), *command], timeout=240, env=env)


def resumed_at(run: Finished) -> list[int]:
    """The step at which each rank of a run began."""
    return [json.loads(line)["resumed"] for line in run.output.splitlines() if line.startswith('{"rank"')]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> dict[str, Any]:
    """What the program ends with on two ranks that nobody disturbs; ranks of the pool have all imported already."""
    folder = tmp_path_factory.mktemp("undisturbed")
    rank_pool.run(run_program, folder, variables={"TORCHELASTIC_RESTART_COUNT": "0"}, timeout=240)
    return result(folder)


def run_program(folder: Path) -> None:
    before, sys.argv = sys.argv, [str(PROGRAM), str(folder)]
    try:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    finally:
        sys.argv = before


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


# Each moment takes a launch.
MOMENTS = ("data", "saving", "evaluation", "loading")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("moments", [("saving",), pytest.param(MOMENTS, marks=pytest.mark.slow)])
def test_a_run_preempted_and_killed_again_and_again_ends_as_if_nothing_had_happened(
    tmp_path: Path, undisturbed: dict[str, Any], moments: tuple[str, ...]
) -> None:
    folder, done = tmp_path / "run", 0
    for moment in moments:
        run = launched(folder, MOMENT=moment)
        assert not run.orphans
        if moment == "loading":  # nothing has been done that could be saved, or lost
            assert run.status == 128 + signal.SIGTERM, run.output
            assert not resumed_at(run)
            continue
        assert run.status == PREEMPTED_STATUS, run.output
        assert "accel: received SIGTERM; saved" in run.output
        assert run.seconds < 59, "a read of 60 s was waited for"
        assert resumed_at(run) == [done] * 2
        done = int((folder / "done").read_text())
    run = launched(folder, "--max_restarts", "1", KILL="18").check()
    assert "rank 1 of 2 failed first" in run.output
    assert resumed_at(run) == [done] * 2 + [14] * 2
    assert result(folder) == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(10))
def test_sigterm_at_random_moments(seed: int, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """Five moments each: committed in time, at most one step lost, all ranks agree, and the same end."""
    draw, folder, done = random.Random(seed), tmp_path / "run", 0
    for _ in range(5):
        run = launched(folder, after=draw.uniform(0, 1.0), SLOW="0.1")
        before, done = done, int((folder / "done").read_text()) if (folder / "done").exists() else 0
        # Told before the first stop point or after end_training, a run ends at once: there is nothing to save.
        nothing_to_save = done == before or (folder / "result.json").exists()
        ended = {0, PREEMPTED_STATUS} | ({128 + signal.SIGTERM} if nothing_to_save else set())
        assert run.status in ended, (done, before, run.output)
        assert not run.orphans
        began = resumed_at(run)
        assert len(set(began)) == 1
        assert began[0] >= before - 1, f"{before} steps were done, {began[0]} were saved"
        if (folder / "result.json").exists():
            break  # it came too late: the run was over
    else:
        assert resumed_at(launched(folder).check())[0] >= done - 1
    assert result(folder) == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_goes_on_by_itself_when_one_worker_of_four_is_killed(tmp_path: Path) -> None:
    launched(tmp_path / "undisturbed", ranks=4).check()
    run = launched(tmp_path / "killed", "--max_restarts", "2", ranks=4, KILL="18").check()
    assert "rank 1 of 4 failed first" in run.output
    assert resumed_at(run) == [0] * 4 + [14] * 4
    assert run.seconds < 60
    assert result(tmp_path / "killed") == result(tmp_path / "undisturbed")


def prepared(folder: Path, *, named: bool = True) -> tuple[Accelerator, Any, Any]:
    """One process with something to train, and its loader."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=named)
    accelerator = Accelerator(cpu=True, project_config=project)
    data = torch.utils.data.TensorDataset(torch.arange(12.0).view(12, 1))
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), torch.utils.data.DataLoader(data, batch_size=2)
    )
    return accelerator, loader, lambda rows: (accelerator.backward(model(rows).sum()), optimizer.step())


def trained(loader: Any, step: Callable[[Any], object], *, then: Callable[[int], object]) -> int:
    """How many batches a loop got before the run ended, ``then`` called after each."""
    seen: list[int] = []

    def loop() -> None:
        for (rows,) in loader:
            step(rows)
            seen.append(1)
            then(len(seen))

    with pytest.raises(SystemExit) as ending:
        loop()
    assert ending.value.code == PREEMPTED_STATUS
    return len(seen)


def until_noticed(accelerator: Accelerator) -> None:
    deadline = time.monotonic() + 30
    while accelerator.preempted is None and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("files", [0, 1100])
def test_a_signal_ends_the_loop_after_the_step_it_came_in(tmp_path: Path, files: int) -> None:
    """Also in a process with so many open files that ``select.select`` refuses the next."""
    with many_open_files(files):
        accelerator, loader, step = prepared(tmp_path)

    def then(seen: int) -> None:
        if seen == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            until_noticed(accelerator)

    assert trained(loader, step, then=then) == 3
    accelerator.end_training()
    again, loader, _ = prepared(tmp_path)
    again.resume()
    assert [rows.flatten().tolist() for (rows,) in loader] == [[6.0, 7.0], [8.0, 9.0], [10.0, 11.0]]
    again.end_training()


@pytest.mark.parametrize("how", ["file", "check"])
def test_a_file_or_a_hook_ends_the_loop_too(how: str, tmp_path: Path) -> None:
    accelerator, loader, step = prepared(tmp_path / "project", named=False)
    called: list[str] = []
    told: dict[str, Any] = {
        "file": {"file": tmp_path / "end"},
        "check": {"check": lambda: "the cloud takes it back" if (tmp_path / "end").exists() else None},
    }[how]
    accelerator.on_preemption(lambda: called.append(str(accelerator.preempted)), every=0.02, **told)

    def then(seen: int) -> None:
        if seen == 2:
            (tmp_path / "end").touch()
            until_noticed(accelerator)

    assert trained(loader, step, then=then) == 2
    assert called == [{"file": f"{tmp_path / 'end'} exists", "check": "the cloud takes it back"}[how]]
    accelerator.end_training()


def test_signals_are_given_back_and_the_programs_own_handler_is_called_too(tmp_path: Path) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    own = signal.getsignal(signal.SIGTERM)
    accelerator, loader, step = prepared(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is own, "by default a program's own handler is left alone"
    accelerator.on_preemption(lambda: None)

    def then(seen: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        until_noticed(accelerator)

    assert trained(loader, step, then=then) == 1
    assert heard == [signal.SIGTERM]
    accelerator.end_training()
    assert signal.getsignal(signal.SIGTERM) is own
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_signal_of_a_forked_process_is_not_the_parents(tmp_path: Path) -> None:
    """Both have the pipe that wakes the listener, and a worker of a loader may be ended by SIGTERM."""
    accelerator, _, _ = prepared(tmp_path)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"1")
        time.sleep(30)
        os._exit(0)
    os.read(reader, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    time.sleep(0.2)
    assert accelerator.preempted is None
    accelerator.end_training()
    os.close(reader)
    os.close(writer)


def test_a_forked_process_that_drops_the_accelerator_leaves_the_parent_listening(tmp_path: Path) -> None:
    accelerator, loader, step = prepared(tmp_path)
    child = os.fork()
    if child == 0:
        accelerator.end_training()
        os._exit(0 if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else 1)
    assert os.waitpid(child, 0)[1] == 0

    def then(seen: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        until_noticed(accelerator)

    assert trained(loader, step, then=then) == 1
    accelerator.end_training()


def test_an_accelerator_that_is_dropped_stops_listening(tmp_path: Path) -> None:
    accelerator, _, _ = prepared(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    names = {thread.name for thread in threading.enumerate()}
    assert "accel-preemption" in names
    del accelerator, _
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert "accel-preemption" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "nowhere to save"),
        ({"action": print, "signals": ["SIGTREM"]}, "SIGTREM"),
        ({"action": print, "every": 0}, "every"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    accelerator, _, _ = prepared(tmp_path, named=False)
    with pytest.raises(ConfigError, match=words):
        accelerator.on_preemption(**options)


def test_resume_without_a_checkpoint_is_a_fresh_start(tmp_path: Path) -> None:
    accelerator, _, _ = prepared(tmp_path)
    assert accelerator.resume() is None
    saved = accelerator.save_state()
    assert accelerator.resume() == saved
    accelerator.end_training()


@pytest.fixture
def cloud() -> Any:
    """An address that answers as a cloud does, and what it says: a status and a text, which the test changes."""
    said: dict[str, Any] = {"status": 404, "text": ""}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said["flavour"] = self.headers.get("Metadata-Flavor")
            self.send_response(said["status"])
            self.end_headers()
            self.wfile.write(said["text"].encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/notice", said
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "text", "told"),
    [
        (404, "not found", False),
        (200, "", False),
        (200, "FALSE\n", False),
        (200, "NONE", False),
        (500, "TRUE", False),
        (200, "TRUE", True),
        (200, '{"action": "terminate"}', True),
    ],
)
def test_a_notice_at_an_address_is_told_from_none(status: int, text: str, told: bool, cloud: Any) -> None:
    url, said = cloud
    said.update(status=status, text=text)
    reason = notice_at(url, headers={"Metadata-Flavor": "Google"})()
    assert (reason is not None) is told
    assert said["flavour"] == "Google"
    if reason is not None:
        assert url in reason
        assert text in reason


def test_an_address_that_cannot_be_reached_gives_no_notice_and_a_wrong_one_is_refused() -> None:
    assert notice_at("http://127.0.0.1:1/notice")() is None
    with pytest.raises(ConfigError, match="begins with http"):
        notice_at("/etc/passwd")


def test_a_run_ends_when_an_address_says_so(tmp_path: Path, cloud: Any) -> None:
    accelerator, loader, step = prepared(tmp_path)
    url, said = cloud
    accelerator.on_preemption(check=notice_at(url), every=0.02)

    def then(seen: int) -> None:
        if seen == 2:
            said.update(status=200, text="TRUE")
            until_noticed(accelerator)

    assert trained(loader, step, then=then) == 2
    assert accelerator.resume() is not None
    accelerator.end_training()
