"""Folders of DeepSpeed's own: what a raw loop wrote goes on here, on any ranks and backend, and back."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel_deepspeed.checkpoint.zero_folders import read_folder
from accel_state import CheckpointError
from accel_testing import RankPool
from accel_testing.equivalence.compare import assert_close_state
from accel_testing.equivalence.layouts import Layout
from accel_testing.equivalence.training import open_accelerator

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

SAMPLES = 8


class Shift(nn.Module):
    """Has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((3,), 0.5))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift.to(x.dtype)


class Net(nn.Module):
    """Sizes that no two ranks divide evenly, a buffer, a weight with two names, and a parameter that does not train."""

    _tp_plan: ClassVar[dict[str, str]] = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.shift = nn.Linear(5, 7), nn.Linear(7, 3), Shift()
        self.head, self.again = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head.bias.requires_grad_(False)
        self.again.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shift(self.down(torch.tanh(self.up(x))))
        return self.again(torch.tanh(self.head(x)))


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """With two groups of parameters."""
    torch.manual_seed(0)
    model = Net()
    first = [*model.up.parameters()]
    rest = [one for one in model.parameters() if one.requires_grad and all(one is not other for other in first)]
    return model, torch.optim.AdamW([{"params": first, "lr": 0.02}, {"params": rest}], lr=0.01, eps=1e-3)


def loss_of(model: nn.Module, step: int, index: int, count: int) -> torch.Tensor:
    batch = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(step))
    return model(batch.chunk(count)[index].to(next(model.parameters()).dtype)).pow(2).mean()


def raw_loop(
    folder: str,
    stage: int,
    *,
    start: int = 0,
    stop: int = 3,
    load: str = "",
    save: str,
    sharing: int = 1,
    options: dict[str, Any] | None = None,
) -> None:
    """DeepSpeed's own calls, without an Accelerator; ``sharing`` ranks have parts of each layer."""
    import torch.distributed as dist

    from accel_deepspeed.engine.engine import count_alike
    from accel_deepspeed.library import close_communication, library, open_communication
    from accel_state import Session

    deepspeed = library("cpu")
    with Session.open(cpu=True) as session:
        open_communication(session, session)
        count_alike(session)  # the ranks may have had other numbers of engines before
        model, optimizer = make_model()
        index, count = dist.get_rank() // sharing, dist.get_world_size() // sharing
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": SAMPLES // count,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000},
            **(options or {}),
        }
        if sharing > 1:
            config["tensor_parallel"] = {"autotp_size": sharing}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        if load:
            engine.load_checkpoint(folder, load)
        for step in range(start, stop):
            engine.backward(loss_of(engine, step, index, count))
            engine.step()
        engine.save_checkpoint(folder, save)
        engine.destroy()
        close_communication(session)


def through_accel(
    layout: str, folder: str, *, start: int, stop: int, load: str = "", save: str = ""
) -> dict[str, torch.Tensor]:
    accelerator = open_accelerator(Layout.parse(layout))
    model, optimizer = accelerator.prepare(*make_model())
    if load:
        accelerator.import_deepspeed(folder, tag=load)
    for step in range(start, stop):
        shard = accelerator.data_shard
        accelerator.backward(loss_of(model, step, shard.index, shard.count))
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    if save:
        accelerator.export_deepspeed(folder, tag=save)
    accelerator.free_memory()
    accelerator.end_training()
    return state


@pytest.mark.parametrize(
    ("stage", "layout"), [(0, "ds2:2"), (1, "single"), (2, "ds3:2"), (2, "ds1:1"), (3, "fsdp:2"), (3, "single")]
)
@pytest.mark.sampled(2)
def test_a_run_of_deepspeed_goes_on_here(rank_pool: RankPool, tmp_path: Path, stage: int, layout: str) -> None:
    folder = str(tmp_path)
    rank_pool.run(raw_loop, folder, stage, save="three", ranks=2)
    rank_pool.run(raw_loop, folder, stage, start=3, stop=6, load="three", save="six", ranks=2)
    ranks = Layout.parse(layout).processes
    state = rank_pool.run(through_accel, layout, folder, start=3, stop=6, load="three", ranks=ranks)[0]
    assert_close_state(state, read_folder(folder).model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("stage", "ranks", "layout"),
    [
        (0, 2, "single"),
        (1, 4, "ds1:4/tp=2"),
        pytest.param(2, 2, "fsdp:2", marks=pytest.mark.slow),
        (2, 4, "ds2:2"),
        (3, 4, "ds0:2/tp=2"),
        pytest.param(3, 2, "ds3:2", marks=pytest.mark.slow),
    ],
)
def test_a_tensor_parallel_run_goes_on_here(
    rank_pool: RankPool, tmp_path: Path, stage: int, ranks: int, layout: str
) -> None:
    folder = str(tmp_path)
    rank_pool.run(raw_loop, folder, stage, save="three", sharing=2, ranks=ranks)
    rank_pool.run(raw_loop, folder, stage, start=3, stop=6, load="three", save="six", sharing=2, ranks=ranks)
    processes = Layout.parse(layout).processes
    state = rank_pool.run(through_accel, layout, folder, start=3, stop=6, load="three", ranks=processes)[0]
    assert_close_state(state, read_folder(folder).model)


def rounded_off(value: torch.Tensor) -> bool:
    """Whether it would lose something in 16 bits."""
    return not torch.equal(value, value.bfloat16().float())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_of_several_names_are_not_rounded(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    rank_pool.run(raw_loop, str(tmp_path), stage, save="three", options={"bf16": {"enabled": True}}, ranks=2)
    model, optimizer = make_model()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.import_deepspeed(tmp_path)
    state = accelerator.get_state_dict(model)
    assert not [name for name, value in state.items() if name.endswith("weight") and not rounded_off(value)]
    accelerator.end_training()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.sampled(1)
def test_deepspeed_goes_on_with_shared_layers_that_are_exported(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    folder = str(tmp_path)
    rank_pool.run(through_accel, f"ds{stage}:2/tp=2", folder, start=0, stop=3, save="three", ranks=2)
    rank_pool.run(raw_loop, folder, stage, start=3, stop=6, load="three", save="six", sharing=2, ranks=2)
    expected = rank_pool.run(through_accel, "single", folder, start=0, stop=6, ranks=1)[0]
    assert_close_state(read_folder(folder, "six").model, expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_goes_on_with_what_is_exported(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    from accel_deepspeed.library import library

    library("cpu")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder = str(tmp_path)
    state = rank_pool.run(through_accel, f"ds{stage}:2", folder, start=0, stop=3, save="three", ranks=2)[0]
    read = get_fp32_state_dict_from_zero_checkpoint(folder, "three")
    # At stage 1 DeepSpeed's tool leaves out what does not train.
    assert set(state) - set(read) <= {"head.bias"}
    assert_close_state(dict(read), {name: state[name] for name in read}, rtol=0, atol=0)
    rank_pool.run(raw_loop, folder, stage, start=3, stop=6, load="three", save="six", ranks=2)
    expected = rank_pool.run(through_accel, "single", folder, start=0, stop=6, ranks=1)[0]
    assert_close_state(read_folder(folder, "six").model, expected)


def test_what_cannot_be_read_is_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    with pytest.raises(CheckpointError, match="no file 'latest'"):
        read_folder(tmp_path)
    rank_pool.run(raw_loop, str(folder), 2, save="three", ranks=2)
    with pytest.raises(CheckpointError, match="did you mean 'three'"):
        read_folder(folder, "thre")
    (last,) = folder.glob("three/*rank_1_mp_rank_00_optim_states.pt")
    last.unlink()
    with pytest.raises(CheckpointError, match="saved by 2 ranks"):
        read_folder(folder)


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Does something to a file of a folder."""
    facts = torch.load(path, weights_only=False)
    change(facts)
    torch.save(facts, path)


def test_shared_layers_that_cannot_be_put_together_are_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(raw_loop, str(tmp_path), 2, save="three", sharing=2, ranks=2)
    first, second = (tmp_path / "three" / f"mp_rank_0{rank}_model_states.pt" for rank in (0, 1))
    key = r"^up\.weight$"

    def maps(facts: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = facts["universal_checkpoint_info"]["affine_map"]["params"]
        return found

    changed(second, lambda facts: facts["param_shapes"][0].update(other=facts["param_shapes"][0].pop("up.bias")))
    with pytest.raises(CheckpointError, match="parameters of other names"):
        read_folder(tmp_path)
    changed(second, lambda facts: facts["param_shapes"][0].update({"up.bias": facts["param_shapes"][0].pop("other")}))
    changed(first, lambda facts: maps(facts)[key]["ranks"][1]["pieces"].pop())
    with pytest.raises(CheckpointError, match=r"up.weight cannot .*15 of its 35 elements are no rank's"):
        read_folder(tmp_path)
    changed(first, lambda facts: maps(facts).pop(key))
    with pytest.raises(CheckpointError, match=r"up.weight cannot .*nothing is said of it"):
        read_folder(tmp_path)
    changed(first, lambda facts: facts.pop("universal_checkpoint_info"))
    with pytest.raises(CheckpointError, match="spread over 2 tensor-parallel ranks, and does not say"):
        read_folder(tmp_path)
    (tmp_path / "three" / "zero_pp_rank_0_mp_rank_01_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="lacks the optim states of its ranks"):
        read_folder(tmp_path)
    second.unlink()
    with pytest.raises(CheckpointError, match="saved by 2 tensor-parallel ranks, and has the states of 1"):
        read_folder(tmp_path)


class Harmful:
    """Would run when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("run",)


def test_nothing_of_a_folder_is_run(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    torch.save({"module": {}, "client": Harmful()}, tmp_path / "bad" / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="not let in"):
        read_folder(tmp_path, "bad")


class ByAttribute:
    """Pickled as some versions of Python 3.11 pickle members of enumerations."""

    def __init__(self, owner: type, name: str) -> None:
        self.of = owner, name

    def __reduce__(self) -> Any:
        return getattr, self.of


def test_stages_are_read_however_python_pickled_them(tmp_path: Path) -> None:
    from accel_deepspeed.library import library

    library("cpu")
    from deepspeed.runtime.zero.config import ZeroStageEnum

    (tmp_path / "tag").mkdir()
    path = tmp_path / "tag" / "mp_rank_00_model_states.pt"
    facts = {"module": {"w": torch.ones(2), "_extra_state": 1}, "client": ByAttribute(ZeroStageEnum, "weights")}
    torch.save(facts, path)
    assert torch.equal(read_folder(tmp_path, "tag").model["w"], torch.ones(2))
    torch.save({**facts, "client": ByAttribute(ZeroStageEnum, "mro")}, path)
    with pytest.raises(CheckpointError, match="not let in"):
        read_folder(tmp_path, "tag")


def test_other_backends_have_no_folders_of_their_own(tmp_path: Path) -> None:
    from accel_state import BackendError

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*make_model())
    with pytest.raises(BackendError, match="strategy='deepspeed'"):
        accelerator.export_deepspeed(tmp_path)
