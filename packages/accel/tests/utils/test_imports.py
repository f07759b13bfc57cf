"""Probes find installed packages, in allowed versions, without importing them."""

import subprocess
import sys

import pytest

from accel.utils import imports
from accel.utils.imports import PackageProbe

ARGUMENTLESS = sorted(
    name
    for name in vars(imports)
    if (name.startswith("is_") and name.endswith("_available")) or name == "is_habana_gaudi1"
)


@pytest.mark.parametrize("name", ARGUMENTLESS)
def test_every_probe_answers_yes_or_no(name):
    assert getattr(imports, name)() in {True, False}


@pytest.mark.parametrize(
    ("probe", "expected"),
    [
        (PackageProbe("pytest"), True),
        (PackageProbe("no_such_package"), False),
        (PackageProbe("json"), False),  # importable, but no distribution
        (PackageProbe("pytest", requires=(">=", "1.0")), True),
        (PackageProbe("pytest", requires=("<", "1.0")), False),
        (PackageProbe("pytest", metadata=("no-such-distribution",)), False),
        (PackageProbe("pytest", metadata=("no-such-distribution", "pytest")), True),
        (PackageProbe("pytest", gate="NO_SUCH_VARIABLE"), False),
        (PackageProbe("no.such.parent"), False),
    ],
)
def test_package_and_metadata_and_version_must_all_be_right(probe, expected):
    assert probe() is expected


def test_a_stray_folder_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert imports.has_package("wandb")
    assert imports.installed_version("wandb") is not None or not imports.is_wandb_available()


def test_a_gate_is_read_when_asked(monkeypatch):
    probe = PackageProbe("pytest", gate="X_GATE")
    monkeypatch.setenv("X_GATE", "true")
    assert probe()
    monkeypatch.setenv("X_GATE", "false")
    assert not probe()


def test_numpy_is_asked_for_a_version():
    assert imports.is_numpy_available("1.0")
    assert not imports.is_numpy_available("1000.0")


def test_xla_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("USE_TORCH_XLA", "0")
    assert not imports.is_torch_xla_available()
    with pytest.raises(AssertionError):
        imports.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_a_cpu_computes_bfloat16():
    assert imports.is_fp16_available()
    if not any(imports.count_devices(type_) for type_ in ("cuda", "mps", "xpu")):
        assert imports.is_bf16_available()


def test_probing_imports_nothing_and_touches_no_device():
    code = (
        "import sys, torch\n"
        "from accel.utils import imports\n"
        "before = set(sys.modules)\n"
        "for name in ('wandb', 'transformers', 'deepspeed', 'tensorboard', 'datasets'):\n"
        "    getattr(imports, f'is_{name}_available')()\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert not new & {'wandb', 'transformers', 'deepspeed', 'tensorboard', 'datasets'}, new\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
