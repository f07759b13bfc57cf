import re
import subprocess
import sys
from pathlib import Path

import accel_ckpt
from accel_testing import run_command

ROOT = Path(__file__).parents[1]


def test_the_example_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    assert run_command([sys.executable, "example.py"], cwd=tmp_path).check().output == "checkpoint_4 step 4\n"


def test_every_public_name_is_there() -> None:
    assert [name for name in accel_ckpt.__all__ if not hasattr(accel_ckpt, name)] == []


def test_importing_brings_in_no_distributed_tensors() -> None:
    script = (
        "import sys, torch; before = set(sys.modules); import accel_ckpt; accel_ckpt.save; accel_ckpt.open_checkpoint;"
        "print([name for name in set(sys.modules) - before if name.startswith('torch.distributed')])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
