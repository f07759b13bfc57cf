import ast
import gc
import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import accel_ckpt
from accel_ckpt import open_checkpoint
from accel_ckpt.format.blocks import BLOCK
from accel_state.collectives import pickled
from accel_state.errors import CheckpointError, CheckpointMismatchError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def save_one(path: Path, value: Any) -> Any:
    accel_ckpt.save(path / "one", {"x": value})
    return accel_ckpt.open_checkpoint(path / "one").read("x")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 5)], ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randint(0, 2, shape).to(dtype)
    back = save_one(tmp_path, {"t": value})["t"]
    assert back.dtype == dtype
    assert back.shape == value.shape
    assert bits(back) == bits(value)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1:],
        lambda t: t.expand(2, 4, 6),
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.complex(t, t).conj().imag,
        lambda t: t.clone().requires_grad_(),
        lambda t: torch.nn.Parameter(t),
    ],
    ids=["transposed", "strided", "expanded", "conjugate", "negated", "leaf", "parameter"],
)
def test_views_are_saved_by_value(tmp_path: Path, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    value = view(torch.randn(4, 6))
    back = save_one(tmp_path, [value])[0]
    assert torch.equal(back, value)
    assert not back.requires_grad


def test_a_tensor_larger_than_a_block_comes_back(tmp_path: Path) -> None:
    big = torch.arange(BLOCK // 4 + 12345, dtype=torch.int32)
    small = {f"s{i}": torch.full((3,), i) for i in range(50)}
    saved = accel_ckpt.save(tmp_path / "one", {"x": {"big": big, **small}})
    assert len(saved.manifest.files["tensors-00000.safetensors"].blocks) == 2
    back = accel_ckpt.open_checkpoint(tmp_path / "one", verify=False).read("x")
    assert torch.equal(back["big"], big)
    assert all(torch.equal(back[key], value) for key, value in small.items())


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    weight = torch.randn(100, 100)
    back = save_one(tmp_path, {"embedding": weight, "head": weight})
    assert back["embedding"] is back["head"]
    assert (tmp_path / "one" / "tensors-00000.safetensors").stat().st_size < 1.1 * 40_000


def test_a_training_state_comes_back(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    accel_ckpt.save(tmp_path / "one", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    saved = accel_ckpt.open_checkpoint(tmp_path / "one")
    other = torch.nn.Linear(3, 2)
    other.load_state_dict(saved.read("model", like=other.state_dict()))
    again = torch.optim.AdamW(other.parameters())
    again.load_state_dict(saved.read("optimizer"))
    assert again.param_groups[0]["betas"] == (0.9, 0.95)
    assert torch.equal(again.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_random_states_and_metadata_come_back(tmp_path: Path) -> None:
    accel_ckpt.save(
        tmp_path / "one",
        {},
        local={
            "rng": {"cpu": torch.get_rng_state(), "numpy": [int(x) for x in np.random.RandomState(1).get_state()[1]]}
        },
        metadata={"epoch": 3, "loss": np.float32(0.25), "betas": (1, 2), "nan": float("nan")},
    )
    saved = accel_ckpt.open_checkpoint(tmp_path / "one")
    assert saved.names == []
    assert saved.local_names(0) == ["rng"]
    assert torch.equal(saved.read_local("rng", 0)["cpu"], torch.get_rng_state())
    assert repr(saved.metadata) == repr({"epoch": 3, "loss": 0.25, "betas": (1, 2), "nan": float("nan")})


def test_the_tensor_file_is_one_that_safetensors_reads(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = {"a.weight": torch.randn(3, 4), "a.bias": torch.randn(4).bfloat16(), "n": torch.tensor(3)}
    accel_ckpt.save(tmp_path / "one", {"model": state})
    read = load_file(tmp_path / "one" / "tensors-00000.safetensors")
    assert {key: value.tolist() for key, value in read.items()} == {
        f"model/{key}": value.tolist() for key, value in state.items()
    }


def test_missing_unexpected_and_mismatched_are_listed(tmp_path: Path) -> None:
    saved = accel_ckpt.save(tmp_path / "one", {"x": {"a": torch.zeros(2), "b": torch.zeros(3), "lr": 1.0}})
    like = {"a": torch.zeros(2), "b": torch.zeros(4), "bb": torch.zeros(1), "lr": 2.0}
    with pytest.raises(CheckpointMismatchError, match=r"missing: bb; mismatched: b \(shape \(3,\) saved, shape \(4,\)"):
        saved.read("x", like=like)
    assert saved.compare("x", {"a": torch.zeros(2)}).unexpected == ("b", "lr")
    assert not saved.compare("x", {"a": torch.ones(2), "b": torch.ones(3), "lr": 0})
    lenient = saved.read("x", like=like, strict=False)
    assert sorted(lenient) == ["a", "b", "lr"]
    assert lenient["b"].shape == (3,)


def test_an_unknown_name_lists_those_that_are_there(tmp_path: Path) -> None:
    saved = accel_ckpt.save(tmp_path / "one", {"model": {}, "scheduler": {}})
    with pytest.raises(CheckpointError, match="holds no 'optimizer'; it holds 'model', 'scheduler'"):
        saved.read("optimizer")


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(2, device="meta"), "meta device"),
        (torch.eye(3).to_sparse(), "to_dense"),
        (freed(torch.ones(2)), r"torch\.Tensor without memory of its own \(its storage was freed"),
    ],
    ids=["meta", "sparse", "freed"],
)
def test_tensors_without_plain_values_are_refused_by_name(tmp_path: Path, value: torch.Tensor, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        accel_ckpt.save(tmp_path / "one", {"model": {"w": value}})
    assert "model/w" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("limit", "said"), [("safetensors_file.MAX_HEADER", "shorten the keys"), ("manifest.MAX_DOCUMENT", "into tensors")]
)
def test_what_no_reader_would_take_is_refused_when_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, said: str
) -> None:
    monkeypatch.setattr(f"accel_ckpt.format.{limit}", 4000)
    with pytest.raises(CheckpointError, match=said):
        accel_ckpt.save(tmp_path / "one", {"model": {"w" * 4000: torch.ones(2)}, "numbers": [*range(2000)]})
    assert list(tmp_path.iterdir()) == []


def test_an_uninitialised_parameter_takes_what_was_saved(tmp_path: Path) -> None:
    made, lazy = torch.nn.Linear(3, 2), torch.nn.LazyLinear(2)
    saved = accel_ckpt.save(tmp_path / "one", {"model": made.state_dict()})
    lazy.load_state_dict(saved.read("model", like=lazy.state_dict()))
    assert torch.equal(lazy.weight, made.weight)


@pytest.mark.parametrize("given", [{"state": [1]}, {"state": None}, {"state": {}, "metadata": [1]}], ids=str)
def test_what_has_no_names_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(CheckpointError, match="expected values by name"):
        accel_ckpt.save(tmp_path / "one", **given)


def test_names_of_any_text_are_kept_apart(tmp_path: Path) -> None:
    names = ["a/b", "a~1b", "a@0", "../../etc", "", "ä", "a\nb", "$tensor"]
    tree = {name: torch.tensor(number) for number, name in enumerate(names)} | {
        0: torch.tensor(8),
        "0": torch.tensor(9),
    }
    back = save_one(tmp_path, tree)
    assert [(key, value.item()) for key, value in back.items()] == [(key, value.item()) for key, value in tree.items()]
    assert sorted(os.listdir(tmp_path)) == ["one"]


def test_overwriting_replaces_at_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    for number in range(3):
        assert save_one(tmp_path, {"n": number}) == {"n": number}
    assert os.listdir(tmp_path) == ["one"]


def test_a_place_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="a folder with other files is there"):
        save_one(tmp_path, {})
    assert (tmp_path / "one" / "notes.txt").read_text() == "mine"


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    assert save_one(tmp_path, {"n": 1}) == {"n": 1}


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("")
    with pytest.raises(CheckpointError, match="a file is there"):
        save_one(tmp_path, {})


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written: .*file"):
        accel_ckpt.save(tmp_path / "file" / "deeper" / "one", {})


def test_without_overwriting_what_is_there_stays(tmp_path: Path) -> None:
    accel_ckpt.save(tmp_path / "one", {"x": 1})
    with pytest.raises(CheckpointError, match="a checkpoint is there already"):
        accel_ckpt.save(tmp_path / "one", {"x": 2}, overwrite=False)
    assert accel_ckpt.open_checkpoint(tmp_path / "one").read("x") == 1


def test_a_folder_that_is_no_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        accel_ckpt.open_checkpoint(tmp_path)


def test_a_wrong_path_names_the_nearest(tmp_path: Path) -> None:
    accel_ckpt.save(tmp_path / "checkpoint_7", {})
    with pytest.raises(CheckpointError, match="near it: checkpoint_7"):
        accel_ckpt.open_checkpoint(tmp_path / "checkpoint_77")


def test_reading_and_writing_never_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object, **__: object) -> None:
        raise AssertionError("pickle was used")

    for owner, name in [
        (pickle, "loads"),
        (pickle, "load"),
        (pickle, "dumps"),
        (pickle, "dump"),
        (torch, "load"),
        (torch, "save"),
    ]:
        monkeypatch.setattr(owner, name, forbid)
    monkeypatch.setattr(pickle, "Unpickler", forbid)
    assert save_one(tmp_path, {"t": torch.ones(3), "n": 1})["n"] == 1


def names_used(tree: ast.AST) -> set[str]:
    """The names that code calls or imports, dotted where it writes them so; words inside of strings do not count."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
        elif isinstance(node, ast.Name | ast.Attribute):
            names.add(ast.unparse(node))
    return names


def test_the_sources_use_no_pickle() -> None:
    forbidden = {"pickle", "torch.load", "torch.save", "marshal", "shelve", "eval", "exec"}
    sources = list(Path(accel_ckpt.__file__).parent.rglob("*.py"))
    found = [(path.name, name) for path in sources for name in names_used(ast.parse(path.read_text())) & forbidden]
    assert found == []
    assert names_used(ast.parse("from pickle import loads; torch.load(f); eval(s); 'marshal'")) & forbidden == {
        "pickle", "torch.load", "eval"
    }  # fmt: skip


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    accel_ckpt.save(tmp_path / "one", {"x": {"t": torch.ones(2)}})
    document = json.loads((tmp_path / "one" / "manifest.json").read_text())
    assert document["format"] == "accel-checkpoint"
    assert document["tensors"]["x/t"] == {
        "dtype": "float32", "shape": [2], "parts": [["tensors-00000.safetensors", "x/t", [0], [2]]],
    }  # fmt: skip


def test_with_sha256_the_seal_stands_for_every_byte(tmp_path: Path) -> None:
    saved = accel_ckpt.save(tmp_path / "one", {"t": torch.ones(9)}, digest="sha256")
    file = tmp_path / "one" / "tensors-00000.safetensors"
    assert saved.manifest.files[file.name].blocks == (hashlib.sha256(file.read_bytes()).hexdigest(),)
    assert torch.equal(accel_ckpt.open_checkpoint(tmp_path / "one").read("t"), torch.ones(9))


def test_what_was_fetched_is_known_to_be_intact_before_it_is_put_anywhere(tmp_path: Path) -> None:
    state = {"one": {"w": torch.arange(10.0)}, "two": {"w": torch.arange(20.0)}}
    accel_ckpt.save(tmp_path / "a", state)
    opened = accel_ckpt.open_checkpoint(tmp_path / "a", verify=False)
    put = opened.fetch({name: {"w": torch.empty(0)} for name in opened.names})
    opened.verify()
    (tmp_path / "a" / "tensors-00000.safetensors").unlink()
    assert torch.equal(put["one"]()["w"], torch.arange(10.0))
    assert torch.equal(put["two"]()["w"], torch.arange(20.0))
    assert torch.equal(put["two"]()["w"], torch.arange(20.0)), "as often as it is asked for"


def test_what_is_fetched_in_place_lies_in_the_memory_that_is_there(tmp_path: Path) -> None:
    accel_ckpt.save(tmp_path / "a", {"m": {"w": torch.arange(6.0).view(2, 3), "n": {"step": torch.tensor(3.0)}}})
    own = torch.nn.Parameter(torch.zeros(2, 3))
    like = {"w": own, "n": {"step": torch.tensor(0.0)}}
    put = accel_ckpt.open_checkpoint(tmp_path / "a", verify=False).fetch({"m": like}, in_place=True)["m"]()
    assert torch.equal(own, torch.arange(6.0).view(2, 3))
    assert put["w"] is own
    assert put["n"]["step"] is like["n"]["step"]


def strided() -> dict[str, torch.Tensor]:
    return {"one": torch.zeros(3, 2).T, "two": torch.zeros(2, 3)}


def overlapping() -> dict[str, torch.Tensor]:
    both = torch.zeros(9)
    return {"one": both[:6].view(2, 3), "two": both[3:].view(2, 3)}


def computed() -> dict[str, torch.Tensor]:
    return {"one": torch.zeros(2, 3, requires_grad=True) * 1, "two": torch.zeros(2, 3)}


@pytest.mark.parametrize(
    "make",
    [
        strided,
        overlapping,
        computed,
        lambda: {"one": torch.zeros(2, 3, dtype=torch.float64), "two": torch.zeros(2, 3)},
        lambda: {"one": torch.zeros(3, 2), "two": torch.zeros(2, 3)},
        lambda: {"one": torch.empty(2, 3, device="meta"), "two": torch.zeros(2, 3)},
    ],
    ids=["strided", "overlapping", "computed", "another dtype", "another shape", "meta"],
)
def test_memory_that_cannot_take_the_saved_bytes_is_left_alone(
    tmp_path: Path, make: Callable[[], dict[str, torch.Tensor]]
) -> None:
    saved = {"one": torch.arange(6.0).view(2, 3), "two": torch.arange(6.0, 12.0).view(2, 3)}
    accel_ckpt.save(tmp_path / "a", {"m": saved})
    like = make()
    put = accel_ckpt.open_checkpoint(tmp_path / "a").fetch({"m": like}, in_place=True)["m"]()
    assert put["one"] is not like["one"]
    assert like["one"].device.type == "meta" or not like["one"].any()
    assert all(torch.equal(put[name], values) for name, values in saved.items())


def test_a_template_of_a_place_is_never_written(tmp_path: Path) -> None:
    accel_ckpt.save(tmp_path / "a", {"m": {"w": torch.ones(4)}})
    template = torch.zeros(4)
    opened = accel_ckpt.open_checkpoint(tmp_path / "a")
    put = opened.fetch({"m": {}}, places={"m": lambda path, dtype, shape: template}, in_place=True)["m"]()
    assert torch.equal(put["w"], torch.ones(4))
    assert not template.any()


def test_tensors_tied_when_saved_are_read_into_each_of_several_places(tmp_path: Path) -> None:
    tied = torch.ones(4)
    accel_ckpt.save(tmp_path / "a", {"m": {"one": tied, "two": tied}})
    like = {"one": torch.zeros(4), "two": torch.zeros(4)}
    put = accel_ckpt.open_checkpoint(tmp_path / "a").fetch({"m": like}, in_place=True)["m"]()
    assert all(put[name] is like[name] and bool(like[name].all()) for name in like)


def test_files_of_a_checkpoint_that_nobody_holds_are_closed_at_once(tmp_path: Path) -> None:
    """Without the garbage collector: a service that looks for the newest checkpoint opens thousands."""
    accel_ckpt.save(tmp_path / "one", {"x": {"t": torch.ones(8)}})
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            assert accel_ckpt.open_checkpoint(tmp_path / "one").read("x")["t"].sum() == 8
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


@pytest.mark.ranks(2)
def test_entries_of_the_manifest_go_to_the_first_rank_only(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[int] = []
    known = pickled._as_object

    def counted(data: torch.Tensor, length: int) -> object:
        received.append(length)
        return known(data, length)

    monkeypatch.setattr(pickled, "_as_object", counted)
    state = {"model": {f"layer.{number}": torch.full((3,), float(number)) for number in range(500)}}
    accel_ckpt.save(tmp_path / "a", state)
    entries = sum(size for size in received if size > 5000)
    assert (entries > 0) == (rank == 0)
    assert len(open_checkpoint(tmp_path / "a").manifest.tensors) == 500
