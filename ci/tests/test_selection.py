"""Selection of tests: samples of heavy repetitions and of tests in ranks, and a tenth of the slow ones."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_slow(number): pass

@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("kind", ["one", pytest.param("other", marks=pytest.mark.slow)])
def test_repeated(kind, number): pass

@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", [pytest.param(one, marks=[pytest.mark.slow] * (one % 4 > 0)) for one in range(80)])
def test_ranks(number): pass

@pytest.mark.ranks(2)
def test_other_ranks(): pass

@pytest.mark.ranks(2, group=False)
def test_ranks_without_group(): pass
"""


@pytest.fixture
def collected(tmp_path: Path):
    """The tests that pytest selects with options, in a workspace of two packages under the root's ``conftest.py``."""
    shutil.copy(ROOT / "conftest.py", tmp_path)
    for package in ("first", "second"):
        (tmp_path / "packages" / package / "tests").mkdir(parents=True)
        (tmp_path / "packages" / package / "tests" / "test_things.py").write_text(TESTS)

    def collect(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-c", os.devnull, "--rootdir", ".", *options]
        command += ["--import-mode=importlib", "-p", "no:cacheprovider", "packages"]
        # The plugins of the libraries around us import torch, which takes longer than all that is tested here.
        env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        if done.returncode == pytest.ExitCode.USAGE_ERROR:
            raise ValueError(done.stderr)
        return [line for line in done.stdout.splitlines() if "::" in line]

    return collect


def test_a_tenth_is_of_the_slow_tests_and_shares_none_with_another(collected) -> None:
    first, second, today = (collected(f"--slow-tenth={value}") for value in ("0", "9", "today"))
    assert first
    assert not {*first} & {*second}
    chosen = {name.partition("[")[0].partition("::")[2] for name in (*first, *second, *today)}
    assert chosen == {"test_slow", "test_repeated", "test_ranks"}


def test_all_repetitions_but_a_sample_are_slow(collected) -> None:
    quick, slow = ([name for name in collected("-m", marker) if "repeated" in name] for marker in ("not slow", "slow"))
    assert (len(quick), len(slow)) == (2 * 3, 2 * 17)
    assert all("[one-" in name or "-one]" in name for name in quick)


@pytest.mark.parametrize("value", ["12", ""])
def test_other_tenths_are_refused(collected, value: str) -> None:
    with pytest.raises(ValueError, match="a number from 0 to 9 or 'today' is needed"):
        collected(f"--slow-tenth={value}")


def test_a_sample_has_each_function_once_with_parameters_that_are_drawn(collected) -> None:
    samples = [collected("--sample=8", f"--sample-seed={seed}", "-m", "not slow") for seed in (1, 1, 2, 3)]
    assert samples[0] == samples[1]
    for sample in samples:
        functions = [name.partition("[")[0] for name in sample]
        assert sorted(functions) == sorted(
            f"packages/{package}/tests/test_things.py::{test}"
            for package in ("first", "second")
            for test in ("test_ranks", "test_other_ranks")
        )
    assert len({name for sample in samples for name in sample if "[" in name}) > 2
    assert len(collected("--sample=1")) == 2
