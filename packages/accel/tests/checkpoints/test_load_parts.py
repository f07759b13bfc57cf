"""``load_state`` loads parts by name, tolerates new and missing parameters, and reports what it did."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel import Accelerator, DataLoaderConfiguration, ProjectConfiguration
from accel_ckpt import open_checkpoint
from accel_state.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    ConfigError,
    DataStateError,
)
from accel_testing.pytest.logs import heard

STRATEGIES = ["ddp", "fsdp"]


class Counter:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Run:
    """A model, optimizer, schedule, loader and counter, trained for ``steps`` micro-batches of windows of two."""

    def __init__(self, seed: int, *, steps: int = 3, strategy: str | None = None, width: int = 8) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=2)
        self.accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )
        self.counter = Counter(seed)
        self.accelerator.register_for_checkpointing(self.counter)
        for _, (rows,) in zip(range(steps), self.loader, strict=False):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(rows).square().mean())
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    def parts(self) -> dict[str, object]:
        """Every part's state; and the random state and the gradients of the open window, which are no parts."""
        states = {
            name: copy.deepcopy(part.state_dict())
            for name, part in self.accelerator._checkpointer.train_state().items()
        }
        gradients = copy.deepcopy(self.accelerator.backend.gradients.unreduced(self.model))
        return {**states, "rng": torch.get_rng_state(), "gradients": gradients}


def same(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other))
    return one == other


def changed(before: dict[str, object], after: dict[str, object]) -> set[str]:
    return {name for name in before if not same(before[name], after[name])}


# What a load of a part may change; everything else, random state, clock and open window included, stays.
CHOICES = {
    "model": {"model"},
    "optimizer": {"optimizer"},
    "scheduler": {"scheduler"},
    "loader": {"loader"},
    "custom": {"custom"},
    "rng": {"rng"},
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_part_is_loaded_and_all_else_stays(tmp_path: Path, strategy: str) -> None:
    saving = Run(7, strategy=strategy)
    saving.accelerator.save_state(tmp_path / "a")
    saved = saving.parts()
    for part, expected in CHOICES.items():
        run = Run(3, steps=5, strategy=strategy)
        before = run.parts()
        run.accelerator.load_state(tmp_path / "a", parts=part)
        after = run.parts()
        assert changed(before, after) == expected, part
        assert same(after[part], saved[part])
        report = run.accelerator.last_load
        assert report is not None
        assert list(report.parts) == [part]
        assert part not in report.kept
        assert "clock" in report.kept


def test_one_process_loads_parts_too(tmp_path: Path) -> None:
    saving = Run(7)
    saving.accelerator.save_state(tmp_path / "a")
    saved = saving.parts()
    run = Run(3, steps=5)
    before = run.parts()
    run.accelerator.load_state(tmp_path / "a", parts=["model", "optimizer", "scheduler"])
    after = run.parts()
    assert changed(before, after) == {"model", "optimizer", "scheduler"}
    assert all(same(after[name], saved[name]) for name in ("model", "optimizer", "scheduler"))
    assert run.accelerator.last_load is not None
    assert run.accelerator.last_load.kept == ("loader", "clock", "custom", "rng")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_clock_brings_the_gradients_of_an_open_window(tmp_path: Path, strategy: str) -> None:
    saving = Run(7, strategy=strategy)
    saving.accelerator.save_state(tmp_path / "a")
    run = Run(3, steps=4, strategy=strategy)
    run.accelerator.load_state(tmp_path / "a", parts="clock")
    assert run.accelerator.clock.open
    gradients, saved = run.parts()["gradients"], saving.parts()["gradients"]
    assert isinstance(gradients, dict)
    assert isinstance(saved, dict)
    world = run.accelerator.session.world_size
    for name, mine in gradients.items():  # FSDP shares out the average of what ranks had
        total = run.accelerator.reduce(saved[name], "mean") if strategy == "fsdp" else saved[name]
        torch.testing.assert_close(mine, total if world > 1 else saved[name])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_alone_is_evaluated_where_nothing_else_was_prepared(tmp_path: Path, strategy: str) -> None:
    saving = Run(7, strategy=strategy)
    saving.accelerator.save_state(tmp_path / "a")
    expected = saving.accelerator.get_state_dict(saving.model)
    evaluating = Accelerator(cpu=True, strategy=strategy)
    model = evaluating.prepare(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    state = torch.get_rng_state()
    assert evaluating.load_state(tmp_path / "a", parts="model") == tmp_path / "a"
    assert torch.equal(torch.get_rng_state(), state)
    assert same(dict(evaluating.get_state_dict(model)), dict(expected))


@pytest.mark.ranks(2)
def test_an_unknown_part_is_refused_with_the_nearest_and_all(tmp_path: Path, rank: int) -> None:
    saving = Run(7)
    saving.accelerator.save_state(tmp_path / "a")
    words = (
        r"holds no part 'modle' \(nearest: 'model'\); it holds model, optimizer, scheduler, loader, clock, custom, rng"
    )
    with pytest.raises(CheckpointMismatchError, match=words):
        saving.accelerator.load_state(tmp_path / "a", parts=["modle", "optimizer"])
    evaluating = Accelerator(cpu=True)
    evaluating.prepare(nn.Linear(2, 2))
    with pytest.raises(
        CheckpointMismatchError, match=r"nothing here takes the part 'optimizer'.*are model, clock, rng"
    ):
        evaluating.load_state(tmp_path / "a", parts=["optimizer"])
    with pytest.raises((ConfigError, CheckpointError), match="expected names of parts"):
        evaluating.load_state(tmp_path / "a", parts=[])
    with pytest.raises(CheckpointError, match="give the same on all processes"):
        evaluating.load_state(tmp_path / "a", parts="model" if rank else "clock")
    with pytest.raises(CheckpointMismatchError, match=r"load_state\(parts=\['model'\]\)"):
        evaluating.load_state(tmp_path / "a")


def test_damage_outside_of_the_parts_that_are_read_does_not_matter(tmp_path: Path) -> None:
    saving = Run(7)
    saving.accelerator.save_state(tmp_path / "a")
    file = tmp_path / "a" / "tensors-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    run = Run(3)
    before = run.parts()
    run.accelerator.load_state(tmp_path / "a", parts=["scheduler", "custom"])
    assert changed(before, run.parts()) == {"scheduler", "custom"}
    with pytest.raises(CheckpointCorruptError, match=r"of the run, model may hold a part"):
        run.accelerator.load_state(tmp_path / "a", parts="model")


def test_the_newest_checkpoint_gives_parts_and_numbers_go_on_as_before(tmp_path: Path) -> None:
    project = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True)
    saving = Accelerator(cpu=True, project_config=project)
    model = saving.prepare(nn.Linear(2, 2))
    for value in range(2):
        with torch.no_grad():
            model.weight.fill_(float(value))
        saving.save_state()
    reading = Accelerator(cpu=True, project_config=ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True))
    other = reading.prepare(nn.Linear(2, 2))
    assert reading.load_state("latest", parts="model").name == "checkpoint_1"
    assert other.weight.unique().tolist() == [1.0]
    assert reading.save_iteration == 0


# strict=False


class Heads(nn.Module):
    def __init__(self, *heads: str) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        for head in heads:
            setattr(self, head, nn.Linear(4, 2))
        self.heads = heads

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return sum(getattr(self, head)(self.body(rows)) for head in self.heads)  # type: ignore[return-value]


def with_heads(
    *heads: str, strategy: str | None, groups: bool = False, train: bool = True
) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(len(heads))
    model = Heads(*heads)
    given = [{"params": [p], "lr": 0.1 * (1 + n)} for n, p in enumerate(model.parameters())] if groups else None
    optimizer = torch.optim.AdamW(given or model.parameters(), lr=0.2)
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model, optimizer = accelerator.prepare(model, optimizer)
    if train:
        step(accelerator, model, optimizer)
    return accelerator, model, optimizer


def step(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    accelerator.backward(model(torch.ones(2, 4)).square().sum())
    optimizer.step()
    optimizer.zero_grad()


NEW, GONE = ("new.weight", "new.bias"), ("old.weight", "old.bias")
COMMON = ("body.weight", "body.bias", "kept.weight", "kept.bias")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_that_are_new_or_gone_are_tolerated_and_reported(
    tmp_path: Path, rank: int, strategy: str, groups: bool
) -> None:
    saving, _, saved_optimizer = with_heads("kept", "old", strategy=strategy, groups=groups)
    for group in saved_optimizer.param_groups:
        group["lr"] *= 3
    saving.save_state(tmp_path / "a")
    saved = open_checkpoint(tmp_path / "a").read("optimizer")
    loading, model, optimizer = with_heads("kept", "new", strategy=strategy, groups=groups, train=False)
    rates = [group["lr"] for group in optimizer.param_groups]
    with pytest.raises(CheckpointMismatchError, match=r"model.*lacks new\.weight"):
        loading.load_state(tmp_path / "a")
    with heard("accel") as said:
        loading.load_state(tmp_path / "a", strict=False)
    assert sum("model: 4 loaded, not in the checkpoint: new.weight, new.bias" in one for one in said) == (rank == 0)
    report = loading.last_load
    assert report is not None
    assert not report.complete
    for name in ("model", "optimizer"):
        part = report.parts[name]
        assert (set(part.loaded), set(part.missing), set(part.left_over)) == (set(COMMON), set(NEW), set(GONE))
    assert "left over in the checkpoint: old.weight, old.bias" in str(report)
    held = loading.backend.states.full_optimizer(optimizer.optimizer, loading.prepared.models, main_only=False)
    for name in COMMON:
        assert torch.equal(held["state"][name]["exp_avg"], saved["state"][name]["exp_avg"]), name
    assert not set(held["state"].get(NEW[0], {}).get("exp_avg", torch.zeros(1)).flatten().tolist()) - {0.0}
    now = [group["lr"] for group in optimizer.param_groups]
    if groups:  # those of parameters that both have are the saved ones, of new parameters their own
        assert now == [3 * rate for rate in rates[:4]] + rates[4:]
    else:
        assert now == [3 * rates[0]]
    step(loading, model, optimizer)
    assert all(torch.isfinite(value).all() for value in loading.get_state_dict(model).values())


@pytest.mark.ranks(2)
def test_a_backend_that_keeps_states_of_all_parameters_or_none_refuses_new_ones_by_name(tmp_path: Path) -> None:
    saving, _, _ = with_heads("kept", "old", strategy="fsdp1")
    saving.save_state(tmp_path / "a")
    loading, model, optimizer = with_heads("kept", "new", strategy="fsdp1", train=False)
    before = copy.deepcopy(loading.get_state_dict(model))
    with pytest.raises(CheckpointMismatchError, match=r"fsdp1 keeps .*not of new\.weight, new\.bias"):
        loading.load_state(tmp_path / "a", strict=False)
    assert same(dict(before), dict(loading.get_state_dict(model)))
    loading.load_state(tmp_path / "a", strict=False, parts="model")
    step(loading, model, optimizer)


def test_other_groups_of_common_parameters_are_refused_also_when_not_strict(tmp_path: Path) -> None:
    saving, _, _ = with_heads("kept", "old", strategy=None, groups=True)
    saving.save_state(tmp_path / "a")
    loading, _, optimizer = with_heads("kept", "new", strategy=None)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointMismatchError, match="groups of parameters differ of the parameters that both have"):
        loading.load_state(tmp_path / "a", strict=False)
    assert same(before, optimizer.state_dict())


def test_what_has_a_state_already_keeps_it_where_the_checkpoint_lacks_it(tmp_path: Path) -> None:
    saving, _, _ = with_heads("kept", strategy=None)
    saving.save_state(tmp_path / "a")
    loading, model, optimizer = with_heads("kept", "new", strategy=None)
    before = optimizer.state[model.new.weight]["exp_avg"].clone()
    loading.load_state(tmp_path / "a", strict=False)
    assert torch.equal(optimizer.state[model.new.weight]["exp_avg"], before)


def test_a_complete_load_says_nothing(tmp_path: Path) -> None:
    saving, _, _ = with_heads("kept", strategy=None)
    saving.save_state(tmp_path / "a")
    with heard("accel") as said:
        saving.load_state(tmp_path / "a")
    report = saving.last_load
    assert report is not None
    assert report.complete
    assert report.changes == ()
    assert not [one for one in said if "a:" in one]


# How the run differs from the one that saved


def differing(folder: str, *, load: bool, fixed: bool, **options: object) -> tuple[list[str], list[str]]:
    """Saves, or loads and gives the changes that are reported and the warnings among what is logged."""
    import logging

    loading = DataLoaderConfiguration(global_batch_size=12) if fixed else None
    accelerator = Accelerator(cpu=True, dataloader_config=loading, **options)  # type: ignore[arg-type]
    accelerator.prepare(nn.Linear(2, 2))
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("accel.checkpoints.restore")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        if not load:
            accelerator.save_state(Path(folder) / "a")
            return [], []
        accelerator.load_state(Path(folder) / "a")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert accelerator.last_load is not None
    lines = [str(change) for change in accelerator.last_load.changes]
    logged = [record.getMessage().removeprefix("a: ") for record in records]
    assert logged == (lines if accelerator.is_main_process else [])
    return lines, [record.getMessage().removeprefix("a: ") for record in records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.sampled(1)
def test_the_number_of_processes_is_a_warning_where_it_changes_the_batches(
    rank_pool, tmp_path: Path, fixed: bool
) -> None:
    rank_pool.run(differing, str(tmp_path), load=False, fixed=fixed, ranks=2)
    line = "number of processes is 1 here and was 2 when it was saved"
    strategy = "strategy is single here and was ddp when it was saved"
    assert rank_pool.run(differing, str(tmp_path), load=True, fixed=fixed, ranks=1)[0] == (
        [line, strategy],
        [] if fixed else [line],
    )
    assert [lines for lines, _ in rank_pool.run(differing, str(tmp_path), load=True, fixed=fixed, ranks=2)] == [[], []]


def test_settings_that_change_the_numbers_are_warnings(tmp_path: Path) -> None:
    differing(str(tmp_path), load=False, fixed=False, mixed_precision="bf16", gradient_accumulation_steps=4)
    expected = [
        "mixed_precision is no here and was bf16 when it was saved",
        "gradient_accumulation_steps is 1 here and was 4 when it was saved",
    ]
    assert differing(str(tmp_path), load=True, fixed=False) == (expected, expected)


def test_other_versions_are_said_and_no_warning(tmp_path: Path) -> None:
    from accel.checkpoints.run_facts import differences

    saved = {"number of processes": 1, "torch": "2.9.0", "accel": "0.1.0"}
    (change,) = differences(saved, {**saved, "torch": "2.13.0"})
    assert (str(change), change.numbers) == ("torch is 2.13.0 here and was 2.9.0 when it was saved", False)


class Counted(IterableDataset):
    """The numbers below a length, which it knows."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(float(self.length)))


def loader_over(length: int, kind: str, *, allowed: bool) -> tuple[Accelerator, DataLoader]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(allow_changed_data=allowed))
    dataset = Counted(length) if kind == "iterable" else TensorDataset(torch.arange(float(length)))
    return accelerator, accelerator.prepare(DataLoader(dataset, batch_size=2))


@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.ranks(1)), pytest.param(2, marks=pytest.mark.ranks(2))]
)
def test_a_load_of_changed_data_is_allowed_or_refused(rank: int, ranks: int, kind: str, tmp_path: Path) -> None:
    accelerator, loader = loader_over(24, kind, allowed=False)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    done = 4 * ranks
    folder = accelerator.save_state(tmp_path / "saved")

    strict, grown = loader_over(32, kind, allowed=False)
    with pytest.raises(DataStateError, match="load with allow_changed_data=True"):
        strict.load_state(folder)
    left = 32 - done if kind == "iterable" else 24 - done
    with heard_warning(rank, f"{left} are left to deliver"):
        strict.load_state(folder, allow_changed_data=True)
    rows = sum(len(batch if kind == "iterable" else batch[0]) for batch in grown)
    assert rows * ranks == left

    lenient, _ = loader_over(32, kind, allowed=True)
    with pytest.raises(DataStateError, match="load with allow_changed_data=True"):
        lenient.load_state(folder, allow_changed_data=False)
    with heard_warning(rank, "are left to deliver"):
        lenient.load_state(folder)


def heard_warning(rank: int, text: str) -> AbstractContextManager[object]:
    """Expects a warning on the main process; the others are silent."""
    return pytest.warns(RuntimeWarning, match=text) if rank == 0 else nullcontext()
