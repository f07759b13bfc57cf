"""The README's tests run as they stand, and the plugin costs a run without ranks next to nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import accel_testing

README = Path(__file__).parents[1] / "README.md"


def test_examples_run_as_they_stand(tmp_path: Path) -> None:
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", README.read_text(), re.S)):
        (tmp_path / f"test_example_{number}.py").write_text(example)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "-x"]
    command += ["-o", "accel_preload=torch._dynamo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_plugin_imports_neither_torch_nor_accel() -> None:
    code = (
        "import sys, accel_testing.pytest.plugin; "
        "print([name for name in sys.modules if name.startswith(('torch', 'accel'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lazily = {"accel_state", "accel_state.lazy"}
    own = {
        "accel_testing",
        *(f"accel_testing.{name}" for name in ("pytest", "pytest.plugin", "ranks", "ranks.hash_seeds")),
    }
    assert set(eval(done.stdout)) == own | lazily


def test_every_public_name_can_be_imported() -> None:
    assert all(hasattr(accel_testing, name) for name in accel_testing.__all__)
    assert set(accel_testing.__all__) <= set(dir(accel_testing))
