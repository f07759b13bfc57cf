"""Every public name can be imported, the README's example runs, and importing needs neither torch nor megatron-core."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import accel_megatron

README = Path(__file__).parent.parent / "README.md"
GUIDE = README.parents[2] / "docs" / "guides" / "megatron.md"


@pytest.mark.parametrize("name", accel_megatron.__all__)
def test_every_public_name_is_there(name):
    assert hasattr(accel_megatron, name)


def test_importing_brings_in_nothing_heavy():
    code = "import sys, accel_megatron; print({'torch', 'megatron'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_no_other_package_imports_megatron():
    sources = [path for path in README.parent.parent.glob("*/src/**/*.py") if "accel_megatron" not in path.parts]
    assert len(sources) > 100
    written = re.compile(r"^\s*(from|import) megatron\b", re.MULTILINE)
    assert [str(path) for path in sources if written.search(path.read_text())] == []


def test_the_guide_lists_what_no_gpu_has_proven():
    section = GUIDE.read_text().split("## Not proven\n")[1].split("\n## ")[0]
    waiting = re.findall(r"^def (test_\w+)", (Path(__file__).parent / "test_gpu.py").read_text(), re.MULTILINE)
    assert re.findall(r"`(test_\w+)`", section) == waiting


def test_the_example_runs_as_it_is(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    exec(compile(block, str(README), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == "2 2\n"
