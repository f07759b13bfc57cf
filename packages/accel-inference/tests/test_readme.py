import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_examples_run_as_they_are(block, capsys):
    exec(compile(block, str(README), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_there_is_an_example():
    assert BLOCKS
