"""Pages and examples on the installed wheels: Python under both launchers on two ranks, commands as they stand."""

from pathlib import Path

import pytest

from accel_testing.programs.runs import launch_by
from accel_testing.ranks.launchers import LAUNCHERS
from ci.launched import in_turn
from docs.tests.commands import ON_WHEELS, run_commands
from docs.tests.pages import ON_CPU, ROOT, WITH_PYTHON, script_of

EXAMPLES = {
    "classification.py": ["--epochs", "1"],
    "elastic.py": ["--folder", "run"],
    "gan.py": [],
    "language_model.py": ["--epochs", "1"],
    "own_loop.py": [],
    "resume.py": ["--folder", "run"],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Scripts under both launchers; slow is the one that this run's hash seed does not choose."""
    names = set(metafunc.fixturenames)
    if "launcher" not in names:
        return
    kind, scripts = ("page", WITH_PYTHON) if "page" in names else ("example", list(EXAMPLES))
    runs = in_turn(scripts, LAUNCHERS, int(metafunc.config.option.hash_seed or 0))
    cases = [pytest.param(one, name, marks=[] if chosen else pytest.mark.slow) for one, name, chosen in runs]
    metafunc.parametrize((kind, "launcher"), cases)


def test_a_page_runs(page: str, launcher: str, tmp_path: Path) -> None:
    script = tmp_path / f"page_{Path(page).stem}.py"  # not the name of a library
    script.write_text(script_of(page), encoding="utf-8")
    launch_by(launcher, script, env=ON_CPU, cwd=tmp_path, timeout=240).check()


@pytest.mark.parametrize("page", ON_WHEELS)
def test_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    run_commands(page, tmp_path)


def test_an_example_runs(example: str, launcher: str, tmp_path: Path) -> None:
    launch_by(launcher, ROOT / "examples" / example, *EXAMPLES[example], env=ON_CPU, cwd=tmp_path, timeout=240).check()


def test_every_example_is_here() -> None:
    assert set(EXAMPLES) == {path.name for path in (ROOT / "examples").glob("*.py")}
