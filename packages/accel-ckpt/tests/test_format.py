"""A checkpoint of format 1 that was written once stays readable, by us and by whoever reads only the documentation."""

import hashlib
import importlib.util
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from accel_ckpt import open_checkpoint, save
from accel_ckpt.format.blocks import Digest

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


class Stranger:
    """A reader written from the page on the format alone, with JSON, two digests and the safetensors library."""

    def __init__(self, folder: Path) -> None:
        raw = (folder / "manifest.json").read_bytes()
        assert (raw[-76:-67], raw[-3:]) == (b',"seal":"', b'"}\n')
        assert hashlib.sha256(raw[:-76]).hexdigest() == raw[-67:-3].decode()
        self.manifest = json.loads(raw)
        assert (self.manifest["format"], self.manifest["version"]) == ("accel-checkpoint", 1)
        self.folder = folder / self.manifest.get("folder", "")
        for name, record in self.manifest["files"].items():
            self.check((self.folder / name).read_bytes(), record)

    def check(self, content: bytes, record: dict[str, Any]) -> None:
        """Compares a file with its size and its digests."""
        size = self.manifest["block_size"]
        blocks = [content[at : at + size] for at in range(0, len(content), size)]
        digest = {"crc32": lambda b: f"{zlib.crc32(b):08x}", "sha256": lambda b: hashlib.sha256(b).hexdigest()}
        assert len(content) == record["size"]
        assert [digest[self.manifest["digest"]](block) for block in blocks] == record["blocks"]

    def tensor(self, name: str) -> torch.Tensor:
        """Puts a tensor together from its boxes."""
        entry = self.manifest["tensors"][name]
        whole = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for file, key, offset, shape in entry["parts"]:
            with safe_open(self.folder / file, "pt") as opened:
                part = opened.get_tensor(key)
            if part.dtype != whole.dtype:  # bytes of an element in one more dimension
                part = part.contiguous().view(whole.dtype).reshape(shape)
            whole[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))] = part
        return whole

    def tree(self, value: Any) -> Any:
        """A tree with its tensors, from JSON with marks."""
        if isinstance(value, list):
            return [self.tree(item) for item in value]
        if not isinstance(value, dict):
            return value
        mark, content = next(iter(value.items()), ("", None))
        if len(value) > 1 or not mark.startswith("$"):
            return {key: self.tree(item) for key, item in value.items()}
        return {
            "$tensor": lambda: self.tensor(content),
            "$tuple": lambda: tuple(self.tree(item) for item in content),
            "$dict": lambda: {self.tree(key): self.tree(item) for key, item in content},
            "$int": lambda: int(content, 16),
            "$float": lambda: float(content),
        }[mark]()

    def document(self, name: str) -> Any:
        """All trees of a file of JSON."""
        return self.tree(json.loads((self.folder / name).read_bytes()))


def test_who_has_only_the_page_reads_all_of_the_sample(content: dict[str, Any]) -> None:
    reader = Stranger(SAMPLE)
    assert repr(reader.document("tree.json")) == repr(content)
    assert [reader.document(f"local-{rank:05d}.json")["rng"]["state"].tolist() for rank in range(2)] == [[0, 2], [1, 2]]
    assert reader.tree(reader.manifest["metadata"]) == {"epoch": 3, "loss": 0.25}


@pytest.mark.parametrize("digest", ["crc32", "sha256"])
def test_who_has_only_the_page_reads_what_is_written_today(
    tmp_path: Path, content: dict[str, Any], digest: Digest
) -> None:
    saved = save(tmp_path / "one", content, local={"own": {1: (None, 1e300)}}, digest=digest)
    reader = Stranger(tmp_path / "one")
    assert repr(reader.document("tree.json")) == repr(content)
    assert reader.document("local-00000.json") == {"own": {1: (None, 1e300)}}
    assert reader.manifest["world_size"] == saved.world_size == 1
