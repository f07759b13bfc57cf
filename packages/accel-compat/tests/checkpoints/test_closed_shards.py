"""Records of torch's distributed checkpoints: what their pickle may name, and what it may not."""

import pickle
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from accel_compat.checkpoints.closed_shards import read_shards
from accel_state.errors import CheckpointError

DATA = Path(__file__).parent / "data" / "1.15.0-fsdp-sharded" / "optimizer_0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA, tmp_path / "folder"))


def named(module: str, name: str) -> bytes:
    """A global as protocol 4 writes it, which follows dots in its name."""
    return text(module) + text(name) + b"\x93"


def called(function: bytes, argument: bytes) -> bytes:
    return function + argument + b"\x85R"


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.filesystem", "FileSystem.mkdir.__builtins__.get"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__builtins__.get"),
        ("torch.distributed.checkpoint.metadata", "Enum.__new__.__builtins__.get"),
    ],
)
def test_a_name_with_dots_runs_no_code(tmp_path, folder, module, name):
    owned = tmp_path / "owned"
    eval_ = called(named(module, name), text("eval"))
    payload = b"\x80\x04" + called(eval_, text(f"open({str(owned)!r}, 'w')")) + b"."
    (folder / ".metadata").write_bytes(payload)
    with pytest.raises(CheckpointError, match=rf"holds more than the records of shards: {module}.{name}"):
        read_shards(folder)
    assert not owned.exists()


@pytest.mark.parametrize(
    "change", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:100])], ids=["gone", "cut"]
)
def test_a_damaged_file_of_shards_is_an_error_of_the_folder(folder, change):
    change(next(folder.glob("*.distcp")))
    with pytest.raises(CheckpointError, match="folder cannot be read"):
        read_shards(folder)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "print"),
        ("torch", "load"),
        ("torch", "serialization.os.system"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
        ("torch.distributed.checkpoint.filesystem", "Path"),
        ("torch.distributed.checkpoint.metadata", "Enum"),
    ],
)
def test_what_is_no_record_is_refused_by_its_name(folder, module, name):
    (folder / ".metadata").write_bytes(b"\x80\x04" + named(module, name) + b".")
    with pytest.raises(CheckpointError, match=rf"holds more than the records of shards: {module}.{name}$"):
        read_shards(folder)


@pytest.mark.parametrize(
    ("owner", "name", "found"),
    [
        ("TensorProperties", "__init__", "holds more than the records of shards: getattr"),
        ("_MEM_FORMAT_ENCODING", "__init__", "holds more than the records of shards: getattr"),
        ("_MEM_FORMAT_ENCODING", "TORCH_CHANNELS_LAST", "is a _MEM_FORMAT_ENCODING; expected the records of shards"),
    ],
)
def test_getattr_finds_members_of_the_enum_alone(folder, owner, name, found):
    pair = named("torch.distributed.checkpoint.metadata", owner) + text(name)
    (folder / ".metadata").write_bytes(b"\x80\x04" + named("builtins", "getattr") + pair + b"\x86R.")
    with pytest.raises(CheckpointError, match=found):
        read_shards(folder)


def test_attributes_of_paths_are_not_set(folder):
    attribute = b"N}" + text("owned") + text("/etc") + b"s\x86b."
    (folder / ".metadata").write_bytes(b"\x80\x04" + named("pathlib", "PosixPath") + attribute)
    with pytest.raises(CheckpointError, match="expected the records of shards"):
        read_shards(folder)
    assert not hasattr(PurePosixPath, "owned")


@pytest.mark.parametrize("damage", [b"", b"\x80\x04h\x05.", b"\x80\x04R.", b"\x80\x04]."])
def test_damaged_records_are_an_error_of_the_checkpoint(folder, damage):
    (folder / ".metadata").write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        read_shards(folder)


def test_records_of_torch_2_2_are_read(folder):
    expected = read_shards(folder)["optimizer"]["state"]
    facts = pickle.loads((folder / ".metadata").read_bytes())
    for one in facts.state_dict_metadata.values():
        if isinstance(one, TensorStorageMetadata):
            one.properties = TensorProperties(dtype=one.properties.dtype)
    del facts.storage_meta
    (folder / ".metadata").write_bytes(pickle.dumps(facts))
    assert b"sharded_tensor.metadata" in (folder / ".metadata").read_bytes()
    same(read_shards(folder)["optimizer"]["state"], expected)


def test_records_of_python_3_13_are_read(folder):
    expected = read_shards(folder)["optimizer"]["state"]
    pickled = pickle.dumps(pickle.loads((folder / ".metadata").read_bytes()), protocol=2)
    changed = pickled.replace(b"cpathlib\nPosixPath", b"cpathlib._local\nPosixPath")
    assert changed != pickled
    (folder / ".metadata").write_bytes(changed)
    same(read_shards(folder)["optimizer"]["state"], expected)


def same(here: Any, there: Any) -> None:
    assert here.keys() == there.keys()
    for name, state in there.items():
        assert state.keys() == here[name].keys() > {"exp_avg"}
        assert all(torch.equal(value, here[name][key]) for key, value in state.items())
