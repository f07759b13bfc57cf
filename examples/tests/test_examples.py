"""Every example runs on one process and on two, and does what it is there to show."""

import ast
import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_testing import assert_close_state, assert_equal_state
from accel_testing.programs.runs import launch

EXAMPLES = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with accelerators, too, these tests are about processes and not about devices."""
    monkeypatch.setenv("ACCEL_CPU", "true")


@pytest.fixture
def run(rank_pool) -> Callable[..., list[Any]]:
    """Runs an example's main function; what it returned, by rank."""

    def example(name: str, *arguments: object, ranks: int = 1) -> list[Any]:
        return rank_pool.run(call_main, str(EXAMPLES / name), [str(word) for word in arguments], ranks=ranks)

    return example


def call_main(script: str, arguments: list[str]) -> Any:
    return runpy.run_path(script)["main"](arguments)


def test_every_example_is_tested_and_small() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {"classification.py", "elastic.py", "gan.py", "language_model.py", "own_loop.py", "resume.py"}
    assert all(len((EXAMPLES / name).read_text().splitlines()) < 90 for name in names)


@pytest.mark.parametrize("ranks", [1, 2])
def test_classification_counts_every_test_sample_once(run, ranks: int) -> None:
    results = run("classification.py", "--epochs", 4, ranks=ranks)
    assert results == [results[0]] * ranks
    accuracy, count = results[0]
    assert count == 501
    assert accuracy > 0.9


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_has_the_weights_of_an_undisturbed_one(run, tmp_path: Path, ranks: int) -> None:
    undisturbed = run("resume.py", "--folder", tmp_path / "a", ranks=ranks)
    run("resume.py", "--folder", tmp_path / "b", "--stop_after", 21, ranks=ranks)
    resumed = run("resume.py", "--folder", tmp_path / "b", ranks=ranks)
    for before, after in zip(undisturbed, resumed, strict=True):
        assert_equal_state(after, before)


def test_tokens_weigh_the_same_wherever_they_are(run) -> None:
    (mean, expected), *_ = run("language_model.py", "--epochs", 1, "--batch_size", 16, "--accumulate", 1)
    assert mean < 4.0
    for ranks in (1, 2):
        results = run("language_model.py", "--epochs", 1, "--batch_size", 4, "--accumulate", 4 // ranks, ranks=ranks)
        for other_mean, weights in results:
            assert other_mean == pytest.approx(mean, rel=1e-5)
            assert_close_state(weights, expected, rtol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.sampled(1)
def test_the_generator_learns_where_the_numbers_are(run, ranks: int) -> None:
    for mean, spread in run("gan.py", ranks=ranks):
        assert abs(mean - 3.0) < 0.5
        assert 0.2 < spread < 0.9


def test_a_run_moves_to_more_processes_and_ends_with_the_same_weights(run, tmp_path: Path) -> None:
    (expected,) = run("elastic.py", "--folder", tmp_path / "a")
    run("elastic.py", "--folder", tmp_path / "b", "--stop_after", 10)
    for weights in run("elastic.py", "--folder", tmp_path / "b", ranks=3):
        assert_close_state(weights, expected, rtol=1e-10)


def test_layers_work_in_a_loop_of_ones_own(run, tmp_path: Path) -> None:
    (expected,) = run("own_loop.py", "--folder", tmp_path / "a")
    run("own_loop.py", "--folder", tmp_path / "b", "--stop_after", 25)
    for weights in run("own_loop.py", "--folder", tmp_path / "b", ranks=2):
        assert_close_state(weights, expected, rtol=1e-10)


def test_a_loop_of_ones_own_needs_no_accelerator() -> None:
    tree = ast.parse((EXAMPLES / "own_loop.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name.startswith("accel")} == {"accel_ckpt", "accel_data", "accel_state"}


@pytest.mark.slow
@pytest.mark.fault
def test_a_killed_run_goes_on_by_itself(tmp_path: Path) -> None:
    fault = tmp_path / "killed_once.py"
    fault.write_text(
        "import os, runpy, sys\n"
        "from accel_testing import injected\n"
        "first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "fault = 'kill before call 20 of torch.optim:AdamW.step on rank 1' if first else 'delay(0) at os:getpid'\n"
        f"sys.argv[0] = {str(EXAMPLES / 'resume.py')!r}\n"
        "with injected(fault):\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    options = ["--num_processes", "2", "--max_restarts", "1", "--main_process_port", "0"]
    finished = launch(fault, "--folder", str(tmp_path / "run"), options=options, cwd=tmp_path).check()
    assert f"killed by {signal.SIGKILL.name}" in finished.output
    assert "resuming after step 16" in finished.output
    assert "stopped after step 50" in finished.output
