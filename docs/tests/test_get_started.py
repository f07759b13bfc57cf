"""The first script is killed and resumed as its page says."""

from pathlib import Path

from accel_testing.ranks.launched_scripts import run_command
from docs.tests.test_pages import commands_of, environment


def test_the_first_script_resumes_after_the_kill_that_the_page_shows(tmp_path: Path) -> None:
    script, alone, killed = commands_of("docs/get-started/first-script.md")
    (tmp_path / "train.py").write_text(script.text, encoding="utf-8")
    run_command(["bash", "-euc", alone.text], cwd=tmp_path, env=environment(), timeout=240).check()
    said = run_command(["bash", "-euc", killed.text], cwd=tmp_path, env=environment(), timeout=240).check().output
    assert "SIGKILL" in said
    wanted = ("resumed in epoch 1 after 0 samples", "resumed in epoch 1 after 128 samples", "done on 2 ranks")
    places = [said.find(line) for line in wanted]
    assert -1 < places[0] < places[1] < places[2], said
