"""What ``save_state`` saved, ``load_state`` puts back: bit for bit, on any number of processes, or it says why not."""

import copy
import json
import os
import random
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel import Accelerator, DataLoaderConfiguration, ProjectConfiguration
from accel.utils import set_seed
from accel_ckpt import open_checkpoint
from accel_ckpt.format.blocks import BLOCK
from accel_state.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CollectiveError,
    ConfigError,
    DataStateError,
    SessionError,
)
from accel_testing.faults.faults import injected


class Numbered(Dataset):
    """Samples that carry their own number."""

    def __init__(self, count: int = 96) -> None:
        self.rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.rows[index]


class Run:
    """One training run with dropout, a norm with buffers, a schedule and a shuffled loader."""

    def __init__(self, accelerator: Accelerator, *, batch: int = 4, width: int = 6) -> None:
        set_seed(5)
        model = nn.Sequential(
            nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Tanh(), nn.Linear(width, 1)
        ).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
        loader = DataLoader(Numbered(), batch_size=batch, shuffle=True)
        self.accelerator = accelerator
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.batches = self._forever()

    def _forever(self):
        while True:
            yield from self.loader

    def train(self, micro_steps: int) -> list[tuple[list[int], float]]:
        """Ids and loss of every micro-batch; a fresh iterator, as a resumed script has."""
        seen = []
        for _ in range(micro_steps):
            ids, rows = next(self.batches)
            with self.accelerator.accumulate(self.model):
                loss = self.model(rows).square().mean() + (torch.rand(()) + random.random()) * 1e-3
                self.accelerator.backward(loss)
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            seen.append((ids.tolist(), loss.item()))
        return seen

    def weights(self) -> list[torch.Tensor]:
        state = self.accelerator.get_state_dict(self.model)
        return [state[name].clone() for name in sorted(state)]


def check_resumes(folder: Path, before: int, *, accumulate: int, workers: int = 0) -> None:
    """Trains ``before`` micro-steps, saves, trains on; a new run loads and must do the same, bit for bit."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    run = Run(accelerator)
    run.train(before)
    accelerator.save_state(folder / "saved")
    expected, weights = run.train(15), run.weights()
    again = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    other = Run(again)
    other.train(3)  # so that everything has another value than at the start
    other.batches.close()
    again.load_state(folder / "saved")
    other.batches = other._forever()
    assert other.train(15) == expected
    assert all(torch.equal(one, two) for one, two in zip(other.weights(), weights, strict=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("before", [0, 6, 7, 24])
def test_one_process_resumes_bit_for_bit(tmp_path: Path, before: int, accumulate: int) -> None:
    check_resumes(tmp_path, before, accumulate=accumulate)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("before", [6, 7])
@pytest.mark.sampled(1)
def test_two_processes_resume_bit_for_bit(tmp_path: Path, before: int, accumulate: int) -> None:
    check_resumes(tmp_path, before, accumulate=accumulate)


# The same global batches on any number of processes: what is saved by P and loaded by Q goes on as if nothing happened.

GLOBAL = 12


@pytest.mark.parametrize("skipped", [0, 7])
def test_scripts_that_skip_what_is_behind_them_resume_bit_for_bit(tmp_path: Path, skipped: int) -> None:
    """They count batches themselves and go on with the loader, whose own position was restored too, an epoch later."""
    accelerator = Accelerator(cpu=True)
    run = Run(accelerator)
    epoch = len(run.loader)
    run.train(epoch + skipped)
    accelerator.save_state(tmp_path / "saved")
    expected = run.train(epoch + 15)
    again = Accelerator(cpu=True)
    other = Run(again)
    again.load_state(tmp_path / "saved")
    other.batches = iter(again.skip_first_batches(other.loader, skipped))
    seen = other.train(epoch - skipped)
    assert next(other.batches, None) is None
    again.save_state(tmp_path / "later")  # holds where the part of the loader is
    other.batches = other._forever()
    assert seen + other.train(15 + skipped) == expected
    third = Run(Accelerator(cpu=True))
    third.accelerator.load_state(tmp_path / "later")
    assert third.train(15 + skipped) == expected[epoch - skipped :]


def elastic_run(folder: str, steps: int, *, save_at: int | None = None, load: bool = False, accumulate: int = 1):
    """Trains on global batches of 12; returns ids by global batch and the weights, as every rank sees them."""
    options = DataLoaderConfiguration(global_batch_size=GLOBAL)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    set_seed(7)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(Numbered(100), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if load:
        accelerator.load_state(Path(folder) / "saved")
    seen, taken = [], []
    while len(seen) < steps:
        for ids, rows in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            share = loader.window.share
            parts = accelerator.session.gather_object([ids.tolist() if share else []])
            taken += [item for part in parts for item in part]
            if accelerator.sync_gradients:
                seen.append(sorted(taken))
                taken = []
                if save_at is not None and len(seen) == save_at:
                    accelerator.save_state(Path(folder) / "saved")
                if len(seen) == steps:
                    break
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.free_memory()
    return seen, weights


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        (1, 2),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(2, 3, marks=pytest.mark.slow),
        (4, 1),
        pytest.param(3, 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_moves_between_numbers_of_processes(rank_pool, tmp_path: Path, saving: int, loading: int) -> None:
    expected, weights = rank_pool.run(elastic_run, str(tmp_path), 20, ranks=1)[0]
    first, _ = rank_pool.run(elastic_run, str(tmp_path), 7, save_at=7, ranks=saving)[0]
    results = rank_pool.run(elastic_run, str(tmp_path), 13, load=True, ranks=loading)
    assert first + results[0][0] == expected
    for _, mine in results:
        for name, value in weights.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-10, atol=1e-12)


def open_window_run(folder: str, *, load: bool) -> dict[str, torch.Tensor]:
    """Saves after one micro-batch of a window of two, or loads there; each micro-batch is the same on all ranks."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(1)
    model = nn.Linear(3, 1).double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    halves = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for position, half in enumerate(halves):
        if load and position == 0:
            accelerator.load_state(Path(folder) / "open")
            continue
        with accelerator.accumulate(model):
            accelerator.backward(model(half).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if not load and position == 0:
            accelerator.save_state(Path(folder) / "open")
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize(("saving", "loading"), [(1, 1), (2, 2), (2, 1), (1, 2), (3, 2)])
def test_an_open_window_goes_on_on_any_number_of_processes(
    rank_pool, tmp_path: Path, saving: int, loading: int
) -> None:
    whole = rank_pool.run(open_window_run, str(tmp_path), load=False, ranks=saving)[0]
    for weights in rank_pool.run(open_window_run, str(tmp_path), load=True, ranks=loading):
        for name, value in whole.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-14)


def test_new_ranks_derive_their_random_state(rank_pool, tmp_path: Path) -> None:
    def draws(folder: str, *, load: bool) -> float:
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(nn.Linear(2, 2))
        if load:
            accelerator.load_state(Path(folder) / "rng")
        else:
            set_seed(11)
            accelerator.save_state(Path(folder) / "rng")
        return torch.rand(()).item()

    alone = rank_pool.run(draws, str(tmp_path), load=False, ranks=1)[0]
    first = rank_pool.run(draws, str(tmp_path), load=True, ranks=3)
    assert first[0] == alone
    assert len(set(first)) == 3
    assert rank_pool.run(draws, str(tmp_path), load=True, ranks=3) == first


# Series of checkpoints


def project(folder: Path, limit: int | None = None) -> ProjectConfiguration:
    return ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=limit)


def test_eleven_saves_with_a_limit_of_two_keep_the_last_two(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_config=project(tmp_path, 2))
    accelerator.prepare(nn.Linear(2, 2))
    for _ in range(11):
        accelerator.save_state()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_10", "checkpoint_9"]


def test_numbering_goes_on_after_a_resume(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_config=project(tmp_path))
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state()
    accelerator.save_state()
    again = Accelerator(cpu=True, project_config=project(tmp_path))
    again.prepare(nn.Linear(2, 2))
    assert again.load_state().name == "checkpoint_1"
    assert again.save_state().name == "checkpoint_2"


def test_a_series_stays_in_its_folder_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True, project_config=project(Path("run")))
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert accelerator.save_state() == tmp_path / "run" / "checkpoints" / "checkpoint_1"
    assert accelerator.load_state().name == "checkpoint_1"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, project_config=project(tmp_path))
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state()
    kept = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    newest = accelerator.save_state()
    damage(newest)
    assert accelerator.load_state("latest").name == "checkpoint_0"
    assert torch.equal(model.weight, kept)
    assert "passing over checkpoint_1" in caplog.text
    accelerator.end_training()  # what was logged holds it until the test is over


@pytest.mark.parametrize("call", [1, 2, 3])
def test_no_older_checkpoint_is_loaded_for_one_that_may_not_be_read(tmp_path: Path, call: int) -> None:
    accelerator = Accelerator(cpu=True, project_config=project(tmp_path))
    accelerator.prepare(nn.Linear(2, 2))
    for _ in range(2):
        accelerator.save_state()
    with (
        injected(f"raise(EACCES) at call {call} of os:open"),
        pytest.raises(CheckpointError, match=r"/checkpoint_1/.*: Permission denied"),
    ):
        accelerator.load_state()


def test_a_folder_called_latest_is_loaded_where_checkpoints_are_not_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="automatic checkpoint naming is disabled"):
        accelerator.load_state("latest")
    accelerator.save_state("latest")
    assert accelerator.load_state("latest") == tmp_path / "latest"


def damage(folder: Path) -> Path:
    """Flips one byte in the middle of the largest file."""
    file = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_loading_right_after_saving_succeeds_ten_times_of_ten(tmp_path: Path, strategy: str) -> None:
    accelerator = Accelerator(cpu=True, strategy=strategy, project_config=project(tmp_path, 2))
    model = nn.Linear(64, 300)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    parameters = list(model.parameters())
    for _ in range(10):
        accelerator.backward(model(torch.randn(3, 64)).sum())
        optimizer.step()
        optimizer.zero_grad()
        before = [getattr(p, "_local_tensor", p).detach().clone() for p in parameters]
        accelerator.save_state()
        accelerator.load_state()
        assert all(torch.equal(getattr(p, "_local_tensor", p), b) for p, b in zip(parameters, before, strict=True))


# Objects and hooks


class Counter:
    def __init__(self, value: object = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["value"]


def test_registered_objects_come_back(tmp_path: Path) -> None:
    accelerator, counter = Accelerator(cpu=True), Counter([1, {"x": torch.ones(2)}])
    accelerator.register_for_checkpointing(counter)
    accelerator.save_state(tmp_path / "a")
    counter.value = None
    accelerator.load_state(tmp_path / "a")
    assert counter.value[0] == 1
    assert torch.equal(counter.value[1]["x"], torch.ones(2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["object", "hook"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_of_the_users_on_one_rank_fails_the_save_on_all(
    tmp_path: Path, rank: int, where: str, asynchronous: bool
) -> None:
    class Failing:
        fails = rank == 1

        def state_dict(self) -> dict[str, int]:
            if self.fails:
                raise KeyError("mine")
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    failing, accelerator = Failing(), Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    if where == "object":
        accelerator.register_for_checkpointing(failing)
    else:
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: failing.state_dict() and None)
    with pytest.raises((KeyError, CheckpointError), match="mine"):
        accelerator.save_state(tmp_path / "one", asynchronous=asynchronous)
    failing.fails = False
    accelerator.save_state(tmp_path / "one", asynchronous=asynchronous)
    accelerator.end_training()
    assert (tmp_path / "one").is_dir()


def test_two_runs_that_save_in_one_project_at_once_replace_nothing(tmp_path: Path) -> None:
    run = Run(Accelerator(cpu=True, project_config=project(tmp_path, None)))

    run.accelerator.register_for_checkpointing(Counter())

    def save_another_run(*_: object) -> None:
        """Saves it once this one has chosen its place."""
        if not (tmp_path / "checkpoints" / "checkpoint_0").exists():
            Run(Accelerator(cpu=True, project_config=project(tmp_path, None))).accelerator.save_state()

    run.accelerator.register_save_state_pre_hook(save_another_run)
    with pytest.raises(CheckpointError, match="a checkpoint is there already"):
        run.accelerator.save_state()
    with open_checkpoint(tmp_path / "checkpoints" / "checkpoint_0") as other:
        assert "custom" not in other.names
    assert run.accelerator.save_state().name == "checkpoint_1"


def test_objects_without_a_state_are_refused_when_registered() -> None:
    with pytest.raises(ConfigError, match=r"Item at index 0, the class .*Counter"):
        Accelerator(cpu=True).register_for_checkpointing(Counter)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Item at index 1, builtins\.list"):
        Accelerator(cpu=True).register_for_checkpointing(Counter(), [1])


def test_a_state_that_is_no_tensor_or_json_is_refused_by_its_path(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(Counter({"deep": {1, 2}}))
    with pytest.raises(CheckpointError, match="deep"):
        accelerator.save_state(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_hooks_may_keep_weights_out_and_models_unloaded(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    saved = accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.pop())
    accelerator.save_state(tmp_path / "without")
    saved.remove()
    with pytest.raises(CheckpointMismatchError, match="holds no model"):
        accelerator.load_state(tmp_path / "without")
    loaded = accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
    before = model.weight.detach().clone()
    accelerator.load_state(tmp_path / "without")
    assert torch.equal(model.weight, before)
    loaded.remove()


# What cannot be loaded or written


def test_random_state_that_should_be_there_is_not_skipped(tmp_path: Path) -> None:
    import accel_ckpt

    accelerator = Accelerator(cpu=True)
    accelerator.save_state(tmp_path / "a")
    with accel_ckpt.open_checkpoint(tmp_path / "a") as saved:
        state = {name: saved.read(name) for name in saved.names}
        accel_ckpt.save(tmp_path / "b", state, metadata=saved.metadata)
    with pytest.raises(CheckpointCorruptError, match="holds no random state of rank 0, which saved it"):
        accelerator.load_state(tmp_path / "b")


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    first = Accelerator(cpu=True)
    first.prepare(nn.Linear(2, 2))
    first.save_state(tmp_path / "a")
    second = Accelerator(cpu=True)
    model = second.prepare(nn.Sequential(nn.Linear(2, 3)))
    before = model[0].weight.detach().clone()
    with pytest.raises(CheckpointMismatchError, match=r"0\.weight"):
        second.load_state(tmp_path / "a")
    assert torch.equal(model[0].weight, before)


def test_a_checkpoint_of_other_data_leaves_models_as_they_are(tmp_path: Path) -> None:
    first = Accelerator(cpu=True)
    _, loader = first.prepare(nn.Linear(2, 2), DataLoader(Numbered(8), batch_size=2))
    for _ in loader:
        first.save_state(tmp_path / "a")
        break
    second = Accelerator(cpu=True)
    model, _ = second.prepare(nn.Linear(2, 2), DataLoader(Numbered(9), batch_size=2))
    before = model.weight.detach().clone()
    with pytest.raises(DataStateError, match="8 samples, this one has 9"):
        second.load_state(tmp_path / "a")
    assert torch.equal(model.weight, before)


def test_a_checkpoint_with_other_objects_says_which(tmp_path: Path) -> None:
    first = Accelerator(cpu=True)
    first.prepare(nn.Linear(2, 2))
    first.save_state(tmp_path / "a")
    second = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    second.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointMismatchError, match="holds no optimizer"):
        second.load_state(tmp_path / "a")


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        Accelerator(cpu=True).load_state(tmp_path)


def test_no_folder_and_no_naming_is_refused() -> None:
    with pytest.raises(ConfigError, match="automatic checkpoint naming is disabled"):
        Accelerator(cpu=True).load_state()
    with pytest.raises(ConfigError, match="give output_dir"):
        Accelerator(cpu=True).save_state()


def test_an_unwritable_folder_leaves_earlier_checkpoints_intact(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "good")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="file"):
        accelerator.save_state(tmp_path / "file" / "inside")
    accelerator.load_state(tmp_path / "good")


def flip(folder: Path, name: str = "tensors-00000.safetensors", place: int = -1) -> None:
    """Flips a bit of a byte of a file, the last one by default; a second time, back."""
    content = bytearray((folder / name).read_bytes())
    content[place] ^= 1
    (folder / name).write_bytes(content)


MANY = BLOCK // 8
"""Outputs of a layer whose weights have a block of their own, so that no smaller state is verified with them."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_damage_raises_on_every_rank_and_another_load_makes_the_run_whole(
    tmp_path: Path, rank: int, strategy: str
) -> None:
    saving, _, _ = touched(7, strategy=strategy, outputs=MANY)
    saving.save_state(tmp_path / "a")
    expected = copy.deepcopy(everything(saving))
    if rank == 0:
        flip(tmp_path / "a", place=2 * BLOCK)
    loading, _, first = touched(3, strategy=strategy, outputs=MANY)
    before = {name: copy.deepcopy(state) for name, state in everything(loading).items() if name not in LARGE}
    with pytest.raises(CheckpointCorruptError, match=r"tensors-00000.*; of the run, model, optimizer may hold a part"):
        loading.load_state(tmp_path / "a")
    after = everything(loading)
    assert_untouched(before, {name: after[name] for name in before})
    assert first.value == 3
    loading.wait_for_everyone()
    if rank == 0:
        flip(tmp_path / "a", place=2 * BLOCK)
    loading.wait_for_everyone()
    loading.load_state(tmp_path / "a")
    assert_untouched(expected, everything(loading))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["tensors-00000.safetensors", "tree.json", "local-00000.json"])
def test_all_but_a_changed_byte_is_found_before_anything_changes(tmp_path: Path, name: str, strict: bool) -> None:
    """A file cut off, a damaged document; without ``strict``, changed bytes of tensors as well."""
    saving, _, _ = touched(7)
    saving.save_state(tmp_path / "a")
    if strict and name.startswith("tensors"):
        os.truncate(tmp_path / "a" / name, (tmp_path / "a" / name).stat().st_size - 1)
    else:
        flip(tmp_path / "a", name)
    loading, _, _ = touched(3)
    before = copy.deepcopy(everything(loading))
    with pytest.raises(CheckpointCorruptError, match=name):
        loading.load_state(tmp_path / "a", strict=strict)
    assert_untouched(before, everything(loading))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_newest_intact_checkpoint_is_loaded_in_full_over_a_damaged_one(
    tmp_path: Path, rank: int, strategy: str
) -> None:
    saving, _, first = touched(7, strategy=strategy, folder=tmp_path)
    saving.save_state()
    expected = copy.deepcopy(everything(saving))
    first.value = 8
    damaged = saving.save_state()
    if rank == 0:
        flip(Path(damaged))
    loading, _, _ = touched(3, strategy=strategy, folder=tmp_path)
    assert loading.load_state("latest").name == "checkpoint_0"
    assert_untouched(expected, everything(loading))


@pytest.mark.parametrize("hooks", [False, True])
def test_a_checkpoint_that_cannot_be_loaded_is_closed(tmp_path: Path, hooks: bool) -> None:
    saving, _, _ = touched(7)
    saving.save_state(tmp_path / "a")
    flip(tmp_path / "a")
    if hooks:
        saving.register_load_state_pre_hook(lambda models, folder: None)
    with pytest.raises(CheckpointCorruptError):  # whose traceback holds what the call had
        saving.load_state(tmp_path / "a")
    opened = [file.path for file in psutil.Process().open_files()]
    assert not [path for path in opened if path.startswith(str(tmp_path))]


def test_without_an_intact_checkpoint_the_error_says_what_is_loaded_in_part(tmp_path: Path) -> None:
    saving, _, _ = touched(7, folder=tmp_path, outputs=MANY)
    flip(Path(saving.save_state()), place=2 * BLOCK)
    with pytest.raises(CheckpointError, match=r"no intact checkpoint .* model, optimizer may hold a part"):
        saving.load_state("latest")
    saving.end_training()  # what was logged holds it until the test is over


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_states_are_read_into_the_memory_that_they_have(tmp_path: Path, rank: int, strategy: str) -> None:
    accelerator, _, _ = touched(7, strategy=strategy)
    accelerator.save_state(tmp_path / "a")
    expected = copy.deepcopy(everything(accelerator))
    held = addresses(everything(accelerator))
    for part in (everything(accelerator)[name] for name in LARGE):
        scramble(part)
    accelerator.load_state(tmp_path / "a")
    assert addresses(everything(accelerator)) == held
    assert_untouched(expected, everything(accelerator))


def memories(state: object) -> list[torch.Tensor]:
    """This rank's memory behind each tensor of a state."""
    if isinstance(state, torch.Tensor):
        return [getattr(state, "_local_tensor", state).detach()]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [memory for value in values for memory in memories(value)]


def addresses(parts: dict[str, object]) -> list[int]:
    return [memory.data_ptr() for name in LARGE for memory in memories(parts[name])]


def scramble(state: object) -> None:
    for memory in memories(state):
        memory.add_(1)


@pytest.mark.ranks(2)
def test_buffers_of_the_main_rank_are_saved(tmp_path: Path, rank: int) -> None:
    """Each rank's norm has seen its own batch; the next forward of DDP would take rank 0's."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    accelerator.backward(model(torch.randn(8, 2) + 10 * rank).sum())
    mean = accelerator.gather(model.module[0].running_mean[None].clone())
    accelerator.save_state(tmp_path / "a")
    accelerator.load_state(tmp_path / "a")
    assert torch.equal(model.module[0].running_mean, mean[0])


def test_user_metadata_is_readable_json(tmp_path: Path) -> None:
    from accel_ckpt import open_checkpoint

    accelerator = Accelerator(cpu=True)
    accelerator.save_state(tmp_path / "a", metadata={"loss": 1.5, "note": "best"})
    user = open_checkpoint(tmp_path / "a").metadata["user"]
    assert json.loads(json.dumps(user)) == {"loss": 1.5, "note": "best"}


def test_an_asynchronous_save_holds_the_values_at_the_call(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(64, 64))
    before = model.weight.detach().clone()
    accelerator.save_state(tmp_path / "a", asynchronous=True)
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(tmp_path / "a")
    assert accelerator.last_save.done()
    assert torch.equal(model.weight, before)


def test_a_failed_asynchronous_save_is_raised_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import accel_ckpt.saving.transaction

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    with monkeypatch.context() as patch:
        patch.setattr(accel_ckpt.saving.transaction.SaveTransaction, "finish", _fails)
        accelerator.save_state(tmp_path / "a", asynchronous=True)
        with pytest.raises(CheckpointError, match="disk on fire"):
            accelerator.last_save.wait()
    assert not (tmp_path / "a").exists()
    accelerator.save_state(tmp_path / "b")
    accelerator.end_training()


def test_the_end_closes_what_is_open_after_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import accel_ckpt.saving.transaction

    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("run")
    accelerator.prepare(nn.Linear(2, 2))
    monkeypatch.setattr(accel_ckpt.saving.transaction.SaveTransaction, "finish", _fails)
    accelerator.save_state(tmp_path / "a", asynchronous=True)
    accelerator.log({"loss": 1.0}, step=3)
    with pytest.raises(CheckpointError, match="disk on fire"):
        accelerator.end_training()
    assert accelerator.session.closed
    assert any('"loss": 1.0' in file.read_text() for file in tmp_path.rglob("*.jsonl"))


def _fails(*_: object, **__: object) -> None:
    raise CheckpointError("disk on fire")


@pytest.mark.ranks(2)
def test_asynchronous_saves_of_a_series_are_pruned_and_numbered(tmp_path: Path, rank: int) -> None:
    accelerator = Accelerator(cpu=True, project_config=project(tmp_path, 2))
    model = accelerator.prepare(nn.Linear(2, 2))
    for value in range(4):
        with torch.no_grad():
            model.module.weight.fill_(float(value))
        accelerator.save_state(asynchronous=True)
    assert accelerator.load_state("latest").name == "checkpoint_3"
    assert model.module.weight.unique().tolist() == [3.0]
    accelerator.end_training()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    first.prepare(model, torch.optim.Adam(model.parameters()))
    first.save_state(tmp_path / "a")
    other = nn.Linear(2, 2)
    second.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(CheckpointMismatchError, match="SGD has dampening, momentum"):
        second.load_state(tmp_path / "a")


class Fussy:
    """A registered object that refuses what it is given, on the ranks that are told to."""

    def __init__(self, *, refuses: bool) -> None:
        self.refuses, self.value = refuses, 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.refuses and state["value"] == 7:
            raise ValueError("not this one")
        self.value = state["value"]


LARGE = ("model", "optimizer")


def touched(
    seed: int,
    *,
    other: str = "",
    refuses: bool = False,
    strategy: str | None = None,
    folder: Path | None = None,
    outputs: int = 2,
) -> tuple[Accelerator, list[object], Fussy]:
    """A run that has trained a little; ``other`` says in what it differs from the one that is saved."""
    torch.manual_seed(seed)
    series = None if folder is None else project(folder)
    accelerator = Accelerator(cpu=True, strategy=strategy, project_config=series)
    model = nn.Linear(4, outputs)
    optimizer = {
        "optimizer": lambda: torch.optim.SGD(model.parameters(), lr=0.1),
        "groups": lambda: torch.optim.Adam([{"params": [model.weight]}, {"params": [model.bias]}]),
    }.get(other, lambda: torch.optim.Adam(model.parameters()))()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    if other == "scheduler":
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    first, last, loader = Fussy(refuses=False), Fussy(refuses=refuses), DataLoader(Numbered(8), batch_size=2)
    objects = list(accelerator.prepare(model, optimizer, schedule, loader))
    accelerator.register_for_checkpointing(first, last)
    for _, rows in objects[3]:
        accelerator.backward(objects[0](rows.float()).sum())
        objects[1].step()
        objects[2].step()
        objects[1].zero_grad()
    first.value = last.value = seed
    return accelerator, objects, first


def everything(accelerator: Accelerator) -> dict[str, object]:
    return {name: part.state_dict() for name, part in accelerator._checkpointer.train_state().items()}


def assert_untouched(before: object, after: object) -> None:
    if isinstance(before, dict):
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert_untouched(value, after[key])
    elif isinstance(before, torch.Tensor):
        assert torch.equal(getattr(before, "_local_tensor", before), getattr(after, "_local_tensor", after))
    else:
        assert before == after


DIFFERENT = {
    "optimizer": "SGD has dampening, momentum",
    "groups": "its groups of parameters differ",
    "scheduler": "here it has gamma, step_size, and there T_max, eta_min",
    "refuses": "not this one",
}


@pytest.mark.parametrize("other", DIFFERENT)
def test_a_load_that_fails_leaves_everything_as_it_was(tmp_path: Path, other: str) -> None:
    saving, _, _ = touched(7)
    saving.save_state(tmp_path / "a")
    loading, _, first = touched(3, other=other, refuses=other == "refuses")
    before = copy.deepcopy(everything(loading))
    with pytest.raises(ValueError, match=DIFFERENT[other]):
        loading.load_state(tmp_path / "a")
    assert_untouched(before, everything(loading))
    assert first.value == 3


@pytest.mark.ranks(2)
def test_a_load_that_fails_on_one_rank_leaves_all_as_they_were(tmp_path: Path, rank: int) -> None:
    saving, _, _ = touched(7)
    saving.save_state(tmp_path / "a")
    loading, _, _ = touched(3, refuses=rank == 1)
    before = copy.deepcopy(everything(loading))
    with pytest.raises((ValueError, CollectiveError), match="not this one"):
        loading.load_state(tmp_path / "a")
    assert_untouched(before, everything(loading))


def test_a_part_that_cannot_be_put_back_is_named_and_the_others_are(tmp_path: Path) -> None:
    class Once(Fussy):
        def load_state_dict(self, state: dict[str, int]) -> None:
            if state["value"] == 3:
                raise RuntimeError("too late")
            super().load_state_dict(state)

    accelerator = Accelerator(cpu=True)
    objects = [Fussy(refuses=False), Once(refuses=False), Fussy(refuses=True)]
    accelerator.register_for_checkpointing(*objects)
    for one in objects:
        one.value = 7
    accelerator.save_state(tmp_path / "a")
    for one in objects:
        one.value = 3
    with pytest.raises(ValueError, match="not this one") as caught:
        accelerator.load_state(tmp_path / "a")
    assert [one.value for one in objects] == [3, 7, 3]
    assert "while custom_2 was loaded" in caught.value.__notes__
    assert "custom_1 could not be put back as it was: RuntimeError: too late" in caught.value.__notes__


@pytest.mark.ranks(2)
def test_damage_of_one_ranks_random_state_is_found_by_all_before_anything_changes(tmp_path: Path, rank: int) -> None:
    saving, _, _ = touched(7)
    saving.save_state(tmp_path / "a")
    if rank == 0:
        flip(tmp_path / "a", "tensors-00001.safetensors")
    loading, _, _ = touched(3)
    loading.wait_for_everyone()
    before, state = copy.deepcopy(everything(loading)), torch.get_rng_state()
    with pytest.raises(CheckpointCorruptError, match="tensors-00001"):
        loading.load_state(tmp_path / "a", parts=["model", "rng"])
    assert_untouched(before, everything(loading))
    assert torch.equal(state, torch.get_rng_state())


class Strange(torch.Tensor):
    """A tensor of which no other can be made, so that ``copy.deepcopy`` refuses it."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def test_a_registered_object_may_hold_tensors_that_torch_does_not_copy(tmp_path: Path) -> None:
    accelerator, held = Accelerator(cpu=True), {"scale": torch.ones(3).as_subclass(Strange)}
    last = Fussy(refuses=True)
    accelerator.register_for_checkpointing(Holder(held), last)
    last.value = 7
    accelerator.save_state(tmp_path / "a")
    last.value = 3
    held["scale"].zero_()
    with pytest.raises(ValueError, match="not this one"):
        accelerator.load_state(tmp_path / "a")
    assert type(held["scale"]) is Strange
    assert held["scale"].as_subclass(torch.Tensor).tolist() == [0, 0, 0]
    last.refuses = False
    accelerator.load_state(tmp_path / "a")
    assert held["scale"].tolist() == [1, 1, 1]


class Holder:
    """A registered object whose state is a dict of the caller."""

    def __init__(self, held: dict[str, object]) -> None:
        self.held = held

    def state_dict(self) -> dict[str, object]:
        return self.held

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.held.update(state)


# Places


def test_checkpoints_of_a_project_may_lie_behind_a_url() -> None:
    config = ProjectConfiguration("memory://accelerated", automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=config)
    model = accelerator.prepare(nn.Linear(2, 2))
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.weight.fill_(value)
        saved = accelerator.save_state()
    assert str(saved) == "memory://accelerated/checkpoints/checkpoint_1"
    with torch.no_grad():
        model.weight.zero_()
    assert accelerator.load_state() == saved
    assert model.weight.unique().tolist() == [2.0]
    assert accelerator.load_state(str(saved)) == saved
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        accelerator.load_state("memory://accelerated/checkpoints/checkpoint_0")


def test_a_series_that_is_there_is_continued_and_never_overwritten(tmp_path: Path) -> None:
    for _ in range(2):  # the second is a run that did not load what the first has left
        accelerator = Accelerator(cpu=True, project_config=project(tmp_path, None))
        accelerator.prepare(nn.Linear(2, 2))
        accelerator.save_state()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_0", "checkpoint_1"]


def test_leftovers_of_killed_saves_are_swept_by_the_next(tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints" / ".checkpoint_3.0123456789abcdef.staging"
    leftover.mkdir(parents=True)
    os.utime(leftover, (1e9, 1e9))
    accelerator = Accelerator(cpu=True, project_config=project(tmp_path, None))
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state()
    assert not leftover.exists()


def test_a_checkpoint_says_how_its_run_was_set_up(tmp_path: Path) -> None:
    from accel_ckpt import open_checkpoint

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    accelerator.save_state(tmp_path / "a")
    metadata = open_checkpoint(tmp_path / "a").metadata
    assert metadata["config"]["values"]["gradient_accumulation_steps"] == 3
    assert metadata["topology"]["world_size"] == 1
    assert metadata["strategy"] == "single"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_nothing_is_saved_once_training_has_ended(tmp_path: Path, strategy: str) -> None:
    """The ranks could no longer agree, and would each write a checkpoint of their own at the same place."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = accelerator.prepare(nn.Linear(4, 4))
    accelerator.end_training()
    with pytest.raises(SessionError, match="closed"):
        accelerator.save_state(tmp_path / "late")
    with pytest.raises(SessionError, match="closed"):
        accelerator.save_model(model, tmp_path / "exported")
    if strategy == "fsdp":
        for taking in (accelerator.get_state_dict, accelerator.full_parameters):
            with pytest.raises(SessionError, match="closed"):
                taking(model)
    else:
        assert accelerator.get_state_dict(model).keys() == {"weight", "bias"}
        with accelerator.full_parameters(model):
            assert model.module.weight.shape == (4, 4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("weights", "words"), [("model.safetensors", "load_model(model, folder)"), ("pytorch_model.bin", "load_state_dict")]
)
def test_a_folder_of_accelerate_is_named_with_what_can_be_loaded_from_it(
    tmp_path: Path, weights: str, words: str
) -> None:
    folder = tmp_path / "checkpoints" / "checkpoint_0"
    folder.mkdir(parents=True)
    model = torch.nn.Linear(2, 1)
    if weights.endswith(".bin"):
        torch.save(model.state_dict(), folder / weights)
    else:
        save_file(model.state_dict(), folder / weights)
    torch.save({}, folder / "optimizer.bin")
    torch.save({}, folder / "random_states_0.pkl")
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    prepared = accelerator.prepare(torch.nn.Linear(2, 1))
    for given in (folder, None):
        with pytest.raises(CheckpointError) as caught:
            accelerator.load_state(given)
        for part in ("Accelerate wrote it", words, "docs/guides/checkpoints.md"):
            assert part in str(caught.value)
    if weights.endswith(".safetensors"):
        accelerator.load_model(prepared, folder)
        assert torch.equal(prepared.weight, model.weight)
