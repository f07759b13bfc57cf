"""Import paths of Accelerate resolve to accel, and to nothing of an installed Accelerate."""

import importlib
import importlib.metadata
import subprocess
import sys

import pytest

import accel_compat
from accel_compat.finder import TREE

MODULES = sorted(
    ".".join(("accelerate", *(part for part in path.relative_to(TREE).with_suffix("").parts if part != "__init__")))
    for path in TREE.rglob("*.pyi")
)


@pytest.mark.parametrize("name", MODULES)
def test_every_listed_name_can_be_imported(name):
    module = importlib.import_module(name)
    assert [one for one in module.__all__ if not hasattr(module, one)] == []


def test_the_metadata_is_that_of_the_release():
    assert importlib.metadata.version("accelerate") == importlib.import_module("accelerate").__version__ == "1.15.0"


def test_a_module_that_accelerate_lacks_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"accelerate\.nothing"):
        importlib.import_module("accelerate.nothing")


def test_a_name_without_a_counterpart_is_refused_when_it_is_used():
    absent = importlib.import_module("accelerate.utils").MegatronLMPlugin
    with pytest.raises(RuntimeError, match=r"MegatronLMPlugin of Accelerate has no counterpart.*accel-megatron has"):
        absent()
    with pytest.raises(RuntimeError, match=r"build_pipeline of Accelerate has no counterpart.*prepare_pippy splits"):
        importlib.import_module("accelerate.inference").build_pipeline(None)


def test_megatron_is_refused_with_its_backend(monkeypatch):
    from accelerate import Accelerator

    with pytest.raises(RuntimeError, match=r"megatron_lm_plugin: .*strategy=MegatronLMPlugin"):
        Accelerator(megatron_lm_plugin=object())
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    with pytest.raises(RuntimeError, match="ACCELERATE_USE_MEGATRON_LM: "):
        Accelerator(cpu=True)


def test_uninstalling_removes_the_modules():
    importlib.import_module("accelerate")
    accel_compat.uninstall()
    assert "accelerate" not in sys.modules
    assert not accel_compat.is_installed()


def test_a_script_runs_unchanged(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom accelerate import Accelerator\nprint(Accelerator().num_processes, sys.argv[1:])\n"
    )
    command = [sys.executable, "-m", "accel.compat", str(script), "--epochs", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "1 ['--epochs', '3']\n"


def test_accel_alone_loads_nothing_of_compat():
    code = "import sys, accel; print([name for name in sys.modules if 'compat' in name and 'accel' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"
