"""Files of torch and of safetensors."""

import io
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from accel_compat.checkpoints.pickles import load, save


def test_tensors_mapped_from_a_file_keep_their_values_when_it_is_saved_again(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    save({"weight": torch.ones(4096)}, path)
    mapped = load(path, mmap=True)["weight"]
    save({"weight": torch.zeros(4096)}, path)
    assert torch.equal(mapped, torch.ones(4096))
    assert torch.equal(load(path)["weight"], torch.zeros(4096))


@pytest.mark.parametrize("safe", [False, True])
def test_a_failed_save_leaves_the_file_and_nothing_beside_it(tmp_path, safe):
    path = tmp_path / "model"
    save({"weight": torch.ones(2)}, path, safe_serialization=safe)
    before = path.read_bytes()
    with pytest.raises((AttributeError, TypeError, ValueError)):
        save({"weight": lambda: None}, path, safe_serialization=safe)
    assert [one.name for one in tmp_path.iterdir()] == ["model"]
    assert path.read_bytes() == before


def test_weights_side_by_side_in_one_storage_are_all_saved(tmp_path):
    flat = torch.arange(6.0)
    state = {"first": flat[:2], "second": flat[2:].view(2, 2), "tied": flat[:2], "no": torch.empty(0), "none": flat[:0]}
    save(state, tmp_path / "model.safetensors", safe_serialization=True)
    read = load_file(tmp_path / "model.safetensors")
    assert {name: one.tolist() for name, one in read.items()} == {
        "first": [0.0, 1.0],
        "second": [[2.0, 3.0], [4.0, 5.0]],
        "no": [],
        "none": [],
    }


def test_an_open_file_is_written_to():
    file = io.BytesIO()
    save({"step": 3}, file)
    file.seek(0)
    assert load(file) == {"step": 3}


@pytest.mark.parametrize("core", [b"core", b"_core"])
def test_arrays_of_either_numpy_are_read(tmp_path, core):
    torch.save({"array": np.arange(3, dtype=np.uint32), "scalar": np.float64(0.5)}, tmp_path / "here")
    with zipfile.ZipFile(tmp_path / "here") as here, zipfile.ZipFile(tmp_path / "there", "w") as there:
        for name in here.namelist():
            content = here.read(name)
            if name.endswith("data.pkl"):
                content = content.replace(b"numpy._core.", b"numpy.core.").replace(
                    b"numpy.core.", b"numpy." + core + b"."
                )
                assert content.count(b"cnumpy." + core + b".multiarray\n") == 2
            there.writestr(name, content)
    read = load(tmp_path / "there")
    assert read["array"].tolist() == [0, 1, 2]
    assert read["array"].dtype == np.uint32
    assert read["scalar"] == 0.5
