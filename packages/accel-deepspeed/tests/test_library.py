"""DeepSpeed around its engines: not installed, nothing to compile with, a build that was killed."""

import os
import shutil
import subprocess
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_deepspeed.engine.optimizers import on_host
from accel_deepspeed.library import (
    build_operation,
    compiler_problem,
    drop_stale_lock,
    extensions_folder,
    forget_module,
    known_processor,
    library,
    local_rank,
    own_ninja,
)
from accel_state.environment import patch_environment
from accel_state.errors import BackendError

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "deepspeed" else super().find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]

from accel_backends import Run, Bundle, load_backend
from accel_deepspeed import DeepSpeedPlugin
from accel_precision import PrecisionPolicy
from accel_state import BackendError, Session

with Session.open(cpu=True) as session:
    plugin = DeepSpeedPlugin(zero_stage=3)  # options need no DeepSpeed
    try:
        load_backend("deepspeed")(Run(session, PrecisionPolicy()), plugin)
    except BackendError as error:
        print(error)
"""


def test_a_machine_without_deepspeed_is_told_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert "is not installed: install accel-deepspeed[deepspeed]" in done.stdout
    assert "nearest without it: strategy='fsdp'" in done.stdout


@needs_deepspeed
@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("operation", "instead"),
    [("CPUAdamBuilder", "an optimizer that is not DeepSpeed's"), ("AsyncIOBuilder", "libaio-dev, .* offload to 'cpu'")],
)
def test_a_machine_without_a_compiler_is_told_so(tmp_path: Path, operation: str, instead: str) -> None:
    with patch_environment(PATH=str(tmp_path), TORCH_EXTENSIONS_DIR=str(tmp_path)):
        assert compiler_problem() == "there is no C++ compiler on PATH"
        with pytest.raises(
            BackendError, match=rf"has to be compiled, and there is no C\+\+ compiler on PATH; install .*{instead}"
        ):
            build_operation(operation)


def test_the_ninja_beside_python_is_found_first(tmp_path: Path) -> None:
    """Ninja builds everything anew where another version of it has built before."""
    beside = shutil.which("ninja", path=str(Path(sys.executable).parent))
    if beside is None:
        pytest.skip("there is no ninja beside this Python")
    (tmp_path / "ninja").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "ninja").chmod(0o755)
    with patch_environment(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}"):
        assert shutil.which("ninja") == str(tmp_path / "ninja")
        with own_ninja():
            assert shutil.which("ninja") == beside
        assert shutil.which("ninja") == str(tmp_path / "ninja")


@needs_deepspeed
@pytest.mark.skipif(not (extensions_folder() / "cpu_adam").exists(), reason="DeepSpeed's cpu_adam is not built")
@pytest.mark.ranks(1)
def test_host_optimizers_look_at_the_processor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import cpuinfo
    from cpuinfo import cpuinfo as implementation

    with known_processor():
        known = cpuinfo.get_cpu_info()
    monkeypatch.setattr(implementation, "get_cpu_info_json", lambda: pytest.fail("another look"))
    on_host(torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]))
    with known_processor():
        assert cpuinfo.get_cpu_info() is known
    assert cpuinfo.get_cpu_info is implementation.get_cpu_info


def test_only_the_lock_of_a_build_that_was_killed_is_removed(tmp_path: Path) -> None:
    assert not drop_stale_lock(tmp_path)
    lock = tmp_path / "lock"
    lock.touch()
    assert not drop_stale_lock(tmp_path)
    assert lock.exists()
    hour_ago = lock.stat().st_mtime - 3600
    os.utime(lock, (hour_ago, hour_ago))
    assert drop_stale_lock(tmp_path)
    assert not lock.exists()


@needs_deepspeed
@pytest.mark.ranks(1)
def test_an_operation_that_deepspeed_does_not_have_is_refused() -> None:
    with pytest.raises(BackendError, match="not been implemented on CPU"):
        build_operation("FusedLambBuilder")


@pytest.mark.parametrize(("index", "said"), [(0, "0"), (1, "1"), (None, "3")])
def test_deepspeed_reads_the_index_of_the_device_as_local_rank(index: int | None, said: str) -> None:
    session: Any = SimpleNamespace(local_rank=3, device=SimpleNamespace(index=index))
    with patch_environment(LOCAL_RANK="7"):
        with local_rank(session):
            assert os.environ["LOCAL_RANK"] == said
        assert os.environ["LOCAL_RANK"] == "7"


@needs_deepspeed
def test_a_forgotten_model_is_in_no_cache_of_stage_3(monkeypatch: pytest.MonkeyPatch) -> None:
    library("cpu")
    from deepspeed.runtime.zero.parameter_offload import PartitionedParameterCoordinator

    @lru_cache
    def cached(module: object) -> object:
        return module

    def decorated(self: object, module: object) -> object:
        return cached(module)

    cached("a layer")
    monkeypatch.setattr(PartitionedParameterCoordinator, "releases", decorated, raising=False)
    forget_module(object())
    assert cached.cache_info().currsize == 0
