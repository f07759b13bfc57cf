"""What is packed for a GPU machine: wheels for any Python from 3.11 on, and a script that bash understands."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from ci import pack_gpu


def test_own_wheels_are_for_any_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_gpu, "own_wheels", lambda folder: build_two(folder))
    assert pack_gpu.pack(tmp_path / "pack", "3.12", ours_only=True) == []
    names = {path.name for path in (tmp_path / "pack").iterdir()}
    assert "run.sh" in names
    assert {name for name in names if not name.endswith("-py3-none-any.whl")} == {"run.sh"}
    assert subprocess.run(["bash", "-n", str(tmp_path / "pack" / "run.sh")], check=False).returncode == 0


BUILD = pack_gpu.own_wheels


def build_two(folder: Path) -> None:
    members = [member for member in pack_gpu.MEMBERS if member.name in ("accel-state", "accel-precision")]
    assert len(members) == 2
    BUILD(folder, members)


def test_a_pack_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_gpu, "own_wheels", lambda folder: (folder / "large.whl").write_bytes(b"0" * 2000))
    monkeypatch.setattr(pack_gpu, "MAX_BYTES", 1000)
    with pytest.raises(SystemExit, match=r"large\.whl"):
        pack_gpu.pack(tmp_path / "pack", "3.12", ours_only=True)


def test_every_member_is_packed() -> None:
    assert {member.name for member in pack_gpu.MEMBERS} >= {"accel", "accel-state", "accel-deepspeed", "testing"}


def test_megatron_core_is_packed_in_the_version_of_its_backend() -> None:
    wanted = tomllib.loads((pack_gpu.ROOT / "packages" / "accel-megatron" / "pyproject.toml").read_text())
    assert pack_gpu.MEGATRON in wanted["project"]["optional-dependencies"]["megatron"]
    assert " megatron-core;" in pack_gpu.RUN
