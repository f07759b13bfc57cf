import json
import os
from pathlib import Path

import pytest
import torch

from accel_ckpt import export_checkpoint, export_model, export_tensors, load_model_files, save
from accel_ckpt.tools.export import parse_size, split_into_shards
from accel_state.errors import CheckpointCorruptError, CheckpointError
from accel_testing.faults.faults import injected


def state() -> dict[str, torch.Tensor]:
    return {f"layer{i}.weight": torch.randn(30, 40) for i in range(5)} | {
        "norm": torch.randn(7).bfloat16(), "n": torch.tensor(3), "empty": torch.empty(0, 2), "mask": torch.ones(3) > 0,
    }  # fmt: skip


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one
    )


def test_small_models_are_one_file_that_others_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = state()
    assert export_model(model, tmp_path) == [tmp_path / "model.safetensors"]
    assert same(load_file(tmp_path / "model.safetensors"), model)
    assert same(load_model_files(tmp_path), model)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_large_ones_are_shards_with_an_index(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = state()
    files = export_model(model, tmp_path, "10KB")
    assert [file.name for file in files] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in model.values())
    assert all(key in load_file(tmp_path / file) for key, file in index["weight_map"].items())
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        assert same(load_model_files(path), model)


@pytest.mark.parametrize("sizes", [("10KB", "1GB"), ("1GB", "10KB"), ("5KB", "10KB"), ("10KB", "5KB")], ids=str)
def test_shards_of_an_earlier_export_are_removed(tmp_path: Path, sizes: tuple[str, str]) -> None:
    (tmp_path / "model.safetensors.md").write_text("mine")
    (tmp_path / "other.safetensors").write_text("mine")
    export_model(state(), tmp_path, sizes[0])
    model = state()
    files = export_model(model, tmp_path, sizes[1])
    left = {name for name in os.listdir(tmp_path) if not name.endswith(".index.json")}
    assert left == {file.name for file in files} | {"model.safetensors.md", "other.safetensors"}
    assert same(load_model_files(tmp_path), model)


@pytest.mark.parametrize("sizes", [("10KB", "1GB"), ("1GB", "10KB")], ids=["shards first", "one file first"])
@pytest.mark.parametrize("function", ["pathlib:Path.unlink", "os:replace"])
def test_an_export_that_ends_anywhere_leaves_the_old_or_the_new(
    tmp_path: Path, sizes: tuple[str, str], function: str
) -> None:
    old, new = state(), state()
    for call in range(1, 20):
        folder = tmp_path / str(call)
        export_model(old, folder, sizes[0])
        with injected(f"raise(EIO) at call {call} of {function}"):
            try:
                export_model(new, folder, sizes[1])
            except CheckpointError:
                found = load_model_files(folder)
                assert same(found, old) or same(found, new)
            else:
                assert same(load_model_files(folder), new)
                return
    pytest.fail("20 calls were not enough to export")


@pytest.mark.parametrize("call", range(1, 5))
def test_new_shards_under_the_names_of_old_ones_are_not_read_with_those(tmp_path: Path, call: int) -> None:
    export_model(state(), tmp_path, "10KB")
    with injected(f"raise(EIO) at call {call} of os:replace"), pytest.raises(CheckpointError):
        export_model(state(), tmp_path, "10KB")
    with pytest.raises(CheckpointError, match="should hold one safetensors file or index"):
        load_model_files(tmp_path)


def test_tied_tensors_are_written_once_and_come_back_under_both_names(tmp_path: Path) -> None:
    weight = torch.randn(50, 50)
    export_model({"embedding": weight, "x": torch.ones(2), "head": weight}, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 11_000
    back = load_model_files(tmp_path)
    assert back["embedding"] is back["head"]
    assert torch.equal(back["head"], weight)


@pytest.mark.ranks(2)
def test_sharded_tensors_are_put_together(tmp_path: Path, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    full = torch.arange(35.0).reshape(7, 5)
    mesh = init_device_mesh("cpu", (2,))
    model = {f"w{i}": distribute_tensor(full + i, mesh, [Shard(0)]) for i in range(4)}
    narrow = full.to(torch.float8_e5m2)
    mine = narrow[rank * 4 : rank * 4 + 4]
    model["narrow"] = DTensor.from_local(mine, mesh, [Shard(0)], shape=narrow.shape, stride=narrow.stride())
    export_model(model, tmp_path, "300B")
    assert same(load_model_files(tmp_path), {f"w{i}": full + i for i in range(4)} | {"narrow": narrow})
    torch.distributed.barrier()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        export_model(model, tmp_path / "file" / "below")


@pytest.mark.ranks(2)
def test_a_rank_without_elements_of_tied_tensors_exports_them_as_the_others_do(tmp_path: Path, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    scale = distribute_tensor(torch.full((1,), 3.0), mesh, [Shard(0)])
    model = {"a.scale": scale, "b.scale": scale, "w": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])}
    export_model(model, tmp_path)
    back = load_model_files(tmp_path)
    assert back["a.scale"] is back["b.scale"]
    assert back["a.scale"].tolist() == [3.0]
    assert back["w"].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.ranks(2)
def test_what_one_rank_cannot_export_is_an_error_on_all(tmp_path: Path, rank: int) -> None:
    with pytest.raises(CheckpointError, match="w is on the meta device"):
        export_model({"w": torch.ones(2, device="meta" if rank else "cpu")}, tmp_path)


@pytest.mark.parametrize(
    ("text", "size"),
    [("10GB", 10**10), ("5GiB", 5 * 2**30), ("300 kb", 300_000), (77, 77), ("1.5MB", 1_500_000), ("12", 12)],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "10XB", 0, "0B"])
def test_other_sizes_are_refused(text: str | int) -> None:
    with pytest.raises(CheckpointError, match="is no size"):
        parse_size(text)


def test_a_tensor_larger_than_a_shard_stands_alone() -> None:
    assert split_into_shards({"a": 1, "b": 50, "c": 2, "d": 3}, 10) == [["a"], ["b"], ["c", "d"]]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_files_that_would_have_to_be_unpickled_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match="may run code when read"):
            load_model_files(path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "..", "", 5])
def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path, name: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointCorruptError, match="ill-formed index"):
        load_model_files(tmp_path)


def test_a_folder_of_links_is_read(tmp_path: Path) -> None:
    export_model(state(), tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / "model.safetensors")
    assert "n" in load_model_files(tmp_path / "snapshot")


def test_tensors_without_values_or_without_a_name_for_their_dtype_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a is on the meta device"):
        export_model({"a": torch.zeros(2, device="meta")}, tmp_path)
    with pytest.raises(CheckpointError, match=r"a has dtype torch\.complex128"):
        export_model({"a": torch.zeros(2, dtype=torch.complex128)}, tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", ["1GB", "10KB"])
def test_a_saved_model_is_exported_as_the_model_itself_would_be(tmp_path: Path, size: str) -> None:
    model = state()
    model["head"] = model["layer0.weight"]
    save(tmp_path / "saved", {"model": model, "other": {"n": 3}})
    files = export_checkpoint(tmp_path / "saved", tmp_path / "out", size)
    direct = export_model(model, tmp_path / "direct", size)
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in direct]
    assert same(load_model_files(tmp_path / "out"), model)


def test_names_of_a_nested_state_are_joined_and_files_named(tmp_path: Path) -> None:
    save(tmp_path / "saved", {"ema": {"inner": {"w": torch.ones(2)}, "steps": 3}, "other": {"n": 3}})
    assert export_checkpoint(tmp_path / "saved", tmp_path, state="ema") == [tmp_path / "ema.safetensors"]
    assert list(load_model_files(tmp_path / "ema.safetensors")) == ["inner.w"]
    with pytest.raises(CheckpointError, match=r"'other' in .* holds no tensors; its states are 'ema', 'other'"):
        export_checkpoint(tmp_path / "saved", tmp_path, state="other")


def test_a_damaged_checkpoint_exports_nothing(tmp_path: Path) -> None:
    save(tmp_path / "saved", {"model": state()})
    path = tmp_path / "saved" / "tensors-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match=r"tensors-00000\.safetensors: bytes"):
        export_checkpoint(tmp_path / "saved", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


def test_one_file_is_written_without_touching_others(tmp_path: Path) -> None:
    (tmp_path / "some-00001-of-00002.safetensors").write_text("mine")
    tensors = state()
    tensors["tied"] = tensors["mask"]
    path = export_tensors(tensors, tmp_path / "some.safetensors")
    assert same(load_model_files(path), tensors)
    assert sorted(os.listdir(tmp_path)) == ["some-00001-of-00002.safetensors", "some.safetensors"]


@pytest.mark.parametrize(
    ("tensors", "file", "words"),
    [
        ({"a": 3}, "x.safetensors", "a is a int"),
        ({"a": torch.ones(2)}, "x.bin", r"call it x\.safetensors"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "x.safetensors", "dtype torch.complex64"),
        ({"a": torch.ones(2)}, "file/x.safetensors", "cannot be written"),
    ],
)
def test_what_one_file_cannot_hold_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], file: str, words: str
) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    with pytest.raises(CheckpointError, match=words):
        export_tensors(tensors, tmp_path / file)
    assert os.listdir(tmp_path) == ["file"]


def test_a_tensor_made_of_others_is_refused_by_name(tmp_path: Path) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    tensors = {"plain": torch.ones(2), "pair": TwoTensor(torch.ones(2), torch.zeros(2))}
    for export, place in ((export_tensors, tmp_path / "a.safetensors"), (export_model, tmp_path)):
        with pytest.raises(CheckpointError, match=r"pair is a torch\.testing.*TwoTensor, a tensor made of others"):
            export(tensors, place)
    assert os.listdir(tmp_path) == []
