"""Whatever happens to a file of a checkpoint is found before anything is loaded, with the file's name."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accel_ckpt
from accel_ckpt.format import manifest as manifests
from accel_ckpt.format.blocks import crc32, sha256
from accel_ckpt.format.safetensors_file import Item as Item
from accel_ckpt.format.safetensors_file import header_of, read_header
from accel_state.errors import CheckpointCorruptError, CheckpointError

FILES = ("manifest.json", "tree.json", "local-00000.json", "tensors-00000.safetensors")


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position % len(content)] ^= 0x20
    file.write_bytes(content)


def become_link(file: Path) -> None:
    moved = file.parent.parent / "elsewhere"
    file.rename(moved)
    file.symlink_to(moved)


def become_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "first byte": lambda file: flip(file, 0),
    "middle byte": lambda file: flip(file, file.stat().st_size // 2),
    "last byte": lambda file: flip(file, -1),
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
    "emptied": lambda file: os.truncate(file, 0),
    "longer": lambda file: os.truncate(file, file.stat().st_size + 1),
    "deleted": lambda file: file.unlink(),
    "a link": become_link,
    "a pipe": become_pipe,
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"model": {"w": torch.randn(40, 5), "b": torch.randn(5)}, "step": 3}
    return accel_ckpt.save(tmp_path / "one", state, local={"rng": torch.get_rng_state()}, metadata={"a": 1}).path


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_the_file_named(saved: Path, name: str, damage: str) -> None:
    DAMAGE[damage](saved / name)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        accel_ckpt.open_checkpoint(saved)


@pytest.mark.parametrize("position", range(0, 2400, 97))
def test_any_byte_of_the_manifest_counts(saved: Path, position: int) -> None:
    flip(saved / "manifest.json", position)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        accel_ckpt.open_checkpoint(saved)


def test_without_verifying_damage_is_found_when_it_is_read(saved: Path) -> None:
    flip(saved / "tensors-00000.safetensors", -1)
    opened = accel_ckpt.open_checkpoint(saved, verify=False)
    assert opened.read("step") == 3
    with pytest.raises(CheckpointCorruptError, match=r"tensors-00000\.safetensors: bytes 0 to \d+ are not those"):
        opened.read("model")


@pytest.mark.parametrize("like", [None, {"one": torch.empty(1)}], ids=["whole", "a part"])
def test_a_header_that_tells_lies_in_order_is_not_believed(tmp_path: Path, like: Any) -> None:
    """Two names changed places: every number in it fits, and only the digest tells."""
    saved = accel_ckpt.save(tmp_path / "one", {"m": {"one": torch.ones(1), "two": torch.zeros(1)}})
    file = saved.path / "tensors-00000.safetensors"
    file.write_bytes(
        file.read_bytes().replace(b"m/one", b"m/???").replace(b"m/two", b"m/one").replace(b"m/???", b"m/two")
    )
    opened = accel_ckpt.open_checkpoint(saved.path, verify=False)
    for read in (lambda: opened.read("m", like, strict=False), lambda: opened.fetch({"m": like})):
        with pytest.raises(CheckpointCorruptError, match=r"tensors-00000\.safetensors: bytes 0 to \d+ are not those"):
            read()
    with pytest.raises(CheckpointCorruptError, match=r"tensors-00000\.safetensors: bytes 0 to"):
        opened.read_tensor(next(iter(saved.manifest.tensors)))


def test_all_damaged_files_are_listed(saved: Path) -> None:
    flip(saved / "tree.json", 3)
    (saved / "local-00000.json").unlink()
    with pytest.raises(CheckpointCorruptError, match=r"local-00000\.json: .* missing.*; tree\.json: bytes"):
        accel_ckpt.open_checkpoint(saved)


def reseal(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """What an attacker does: another content under a right seal."""
    document = json.loads((folder / "manifest.json").read_text())
    del document["seal"]
    change(document)
    text = json.dumps(document).encode()[:-1]
    (folder / "manifest.json").write_bytes(text + b',"seal":"' + sha256([text]).encode() + b'"}\n')


def rename_file(new: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document["files"][new] = document["files"].pop("tree.json")

    return change


@pytest.mark.parametrize(
    "name",
    [
        "../tree.json",
        "/etc/passwd",
        "a/../../tree.json",
        "sub/tree.json",
        "..",
        ".",
        "",
        "-x",
        "a\0b",
        "a\\b",
        ".hidden",
    ],
)
def test_a_manifest_cannot_name_files_outside(saved: Path, name: str) -> None:
    shutil.copy(saved / "tree.json", saved.parent / "tree.json")
    reseal(saved, rename_file(name))
    with pytest.raises(CheckpointCorruptError, match="no name of a file"):
        accel_ckpt.open_checkpoint(saved)


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    *way, last, value = path

    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for key in way:
            place = place[key]
        place[last] = value

    return change


TENSOR = ("tensors", "model/w")
FILE = ("files", "tree.json")


@pytest.mark.parametrize(
    "change",
    [
        put(*TENSOR, "shape", [2**62, 2**62]),
        put(*TENSOR, "shape", [-1, 5]),
        put(*TENSOR, "shape", [40.0, 5]),
        put(*TENSOR, "shape", [True, 5]),
        put(*TENSOR, "shape", [1] * 100),
        put(*TENSOR, "dtype", "__class__"),
        put(*TENSOR, "dtype", "int4"),
        put(*TENSOR, "parts", []),
        put(*TENSOR, "parts", 0, 0, "/etc/passwd"),
        put(*TENSOR, "parts", 0, 2, [1, 0]),
        put(*TENSOR, "parts", 0, 3, [2**40, 5]),
        put(*TENSOR, "parts", 0, 3, [5, 40]),
        put(*FILE, "size", -5),
        put(*FILE, "size", 2**62),
        put(*FILE, "blocks", []),
        put(*FILE, "blocks", None),
        put("block_size", 0),
        put("digest", "md5"),
        put("digest", []),
        put("block_size", 2**60),
        put("world_size", "many"),
        put("version", None),
        put("format", "other"),
        put("files", []),
        put("tensors", None),
    ],
    ids=lambda change: "",
)
def test_impossible_numbers_are_refused_before_anything_is_allocated(
    saved: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    reseal(saved, change)
    with pytest.raises(CheckpointCorruptError, match=r"manifest\.json"):
        accel_ckpt.open_checkpoint(saved)


def test_a_shape_that_the_file_does_not_have_is_refused(saved: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["tensors"]["model/w"] |= {
            "shape": [4000, 500], "parts": [["tensors-00000.safetensors", "model/w", [0, 0], [4000, 500]]],
        }  # fmt: skip

    reseal(saved, change)
    with pytest.raises(CheckpointCorruptError, match="the manifest differs"):
        accel_ckpt.open_checkpoint(saved).read("model")


def test_parts_that_overlap_are_refused(saved: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        part = ["tensors-00000.safetensors", "model/b", [0], [5]]
        document["tensors"]["model/b"] = {"dtype": "float32", "shape": [10], "parts": [part, part]}

    reseal(saved, change)
    with pytest.raises(CheckpointCorruptError, match="overlap"):
        accel_ckpt.open_checkpoint(saved)


@pytest.mark.parametrize("one", [True, 1.0])
def test_numbers_are_validated_in_each_of_several_equal_tensors(saved: Path, one: object) -> None:
    def change(document: dict[str, Any]) -> None:
        for name, size in (("valid", 1), ("other", one)):
            part = ["tensors-00000.safetensors", name, [0], [size]]
            document["tensors"][name] = {"dtype": "float32", "shape": [1], "parts": [part]}

    reseal(saved, change)
    with pytest.raises(CheckpointCorruptError, match="not a natural number"):
        accel_ckpt.open_checkpoint(saved)


@pytest.mark.parametrize("metadata", [[1], {"$tuple": []}, {"$int": "0x5"}, "text", None])
def test_metadata_without_names_are_refused(saved: Path, metadata: object) -> None:
    reseal(saved, put("metadata", metadata))
    with pytest.raises(CheckpointCorruptError, match="the metadata have no names"):
        _ = accel_ckpt.open_checkpoint(saved).metadata


def test_a_newer_format_is_refused_with_what_to_do(saved: Path) -> None:
    reseal(saved, put("version", manifests.VERSION + 1))
    with pytest.raises(CheckpointError, match="reads up to version 1: install a newer one"):
        accel_ckpt.open_checkpoint(saved)


def test_no_older_checkpoint_is_taken_for_one_of_a_newer_format(saved: Path, tmp_path: Path) -> None:
    series = accel_ckpt.CheckpointDirectory(tmp_path / "series")
    series.save({})
    reseal(saved, put("version", manifests.VERSION + 1))
    shutil.copytree(saved, tmp_path / "series" / "checkpoint_1")
    with pytest.raises(CheckpointError, match="install a newer one"):
        series.latest()


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a":' * 100_000, b"", b"null", b"\xff\xfe", b'{"model":{"$tensor":5}}']
)
def test_a_malicious_tree_is_refused(saved: Path, text: bytes) -> None:
    (saved / "tree.json").write_bytes(text)
    record = {"size": len(text), "blocks": [crc32([text])] if text else []}
    reseal(saved, put("files", "tree.json", record))
    with pytest.raises(CheckpointCorruptError, match=r"ill-formed|no object|marked"):
        accel_ckpt.open_checkpoint(saved).read("model")


def header(text: bytes, length: int | None = None, data: bytes = b"\0" * 16) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\2",
        header(b"{}", length=2**63),
        header(b"{}", length=99),
        header(b"[]"),
        header(b"{"),
        header(b"[" * 50_000),
        header(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,160]}}'),
        header(b'{"a":{"dtype":"F32","shape":[5],"data_offsets":[0,16]}}'),
        header(b'{"a":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}'),
        header(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}}'),
        header(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16,3]}}'),
        header(b'{"a":{"dtype":"F32","shape":[1e1],"data_offsets":[0,16]}}'),
        header(b'{"a":{"dtype":"exec","shape":[4],"data_offsets":[0,16]}}'),
        header(b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,16]}}'),
        header(b'{"a":{"dtype":"F32","shape":[0,9223372036854775808],"data_offsets":[0,0]}}'),
        header(
            b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
        ),
        header(b'{"a":5}'),
    ],
    ids=lambda content: f"{content[8:60]!r}",
)
def test_a_malicious_header_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointCorruptError, match="file"):
        read_header(lambda begin, end: content[begin:end], len(content), "file")


def test_headers_are_read_as_they_were_written() -> None:
    items = [Item("a", "float32", (2, 3)), Item("b", "complex128", (2,)), Item("c", "bool", ())]
    head = header_of(items, {"format": "pt"})
    spans = read_header(lambda begin, end: head[begin:end], len(head) + 24 + 32 + 1, "file")
    assert {key: (span.end - span.begin, span.code, span.shape) for key, span in spans.items()} == {
        "a": (24, "F32", (2, 3)), "b": (32, "U8", (2, 16)), "c": (1, "BOOL", ()),
    }  # fmt: skip
    assert spans["a"].begin == len(head)
    assert len(head) % 64 == 0


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = wrap(found)
    return found


@pytest.mark.parametrize(
    "wrap",
    [lambda x: [x], lambda x: {"a": x}, lambda x: {"$tuple": [x]}, lambda x: {"$dict": [[x, 1]]}],
    ids=["lists", "dicts", "tuples", "keys"],
)
@pytest.mark.parametrize("depth", [210, 300])
def test_deep_metadata_is_damage(saved: Path, wrap: Callable[[Any], Any], depth: int) -> None:
    reseal(saved, put("metadata", nested(depth, wrap)))
    with pytest.raises(CheckpointCorruptError, match=r"nested more than 200|ill-formed"):
        print(accel_ckpt.open_checkpoint(saved).metadata)


@pytest.mark.parametrize("shape", [[0, 2**62, 2**62], [2**62], [2**40, 2**21]])
def test_shapes_that_no_memory_has_are_damage(saved: Path, shape: list[int]) -> None:
    name = next(iter(json.loads((saved / "manifest.json").read_bytes())["tensors"]))
    reseal(saved, put("tensors", name, "shape", shape))
    with pytest.raises(CheckpointCorruptError, match="shape"):
        accel_ckpt.open_checkpoint(saved)


def test_a_subfolder_that_is_a_link_is_refused(saved: Path) -> None:
    name = "0123456789abcdef"
    elsewhere = saved.parent / "elsewhere"
    elsewhere.mkdir()
    for file in saved.iterdir():
        if file.name != "manifest.json":
            file.rename(elsewhere / file.name)
    reseal(saved, lambda document: document.update(folder=name))
    (saved / name).symlink_to(elsewhere)
    with pytest.raises(CheckpointCorruptError, match="a link"):
        accel_ckpt.open_checkpoint(saved)


def test_notes_of_other_writers_may_be_anything(tmp_path: Path) -> None:
    document = {"__metadata__": {"a": ["b"], "c": "w"}, "w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    text = json.dumps(document).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"x")
    assert sorted(accel_ckpt.load_model_files(tmp_path)) == ["c", "w"]


def test_a_reader_goes_over_to_the_checkpoint_that_takes_the_place(saved: Path, monkeypatch: Any) -> None:
    verify = accel_ckpt.Checkpoint.verify
    calls = []

    def replaced_meanwhile(self: Any, **kwargs: Any) -> None:
        calls.append(self)
        if len(calls) == 1:
            accel_ckpt.save(saved, {"model": {"w": torch.ones(70_000)}})
        verify(self, **kwargs)

    monkeypatch.setattr(accel_ckpt.Checkpoint, "verify", replaced_meanwhile)
    assert accel_ckpt.open_checkpoint(saved).read("model")["w"].shape == (70_000,)
    assert len(calls) == 2
