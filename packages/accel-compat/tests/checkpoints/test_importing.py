"""Folders that a real Accelerate wrote become checkpoints, and a run that loads one is the run that was saved.

``data/make_folders.py`` wrote the folders in ``data``, and beside each what its run held.
"""

import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file

import accel
from accel_ckpt import open_checkpoint
from accel_compat.checkpoints.importing import import_folder
from accel_compat.checkpoints.optimizer_names import ordered
from accel_launch.cli.app import run
from accel_state import rng
from accel_state.errors import CheckpointError

DATA = Path(__file__).parent / "data"
sys.path.insert(0, str(DATA))
from make_folders import Progress, build, build_model  # noqa: E402

FOLDERS = sorted(path for path in DATA.iterdir() if path.is_dir() and path.name[0].isdigit())
BUILD = f"{DATA / 'make_folders.py'}:build"


def loaded(checkpoint: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer, object, Progress]:
    accelerator = accel.Accelerator(cpu=True)
    model, optimizer = build()
    for one in model.parameters():
        torch.nn.init.constant_(one, 9.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = torch.utils.data.DataLoader(torch.zeros(8, 3), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    progress = Progress()
    progress.best = 0.0
    accelerator.register_for_checkpointing(progress)
    accelerator.load_state(checkpoint)
    assert accelerator.last_load is not None
    assert accelerator.last_load.kept == ("loader",)
    accelerator.end_training()
    return model, optimizer, scheduler, progress


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda one: one.name)
def test_a_run_that_loads_the_import_has_the_saved_state(tmp_path, folder):
    report = import_folder(folder, tmp_path / "out", model=build)
    model, optimizer, scheduler, progress = loaded(tmp_path / "out")
    held = load_file(folder / "held_0.safetensors")
    assert torch.equal(torch.rand(4), held.pop("draw"))
    random.seed(0)
    np.random.seed(0)
    later = random.random(), np.random.rand()
    assert report.ranks == len(list(folder.glob("random_states_*.pkl")))
    assert progress.best == 0.25
    assert torch.equal(torch.tensor(scheduler.get_last_lr()), held.pop("lr"))
    names = dict(model.named_parameters())
    here = {f"model/{name}": one.detach() for name, one in names.items()}
    here |= {
        f"{key}/{name}": optimizer.optimizer.state[one][key]
        for name, one in names.items()
        for key in ("exp_avg", "exp_avg_sq")
        if one in optimizer.optimizer.state
    }
    assert here.keys() == held.keys()
    assert len(held) == 20
    for name, value in held.items():
        assert torch.equal(here[name], value), name
    loaded(tmp_path / "out")
    assert (random.random(), np.random.rand()) == later


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_has_its_random_state(tmp_path, rank):
    import_folder(DATA / "1.15.0-ddp", tmp_path / "out", model=build)
    with open_checkpoint(tmp_path / "out") as saved:
        assert saved.world_size == 2
        rng.set_rng_state(saved.read_local("rng", rank), strict=False)
    assert torch.equal(torch.rand(4), load_file(DATA / "1.15.0-ddp" / f"held_{rank}.safetensors")["draw"])


def test_the_command_writes_a_checkpoint_and_says_what_it_means(tmp_path, capsys):
    out = tmp_path / "out"
    assert run(["ckpt", "import", str(DATA / "1.15.0-ddp"), str(out), "--model", BUILD]) == 0
    said = capsys.readouterr().out
    assert f"wrote {out} from plain: model, optimizer, scheduler, clock, custom; random states of 2 ranks" in said
    assert 'scheduler_steps="per_process"' in said
    assert run(["ckpt", "verify", str(out)]) == 0
    assert run(["ckpt", "import", str(DATA / "1.15.0-ddp"), str(out), "--model", BUILD]) == 2
    assert "a checkpoint is there already" in capsys.readouterr().err
    assert run(["ckpt", "import", str(DATA / "1.15.0-single"), str(tmp_path / "b"), "--model", BUILD, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 1


def test_names_that_shapes_do_not_tell_are_asked_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"optimizer 0 was saved by the numbers.*give --model MODULE:BUILD"):
        import_folder(DATA / "1.15.0-single", tmp_path / "out")
    report = import_folder(DATA / "1.15.0-single", tmp_path / "out", model=build_model)
    assert "optimizer" in report.states
    with pytest.raises(
        CheckpointError, match=r"model 0 of the folder has first.bias, which that of --model does not have"
    ):
        import_folder(DATA / "1.15.0-single", tmp_path / "two", model=torch.nn.Linear(3, 3))


def test_names_that_shapes_tell_need_no_model(tmp_path, folder):
    saved = {"a.weight": torch.zeros(2, 3), "a.bias": torch.zeros(2), "b": torch.zeros(5)}
    safetensors.torch.save_file(saved, folder / "model.safetensors")
    moments = [{"step": torch.tensor(1.0), "exp_avg": torch.ones_like(saved[name])} for name in ("b", "a.weight")]
    groups = [{"lr": 0.1, "params": [1]}, {"lr": 0.2, "params": [0]}]
    torch.save({"state": dict(enumerate(moments)), "param_groups": groups}, folder / "optimizer.bin")
    import_folder(folder, tmp_path / "out")
    with open_checkpoint(tmp_path / "out") as checkpoint:
        read = checkpoint.read("optimizer")
    assert {name: tuple(one["exp_avg"].shape) for name, one in read["state"].items()} == {"b": (5,), "a.weight": (2, 3)}
    assert [group["params"] for group in read["param_groups"]] == [["a.weight"], ["b"]]


@pytest.mark.parametrize(
    ("shapes", "known", "ways"),
    [
        ([[(2,), (3,)]], {"a": (2,), "b": (3,)}, [[["a", "b"]]]),
        ([[None, (3,)]], {"a": (2,), "b": (3,)}, [[["a", "b"]]]),
        ([[(3,)], [(2,)]], {"a": (2,), "b": (3,)}, [[["b"], ["a"]]]),
        ([[(2,)]], {"a": (2,), "b": (2,)}, [[["b"]], [["a"]]]),
        ([[(2,)], [(2,)]], {"a": (2,), "b": (2,)}, [[["a"], ["b"]], [["b"], ["a"]]]),
        ([[(4,)]], {"a": (2,)}, []),
        ([[(2,), (2,)]], {"a": (2,)}, []),
    ],
)
def test_names_are_given_in_the_order_of_the_model(shapes, known, ways):
    assert sorted(ordered(shapes, known)) == sorted(ways)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "1.15.0-single", tmp_path / "folder"))


class Foreign:
    """Something that only a pickle holds."""


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda at: (at / "model.safetensors").unlink(), "has no weights that save_state of Accelerate wrote"),
        (lambda at: (at / "random_states_0.pkl").rename(at / "random_states_1.pkl"), "lacks random_states_0.pkl"),
        (lambda at: (at / "optimizer.bin").write_bytes(b"x"), "optimizer.bin cannot be read"),
        (lambda at: (at / "manifest.json").write_text("{}"), "is a checkpoint of accel already"),
        (lambda at: (at / "pytorch_model_fsdp_rank0.bin").write_bytes(b""), "has a file of each rank"),
        (lambda at: (at / "model.safetensors").write_bytes(b"damaged"), "model.safetensors cannot be read"),
        (
            lambda at: torch.save(Foreign(), at / "custom_checkpoint_0.pkl"),
            r"it holds \S*test_importing.Foreign; .*--trust-pickle runs the code",
        ),
        (lambda at: shutil.rmtree(at), "is no folder"),
    ],
)
def test_what_cannot_be_read_is_refused_and_nothing_is_written(tmp_path, folder, damage, message):
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        import_folder(folder, tmp_path / "out", model=build)
    assert not (tmp_path / "out").exists()


def test_a_trusted_pickle_must_hold_what_a_checkpoint_can(tmp_path, folder):
    torch.save(Foreign(), folder / "custom_checkpoint_0.pkl")
    with pytest.raises(CheckpointError, match=r"custom is a .*Foreign, which a checkpoint does not hold"):
        import_folder(folder, tmp_path / "out", model=build, trust_pickle=True)


def test_a_class_that_cannot_be_imported_is_named(tmp_path, folder, monkeypatch):
    torch.save(Foreign(), folder / "custom_checkpoint_0.pkl")
    monkeypatch.delattr(sys.modules[__name__], "Foreign")
    with pytest.raises(
        CheckpointError, match=r"custom_checkpoint_0.pkl cannot be read: .*Foreign.*test_importing.*__main__"
    ):
        import_folder(folder, tmp_path / "out", model=build, trust_pickle=True)


def test_a_damaged_pickle_that_is_trusted_is_an_error_of_the_checkpoint(tmp_path, folder):
    (folder / "custom_checkpoint_0.pkl").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0.pkl cannot be read"):
        import_folder(folder, tmp_path / "out", model=build, trust_pickle=True)


def test_the_prefix_of_ddp_on_one_rank_is_removed_or_noted(tmp_path, folder):
    saved = load_file(folder / "model.safetensors")
    safetensors.torch.save_file({f"module.{name}": one for name, one in saved.items()}, folder / "model.safetensors")
    assert not any("under DDP" in note for note in import_folder(folder, tmp_path / "out", model=build).notes)
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert set(checkpoint.read("model")) == set(saved)
    (folder / "optimizer.bin").unlink()
    report = import_folder(folder, tmp_path / "unnamed")
    assert any("every name of model 0 begins with module., as under DDP" in note for note in report.notes)


def test_groups_beyond_comparison_are_ambiguous(tmp_path, folder):
    count, size = 24, 12
    shapes = [[None] * (size // 2)] * count
    assert ordered(shapes, {str(place): (2,) for place in range(count * size)}) is None
    saved = {f"{place:03}": torch.zeros(2) for place in range(count * size)}
    (folder / "model.safetensors").unlink()
    torch.save(saved, folder / "pytorch_model.bin")
    groups = [{"params": list(range(place * 6, place * 6 + 6))} for place in range(count)]
    torch.save({"state": {}, "param_groups": groups}, folder / "optimizer.bin")
    with pytest.raises(CheckpointError, match=r"its parameters could have several names; give --model"):
        import_folder(folder, tmp_path / "out")


def test_the_folder_above_names_the_nearest(tmp_path, folder):
    with pytest.raises(CheckpointError, match=f"nearest: {folder}"):
        import_folder(folder.parent, tmp_path / "out", model=build)
