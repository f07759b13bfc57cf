"""Runs of scripts end in time, keep their output, and show which processes they left."""

import signal
import sys
from pathlib import Path

import pytest

from accel_testing.programs.runs import launch, run_command, run_script


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_ranks_have_torchruns_variables(tmp_path: Path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR"
    path = script(tmp_path, f"import os, sys; print(*[os.environ[n] for n in {names!r}.split()], *sys.argv[1:])")
    done = run_script(path, "--x", ranks=2).check()
    assert done.outputs == ("0 0 2 2 127.0.0.1 --x\n", "1 1 2 2 127.0.0.1 --x\n")


def test_commands_with_variables_of_their_own_run_side_by_side(tmp_path: Path) -> None:
    text = "until [ -e $OTHER ]; do touch $OWN; sleep 0.01; done; touch $OWN; echo $OWN"
    seats = [{"OWN": "a", "OTHER": "b"}, {"OWN": "b", "OTHER": "a"}]
    assert run_command(["sh", "-c", text], env=seats, cwd=tmp_path).check().outputs == ("a\n", "b\n")


def test_failing_rank_is_named_with_its_output(tmp_path: Path) -> None:
    path = script(tmp_path, "import os, sys; print('said this'); sys.exit(3 * int(os.environ['RANK']))")
    done = run_script(path, ranks=2)
    assert done.status == 3
    with pytest.raises(AssertionError, match=r"(?s)rank 1 ended with exit status 3.*output of rank 1 ---\nsaid this"):
        done.check()
    done.check_failed()


def test_success_is_no_failure(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="where a failure was expected"):
        run_script(script(tmp_path, "")).check_failed()


def test_hanging_run_is_killed(tmp_path: Path) -> None:
    path = script(tmp_path, "import time; print('on', flush=True); time.sleep(120)")
    for seconds in (0.5, 5.0, 50.0):  # which is the first in which this machine comes to say it
        done = run_script(path, timeout=seconds)
        assert done.timed_out
        if done.output:
            break
    assert done.output == "on\n"
    with pytest.raises(AssertionError, match="so it was killed"):
        done.check_failed()


def test_interrupt_is_sent(tmp_path: Path) -> None:
    text = "import time\ntry: print('on', flush=True); time.sleep(120)\nexcept KeyboardInterrupt: print('stopped')"
    for seconds in (0.5, 5.0, 50.0):
        done = run_command([sys.executable, script(tmp_path, text)], interrupt_after=seconds, interrupt=signal.SIGINT)
        if done.output.startswith("on\n"):  # else it was not there yet to hear it
            break
    assert done.check().output == "on\nstopped\n"


def test_an_interrupt_that_this_process_ignores_reaches_a_program(tmp_path: Path) -> None:
    path = script(tmp_path, "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a suite that a shell has started with &
    try:
        done = run_command([sys.executable, path])
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.check().output == "True\n"


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are found through /proc")
def test_orphan_is_named_and_ended(tmp_path: Path) -> None:
    sleeper = "import time; time.sleep(61)"
    path = script(
        tmp_path,
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {sleeper!r}], start_new_session=True)\n"
        "print(p.pid)",
    )
    done = run_script(path)
    with pytest.raises(AssertionError, match=r"process \d+ \(.*time.sleep\(61\)\) stayed behind"):
        done.check()
    assert (
        not Path(f"/proc/{int(done.output)}/cmdline").exists()
        or not Path(f"/proc/{int(done.output)}/cmdline").read_bytes()
    )


def test_scripts_run_under_accel_launch(tmp_path: Path) -> None:
    path = script(tmp_path, "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    done = launch(path, options=["--num_processes", "2", "--cpu"]).check()
    assert "rank 0 of 2" in done.output
    assert "rank 1 of 2" in done.output
