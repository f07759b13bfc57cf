"""A checkpoint of format 1 that was written once stays readable, by us and by whoever reads only the documentation."""

import hashlib
import importlib.util
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_ckpt import open_checkpoint

DATA = Path(__file__).parent / "data"
SAMPLE = DATA / "format_1"


@pytest.fixture
def content() -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("make_format_1", DATA / "make_format_1.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[str, Any] = module.content()
    return made


def test_the_frozen_sample_is_read(content: dict[str, Any]) -> None:
    saved = open_checkpoint(SAMPLE)
    assert saved.manifest.version == 1
    assert saved.world_size == 2
    assert saved.metadata == {"epoch": 3, "loss": 0.25}
    assert saved.names == list(content)
    for name, tree in content.items():
        back = saved.read(name, like=tree)
        assert repr(back) == repr(tree)
    model = saved.read("model")
    assert model["tied"] is model["head"]
    for rank in range(2):
        own = saved.read_local("rng", rank)
        assert own["rank"] == rank
        assert own["state"].tolist() == [rank, 2]


def test_the_sample_is_small() -> None:
    assert sum(file.stat().st_size for file in SAMPLE.iterdir()) < 20_000


def test_a_reader_of_twenty_lines_reads_it(content: dict[str, Any]) -> None:
    """Written from docs/checkpoint-format.md alone."""
    raw = (SAMPLE / "manifest.json").read_bytes()
    assert raw[-76:-67] == b',"seal":"'
    assert hashlib.sha256(raw[:-76]).hexdigest() == raw[-67:-3].decode()
    manifest = json.loads(raw)
    files = {}
    for name, record in manifest["files"].items():
        files[name] = (SAMPLE / name).read_bytes()
        size = manifest["block_size"]
        blocks = [files[name][at : at + size] for at in range(0, len(files[name]), size)]
        assert manifest["digest"] == "crc32"
        assert [f"{zlib.crc32(block):08x}" for block in blocks] == record["blocks"]
    entry = manifest["tensors"]["model/weight"]
    rows: dict[int, list[float]] = {}
    for file, key, offset, shape in entry["parts"]:
        length = struct.unpack("<Q", files[file][:8])[0]
        begin, end = json.loads(files[file][8 : 8 + length])[key]["data_offsets"]
        values = struct.unpack(f"<{shape[0] * shape[1]}f", files[file][8 + length + begin : 8 + length + end])
        for row in range(shape[0]):
            rows[offset[0] + row] = list(values[row * shape[1] : (row + 1) * shape[1]])
    assert [rows[row] for row in range(entry["shape"][0])] == content["model"]["weight"].tolist()
    assert json.loads(files["tree.json"])["model"]["head"] == {"$tensor": "model/tied"}
    assert torch.equal(content["model"]["head"], content["model"]["tied"])
