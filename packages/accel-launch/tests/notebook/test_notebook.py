"""Functions on several processes from an interpreter, and from a cell of a real notebook run by a real kernel."""

import copy
import io
import linecache
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from accel import Accelerator, debug_launcher, notebook_launcher
from accel_launch.notebook.cell import Copier
from accel_launch.notebook.child_main import prefix_of
from accel_launch.notebook.environment import has_tpu, place_of, processes_for
from accel_launch.notebook.serialized_call import pack_call, pack_result, unpack_call, unpack_results
from accel_state.errors import ConfigError, LaunchError

nbclient = pytest.importorskip("nbclient")


def whoami(start: int) -> tuple[int, int, float, str]:
    from accel import Accelerator

    accelerator = Accelerator()
    total = accelerator.reduce(torch.tensor(float(start + accelerator.process_index)), "sum").item()
    print("hello from", accelerator.process_index)
    place = accelerator.process_index, accelerator.local_process_index, total, str(accelerator.device)
    accelerator.end_training()
    return place


def test_debug_launcher_gives_every_rank_its_place_and_returns_what_each_returned() -> None:
    said = io.StringIO()
    with redirect_stdout(said):
        assert debug_launcher(whoami, (10,)) == [(0, 0, 21.0, "cpu"), (1, 1, 21.0, "cpu")]
    assert sorted(said.getvalue().split("\n")) == ["", "hello from 0", "hello from 1"]


def test_the_first_failing_ranks_traceback_is_raised() -> None:
    def fails() -> None:
        if os.environ["RANK"] == "1":
            raise KeyError("the culprit")
        time.sleep(60)

    said = io.StringIO()
    with (
        redirect_stderr(said),
        pytest.raises(LaunchError, match=r"(?s)rank 1 of 2 failed first.*KeyError: 'the culprit'"),
    ):
        debug_launcher(fails)
    assert "culprit" not in said.getvalue(), "it is said once"


def test_one_process_is_this_one_and_takes_the_precision() -> None:
    kept: list[int] = []

    def here() -> str:
        from accel import Accelerator

        kept.append(os.getpid())
        accelerator = Accelerator(cpu=True)
        accelerator.end_training()
        return accelerator.mixed_precision

    assert notebook_launcher(here, num_processes=1, mixed_precision="bf16") == ["bf16"]
    assert kept == [os.getpid()]
    assert "ACCEL_CONFIG" not in os.environ


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixed_precision": "fp17"}, "fp17"),
        ({"num_nodes": 2, "node_rank": 2}, "node_rank is 2"),
        ({"rdzv_backend": "c10"}, "did you mean 'c10d'"),
        ({"use_port": "many"}, "many"),
    ],
)
def test_arguments_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        notebook_launcher(print, num_processes=2, **options)


def test_what_cannot_be_sent_is_refused_before_anything_starts() -> None:
    lock = threading.Lock()

    def holds() -> object:
        return lock

    with pytest.raises(LaunchError, match="holds cannot be sent to other processes"):
        debug_launcher(holds)

    def defaults(first: object = lock, second: int = 2, *, third: object = None) -> None: ...

    with pytest.raises(LaunchError, match="because of the default of first"):
        debug_launcher(defaults)
    defaults.__defaults__, defaults.__kwdefaults__ = None, {"third": lock}
    with pytest.raises(LaunchError, match="because of the default of third"):
        debug_launcher(defaults)


def test_an_accelerator_of_the_notebook_is_refused_by_the_name_of_its_variable() -> None:
    fresh = Accelerator(cpu=True)

    def prepare() -> None:
        fresh.prepare(torch.nn.Linear(1, 1))

    def train() -> None:
        prepare()

    for function, args, words in (
        (train, (), "fresh, which prepare uses"),
        (print, (fresh,), "argument 0"),
        (print, (fresh.state,), "argument 0"),
    ):
        with pytest.raises(LaunchError, match=rf"because of {words} .*belongs to the process that made it") as caught:
            notebook_launcher(function, args, num_processes=2)
        assert "inside" in str(caught.value)
    holder = {"accelerator": fresh}
    assert copy.deepcopy(holder)["accelerator"] is fresh
    fresh.end_training()


@pytest.mark.parametrize("args", [0.1, "cpu", {"lr": 0.1}])
def test_args_that_are_no_tuple_are_refused_with_the_tuple(args: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"({args!r},)")):
        notebook_launcher(print, args, num_processes=2)


def test_an_error_in_a_cell_is_shown_with_one_frame_of_the_launcher() -> None:
    pytest.importorskip("IPython")
    cells = [
        "from accel import debug_launcher, notebook_launcher",
        "debug_launcher(print, 0.1)",
        "notebook_launcher(print, 0.1)",
        "debug_launcher(int, ('word',))",
    ]
    code = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        f"shell = InteractiveShell()\nfor cell in {cells!r}: shell.run_cell(cell)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    text = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)
    assert text.count("ConfigError: args is 0.1; expected a tuple of the function's arguments: (0.1,)") == 2, text
    assert "invalid literal for int() with base 10: 'word'" in text
    assert text.count("launchers.py:") == 3, text


def test_the_source_of_a_cell_is_shown_in_tracebacks_of_its_processes() -> None:
    source = "def fails():\n    raise KeyError('the culprit')  # the line\n"
    linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(keepends=True), "<cell 1>")
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<cell 1>", "exec"), cell)
    with redirect_stderr(io.StringIO()), pytest.raises(LaunchError) as caught:
        debug_launcher(cell["fails"])
    assert "# the line" in str(caught.value)
    assert "notebook/worker.py" not in str(caught.value)


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, False),
        ({"TPU_NAME": "a"}, True),
        ({"PJRT_DEVICE": "tpu"}, True),
        ({"PJRT_DEVICE": "CPU"}, False),
        ({"PJRT_DEVICE": "TPU", "ACCELERATE_USE_CPU": "1"}, False),
    ],
)
def test_a_tpu_is_found_by_its_variables(env: Mapping[str, str], found: bool) -> None:
    assert has_tpu(env) is found


@pytest.mark.parametrize(
    ("env", "loaded", "place"),
    [
        ({}, (), "Python"),
        ({}, ("IPython", "ipykernel"), "Python"),  # installed and imported, and yet no kernel
        ({"KAGGLE_KEY": "a", "KAGGLE_USERNAME": "b"}, (), "Python"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, (), "Kaggle"),
        ({"COLAB_RELEASE_TAG": "release-colab"}, (), "Colab"),
        ({}, ("google.colab", "IPython"), "Colab"),
    ],
)
def test_the_place_of_an_interpreter_is_known(env: Mapping[str, str], loaded: tuple[str, ...], place: str) -> None:
    pytest.importorskip("IPython")
    assert place_of(env, loaded) == place


@pytest.mark.parametrize(
    ("wanted", "accelerators", "place", "count"),
    [
        (None, 0, "Jupyter", 1),
        (None, 2, "Kaggle", 2),
        (4, 0, "Jupyter", 4),
        (None, 1, "Colab", 1),
        (8, 1, "Colab", 1),
        (8, 0, "Colab", 1),
        (2, 2, "Colab", 2),
    ],
)
def test_the_number_of_processes_fits_the_place(wanted: int | None, accelerators: int, place: str, count: int) -> None:
    assert processes_for(wanted, place, lambda: accelerators) == count


@pytest.mark.skipif(torch.accelerator.device_count() > 1, reason="needs a machine with less than two accelerators")
def test_on_colab_without_a_second_gpu_the_function_is_called_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    assert notebook_launcher(os.getpid, num_processes=8) == [os.getpid()]
    assert "Colab offers no second GPU here: 1 process instead of 8" in capsys.readouterr().out


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="torch_xla is installed here")
def test_a_tpu_without_its_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_NAME", "a")
    with pytest.raises(LaunchError, match="torch_xla is not installed here"):
        notebook_launcher(print)


def test_a_parcel_holds_functions_tensors_and_classes_of_this_interpreter(tmp_path: Path) -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    pack_call(tmp_path, lambda value: Local(value + 1), (1,))
    before = list(sys.path)
    function, args = unpack_call(tmp_path)
    sys.path[:] = before
    pack_result(tmp_path, 0, {"object": function(*args), "tensor": torch.ones(2)})
    (back,) = unpack_results(tmp_path, [0])
    assert (back["object"].value, back["tensor"].tolist()) == (2, [1.0, 1.0])


def test_a_path_among_the_import_paths_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    pack_call(tmp_path, len, ("ab",))
    monkeypatch.setattr(sys, "path", sys.path[:-1])
    function, args = unpack_call(tmp_path)
    assert function(*args) == 2


def test_a_prefix_is_filled_in_as_torchrun_does() -> None:
    env = {"RANK": "3", "LOCAL_RANK": "1"}
    assert prefix_of("[${role_name}${rank}|${local_rank}]: ", env) == "[default3|1]: "


def test_progress_bars_reach_the_cell_as_they_come() -> None:
    reader, writer = os.pipe()
    said = io.StringIO()
    copier = Copier(os.fdopen(reader, "rb"), said, "accel launch: rank ")
    os.write(writer, "\r50 %é".encode())
    deadline = time.monotonic() + 30
    while "50 %" not in said.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert said.getvalue() == "\r50 %é"
    os.write(writer, b"\r100 %\naccel launch: rank 1 of 2 failed\nTraceback\n")
    os.close(writer)
    copier.close()
    assert said.getvalue() == "\r50 %é\r100 %\n"
    assert copier.kept == "accel launch: rank 1 of 2 failed\nTraceback\n"


SETUP = """
import torch
torch.ones(200, 200) @ torch.ones(200, 200)
factor = 3
class Answer:
    def __init__(self, rank): self.rank = rank
def train(start):
    import sys
    from accel import Accelerator
    accelerator = Accelerator()
    for step in range(3):
        print(f"\\rstep {step}", end="", file=sys.stderr, flush=True)
    total = accelerator.reduce(torch.tensor(float(accelerator.process_index + start) * factor), "sum").item()
    if accelerator.is_main_process: print("total", total)
    accelerator.end_training()
    return Answer(accelerator.process_index), total
"""
RUN = """
import os, sys
from accel import notebook_launcher
from accel_launch.notebook.environment import place_of
print("in", place_of(os.environ, sys.modules))
results = notebook_launcher(train, (1,), num_processes=2, mixed_precision="bf16")
print("back", [(isinstance(answer, Answer), answer.rank, total) for answer, total in results])
"""
FAIL = """
def fails():
    import os
    if os.environ["RANK"] == "1": 1 / 0
    import time; time.sleep(60)
try:
    notebook_launcher(fails, num_processes=2)
except Exception as error:
    print("caught", type(error).__name__, "rank 1 of 2 failed first" in str(error), "ZeroDivisionError" in str(error))
"""
INTERRUPT = """
import os, signal, threading, time, psutil
def waits():
    open(os.path.join(folder, os.environ["RANK"]), "w").close()
    time.sleep(300)
folder = __import__("tempfile").mkdtemp()
def interrupt():
    while len(os.listdir(folder)) < 2: time.sleep(0.05)
    assert os.getpgrp() == os.getpid()
    os.killpg(os.getpgrp(), signal.SIGINT)  # what Jupyter's button does
thread = threading.Thread(target=interrupt); thread.start()
try:
    notebook_launcher(waits, num_processes=2)
except KeyboardInterrupt:
    thread.join()
    print("interrupted", [child.name() for child in psutil.Process().children(recursive=True)])
__import__("shutil").rmtree(folder)
"""


def test_a_notebook_trains_on_two_processes_and_can_be_interrupted(tmp_path: Path) -> None:
    import nbformat

    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, RUN, FAIL, INTERRUPT)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    specs = tmp_path / "kernels" / "here"
    specs.mkdir(parents=True)
    (specs / "kernel.json").write_text(
        f'{{"argv": ["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"], '
        '"display_name": "here", "language": "python"}'
    )
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    manager = AsyncKernelManager(
        kernel_name="here", kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(specs.parent)])
    )
    client = nbclient.NotebookClient(notebook, km=manager, timeout=240)
    # A kernel whose manager is given is left running unless that is asked for.
    folders = {"IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    client.execute(cleanup_kc=True, cwd=str(tmp_path), env={**os.environ, **folders})
    said = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
    assert "in Jupyter" in said[1]
    assert "total 9.0" in said[1]
    assert "back [(True, 0, 9.0), (True, 1, 9.0)]" in said[1]
    assert "step 2" in said[1]
    assert said[2].strip() == "caught LaunchError True True"
    assert "interrupted []" in said[3]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
@pytest.mark.parametrize("hang_ups", ["SIG_DFL", "SIG_IGN"])
def test_processes_end_with_the_interpreter_that_started_them(tmp_path: Path, hang_ups: str) -> None:
    script = (
        "import os, signal, sys, time\n"
        f"signal.signal(signal.SIGHUP, signal.{hang_ups})\n"
        "from accel import debug_launcher\n"
        "def waits(folder):\n"
        "    open(os.path.join(folder, 'ready_' + os.environ['RANK']), 'w').close()\n"
        "    time.sleep(300)\n"
        "debug_launcher(waits, (sys.argv[1],))\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    started = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=env)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready_*"))) < 2 and time.monotonic() < deadline and started.poll() is None:
        time.sleep(0.05)
    family = psutil.Process(started.pid).children(recursive=True)
    assert len(family) >= 3
    started.send_signal(signal.SIGKILL)
    started.wait()
    _, left = psutil.wait_procs(family, timeout=120)
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
