"""The README's example runs as it stands."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def run_example():
    for block in re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL):
        exec(compile(block, str(README), "exec"), {"__name__": "readme"})


def test_the_example_runs_on_one_process(capsys):
    run_example()
    assert "1 process(es) say 45" in capsys.readouterr().out


@pytest.mark.ranks(2)
def test_the_example_runs_on_two_processes():
    run_example()
