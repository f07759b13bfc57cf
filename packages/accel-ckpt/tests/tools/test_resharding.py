"""A checkpoint in another number of files holds the same, and no more memory is needed than one part takes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import accel_ckpt
from accel_ckpt import open_checkpoint, reshard
from accel_ckpt.tools.inspection import compare_checkpoints
from accel_state.errors import CheckpointCorruptError, CheckpointError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    weight = torch.randn(101, 300)
    state = {
        "model": {"w": weight, "tied": weight, "narrow": torch.randn(2, 40_000), "scalar": torch.tensor(3.0)},
        "odd": {"complex": torch.randn(70, 200, dtype=torch.complex64), "none": torch.empty(0, 4)},
        "n": 5,
    }
    return accel_ckpt.save(tmp_path / "one", state, local={"rng": torch.get_rng_state()}, metadata={"loss": 0.5}).path  # type: ignore[return-value]


@pytest.mark.parametrize("files", [1, 2, 3, 7])
def test_any_number_of_files_holds_the_same(saved: Path, tmp_path: Path, files: int) -> None:
    made = reshard(saved, tmp_path / "other", files)
    made.verify()
    assert len([name for name in made.manifest.files if name.endswith(".safetensors")]) == files
    found = compare_checkpoints(saved, tmp_path / "other")
    assert (found.only_first, found.only_second, found.tensors, found.values) == ((), (), (), {})
    before = open_checkpoint(saved)
    assert torch.equal(made.read_local("rng", 0), before.read_local("rng", 0))
    assert (made.metadata, made.world_size) == (before.metadata, before.world_size)
    model: Any = made.read("model")
    assert model["w"] is model["tied"]


def test_there_and_back_is_the_same_again(saved: Path, tmp_path: Path) -> None:
    reshard(saved, tmp_path / "three", 3)
    reshard(tmp_path / "three", tmp_path / "memory", 1)
    files = [path / "tensors-00000.safetensors" for path in (saved, tmp_path / "memory")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("overwrite", [False, True], ids=["elsewhere", "in its place"])
def test_files_of_hooks_and_the_kind_of_digest_stay(tmp_path: Path, overwrite: bool) -> None:
    def fill(folder: Any) -> None:
        Path(folder, "config").mkdir()
        Path(folder, "config", "a.json").write_text("{}")

    one, other = tmp_path / "one", tmp_path / ("one" if overwrite else "other")
    terms = accel_ckpt.Terms(fill=fill)
    open_checkpoint(accel_ckpt.save(one, {"w": torch.arange(50_000)}, terms=terms, digest="sha256").path)
    made = reshard(one, other, 2, overwrite=overwrite)
    made.verify()
    assert (other / "config" / "a.json").read_text() == "{}"
    assert made.manifest.digest == "sha256"
    assert torch.equal(made.read_tensor("w"), torch.arange(50_000))


def test_damage_is_found_and_nothing_appears(saved: Path, tmp_path: Path) -> None:
    file = saved / "tensors-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match="tensors-00000"):
        reshard(saved, tmp_path / "other", 2)
    assert os.listdir(tmp_path) == ["one"]


@pytest.mark.parametrize(("target", "files", "said"), [("one", 2, "is there already"), ("new", 0, "files=0")])
def test_what_cannot_be_done_is_said(saved: Path, tmp_path: Path, target: str, files: int, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        reshard(saved, tmp_path / target, files)


COMMANDS = {
    "reshard": "accel_ckpt.reshard(folder / 'one', folder / 'made', 2)",
    "diff": "inspection.compare_checkpoints(folder / 'one', folder / 'other')",
    "export": "accel_ckpt.export_checkpoint(folder / 'one', folder / 'made')",
    "verify": "inspection.verify(folder / 'one')",
}


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's account of memory")
@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=() if name == "reshard" else pytest.mark.slow) for name in COMMANDS],
)
@pytest.mark.slow
def test_memory_holds_few_tensors_at_a_time(tmp_path: Path, command: str) -> None:
    """Of sixteen tensors of 8 MiB, few (one for each thread that looks at them) and what is compared of them."""
    for name in ("one", "other"):
        state = {"model": {f"w{number}": torch.full((1024, 2048), float(number)) for number in range(16)}}
        accel_ckpt.save(tmp_path / name, state)
    script = f"""
from pathlib import Path
import torch, accel_ckpt
from accel_ckpt.tools import export; from accel_ckpt.tools import inspection; from accel_ckpt.tools import resharding

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) // 1024

folder = Path({str(tmp_path)!r})
torch.ones(10).double().norm()
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS:")
{COMMANDS[command]}
print(memory("VmHWM:") - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 100, "MiB"
