"""Files of the user's own in checkpoints: written by hooks, or put there by hand."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel_ckpt import open_checkpoint
from accel_state.errors import CheckpointCorruptError, CheckpointError


@pytest.mark.parametrize("asynchronous", [False, True])
def test_files_that_hooks_write_are_part_of_the_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    places = []

    def write(models: list[nn.Module], weights: list[object], folder: str) -> None:
        places.append(folder)
        (Path(folder) / "unet").mkdir()
        (Path(folder) / "unet" / "config.json").write_text(f'{{"number": {len(places)}}}')
        (Path(folder) / "note.txt").write_text("seen")

    accelerator.register_save_state_pre_hook(write)
    for _ in range(2):  # the second replaces the first
        accelerator.save_state(tmp_path / "saved", asynchronous=asynchronous)
    accelerator.end_training()
    assert not any(Path(place).exists() for place in places)
    saved = open_checkpoint(tmp_path / "saved")
    assert sorted(saved.manifest.extra) == ["note.txt", "unet/config.json"]
    seen = []
    handle = accelerator.register_load_state_pre_hook(
        lambda models, folder: seen.append((Path(folder) / "unet" / "config.json").read_text())
    )
    accelerator.load_state(tmp_path / "saved")
    assert seen == ['{"number": 2}']
    handle.remove()
    (tmp_path / "saved" / "unet" / "config.json").write_text('{"number": 3}')
    with pytest.raises(CheckpointCorruptError, match=r"unet/config.json"):
        open_checkpoint(tmp_path / "saved")


@pytest.mark.ranks(2)
def test_hooks_of_every_rank_write_into_the_same_checkpoint(tmp_path: Path, rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))

    def write(models: list[nn.Module], weights: list[object], folder: str) -> None:
        (Path(folder) / f"of-{rank}.txt").write_text(str(rank))
        if accelerator.is_main_process:
            (Path(folder) / "common.txt").write_text("main")

    accelerator.register_save_state_pre_hook(write)
    accelerator.save_state(tmp_path / "saved")
    saved = open_checkpoint(tmp_path / "saved")
    assert sorted(saved.manifest.extra) == ["common.txt", "of-0.txt", "of-1.txt"]


@pytest.mark.parametrize("name", ["tree.json", "manifest.json", "tensors-00000.safetensors"])
def test_a_hook_that_takes_a_name_of_the_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: (Path(folder) / name).write_text("x"))
    with pytest.raises(CheckpointError, match=f"a hook wrote {name}"):
        accelerator.save_state(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_what_a_user_puts_into_a_checkpoint_outlives_its_replacement(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "saved")
    (tmp_path / "saved" / "README.md").write_text("mine")
    (tmp_path / "saved" / "plots").mkdir()
    (tmp_path / "saved" / "plots" / "loss.png").write_text("mine too")
    for _ in range(2):
        accelerator.save_state(tmp_path / "saved")
    assert (tmp_path / "saved" / "README.md").read_text() == "mine"
    assert (tmp_path / "saved" / "plots" / "loss.png").read_text() == "mine too"
    accelerator.load_state(tmp_path / "saved")


def written(rank: int, accelerator: Accelerator) -> Callable[[list[nn.Module], list[object], str], None]:
    """A hook as diffusers has it: it saves models by their own means into the folder, and takes them off the list."""

    def save(models: list[nn.Module], weights: list[object], folder: str) -> None:
        assert Path(folder).is_dir()
        (Path(folder) / f"of-{rank}.txt").write_text(str(rank))
        (Path(folder) / "both.txt").write_text(f"rank {rank}")
        if accelerator.is_main_process:
            for number, model in enumerate(models):
                (Path(folder) / "unet" / str(number)).mkdir(parents=True)
                own = {name: value.tolist() for name, value in accelerator.unwrap_model(model).state_dict().items()}
                (Path(folder) / "unet" / str(number) / "weights.json").write_text(json.dumps(own))
        while weights:
            weights.pop()

    return save


def read(models: list[nn.Module], folder: str) -> None:
    for number in reversed(range(len(models))):
        state = json.loads((Path(folder) / "unet" / str(number) / "weights.json").read_text())
        model = getattr(models[number], "module", models[number])
        model.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
        models.pop()


def through_a_url(place: str, rank: int, *, asynchronous: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    folders: list[str] = []
    save = written(rank, accelerator)
    accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: (folders.append(folder), save(models, weights, folder))
    )
    for value in (1.0, 2.0):  # the second replaces the first
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        accelerator.save_state(place, asynchronous=asynchronous)
    accelerator._checkpointer.wait()
    accelerator.wait_for_everyone()
    with open_checkpoint(place) as saved:
        ranks = [f"of-{one}.txt" for one in range(accelerator.num_processes)]
        assert sorted(saved.manifest.extra) == sorted(["both.txt", *ranks, "unet/0/weights.json"])
        assert b"".join(saved.extra_pieces("both.txt")) == b"rank 0"
        assert saved.names == ["clock"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.register_load_state_pre_hook(lambda models, folder: (folders.append(folder), read(models, folder)))
    accelerator.load_state(place)
    assert {value for parameter in model.parameters() for value in parameter.flatten().tolist()} == {2.0}
    assert len(folders) == 3
    assert not any(Path(folder).exists() for folder in folders)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_hooks_write_into_checkpoints_behind_urls_and_read_them_again(asynchronous: bool) -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("tenacity")
    through_a_url(f"memory://hooked-{asynchronous}", 0, asynchronous=asynchronous)


@pytest.mark.ranks(2)
def test_hooks_of_all_ranks_write_into_a_checkpoint_behind_a_url(tmp_path: Path, rank: int) -> None:
    """A folder under a scheme of its own, as memory:// belongs to one process."""
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("tenacity")
    from fsspec.implementations.local import LocalFileSystem

    class Shared(LocalFileSystem):  # type: ignore[misc]
        protocol = "shared"

        def __init__(self) -> None:
            super().__init__(auto_mkdir=True)

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            stripped: str = LocalFileSystem._strip_protocol(str(path).removeprefix("shared://"))
            return stripped

    fsspec.register_implementation("shared", Shared, clobber=True)
    through_a_url(f"shared://{tmp_path}/hooked", rank, asynchronous=False)


@pytest.mark.parametrize("name", ["tree.json", "begun", "tensors-00000.safetensors"])
def test_a_hook_that_takes_a_name_of_the_checkpoint_behind_a_url_is_refused(name: str) -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("tenacity")
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: (Path(folder) / name).write_text("x"))
    with pytest.raises(CheckpointError, match=f"a hook wrote {name}"):
        accelerator.save_state(f"memory://refused-{name}")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        open_checkpoint(f"memory://refused-{name}")
