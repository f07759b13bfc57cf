"""A run that is resumed inside an accumulation window takes the steps of an uninterrupted run."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from accel import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin
from accel.checkpoints.train_state import ClockState
from accel.loop.accumulator import StepClock
from accel_backends import DDPConfig, FSDPConfig
from accel_data.order.cursor import Window
from accel_testing.ranks.pool import RankPool


def trained(stop: int, place: Path, begin: Path | None = None, *, weighted: bool) -> torch.Tensor:
    """The weights behind ``stop`` samples, where the state is saved too."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(global_batch_size=24, data_seed=7))
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=torch.float64)
    samples = [(x, x.abs().sum().round() + 1) for x in torch.randn(96, 3, dtype=torch.float64)]
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), 0.01), DataLoader(samples, batch_size=2, shuffle=True)
    )
    if begin is not None:
        accelerator.load_state(begin)
    for x, terms in loader:
        with accelerator.accumulate(model):
            losses = model(x).square().sum(1) * terms
            if weighted:
                accelerator.backward(losses.sum(), weight=terms.sum())
            else:
                accelerator.backward(losses.mean())
            optimizer.step()
            optimizer.zero_grad()
        if loader.position.samples >= stop:
            break
    accelerator.save_state(place)
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("stop", [36, 50])
def test_a_run_resumed_inside_a_window_takes_the_same_steps(tmp_path: Path, stop: int, weighted: bool) -> None:
    uninterrupted = trained(96, tmp_path / "uninterrupted", weighted=weighted)
    trained(stop, tmp_path / "first", weighted=weighted)
    trained(stop + 4, tmp_path / "second", tmp_path / "first", weighted=weighted)
    resumed = trained(96, tmp_path / "third", tmp_path / "second", weighted=weighted)
    torch.testing.assert_close(resumed, uninterrupted, rtol=1e-10, atol=1e-12)


def test_a_resumed_window_without_a_further_backward_is_divided_by_the_weights_that_were_saved(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((3, 1), 6.0, dtype=torch.float64)).sum(), weight=3)
    accelerator.load_state(accelerator.save_state(tmp_path / "open"))
    with accelerator.accumulate(model):
        optimizer.step()
    assert float(model.weight.detach()) == pytest.approx(-6.0, rel=1e-12)


def test_a_head_that_only_the_batches_before_the_save_reached_is_divided_by_all_weights(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    models = [nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2)]
    for model in models:
        nn.init.ones_(model.weight)
    body, head = accelerator.prepare(*models)
    with accelerator.accumulate(body):
        accelerator.backward(head(body(torch.full((3, 1), 6.0, dtype=torch.float64))).sum(), weight=3)
    accelerator.load_state(accelerator.save_state(tmp_path / "open"))
    for _ in range(2):
        with accelerator.accumulate(body):
            accelerator.backward(body(torch.full((4, 1), 6.0, dtype=torch.float64)).sum(), weight=4)
    assert float(head.weight.grad) == pytest.approx(3 * 6 / 11, rel=1e-12)


def test_a_window_moves_between_numbers_of_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    uninterrupted = trained(96, tmp_path / "uninterrupted", weighted=True)
    rank_pool.run(trained, 36, tmp_path / "two", weighted=True, ranks=2)
    trained(40, tmp_path / "one", tmp_path / "two", weighted=True)
    found = rank_pool.run(trained, 96, tmp_path / "three", tmp_path / "one", weighted=True, ranks=3)
    for weights in found:
        torch.testing.assert_close(weights, uninterrupted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("accumulates", [True, False])
def test_a_run_without_accumulate_is_warned_that_the_open_window_does_not_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, accumulates: bool
) -> None:
    for resumed in (False, True):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        model = accelerator.prepare(nn.Linear(1, 1))
        if resumed:
            accelerator.load_state(tmp_path / "open")
        for _ in range(2):
            with nullcontext() if resumed and not accumulates else accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
        if not resumed:
            accelerator.save_state(tmp_path / "open")
        accelerator.end_training()
    found = [one for one in caplog.messages if "outside of accumulate(model)" in one]
    assert len(found) == (0 if accumulates else 1)


def test_a_window_that_other_ranks_divide_otherwise_stays_open() -> None:
    """Two ranks saved it in the third of 6 micro-batches, and this rank saves it again in the tenth of its 12."""

    class Loader:
        window = Window(9, 12, 1 / 12)
        batches_left, end_of_dataloader, weight = None, False, 1.0

        def claim(self) -> None:
            pass

        def disclaim(self) -> None:
            pass

    clock = StepClock(GradientAccumulationPlugin(num_steps=1))
    clock.load_state_dict({"steps": {"": [3, 3, 6]}})
    clock.began(loader := Loader())
    assert not clock.tick()
    assert clock.open
    assert clock.state_dict() == {"steps": {"": [4, 10, 12]}}
    assert loader.window.size == 12


def test_divisors_are_saved_for_one_copy_of_the_data() -> None:
    clock = StepClock(GradientAccumulationPlugin(num_steps=4))
    clock.tick()
    clock.window.denominator, clock.window.reference = 7.0, 21.0
    saved = ClockState(clock, 3.0).state_dict()
    assert saved == {"steps": {"": [1, 1, 4]}, "divisors": {"": [7.0 / 3.0, 7.0]}}
    assert clock.window.reference == 21.0
    other = StepClock(GradientAccumulationPlugin(num_steps=4))
    state = ClockState(other, 2.0)
    undo = state.undo()
    state.load_state_dict(saved)
    assert (other.window.denominator, other.window.reference, other.open) == (7.0 / 3.0 * 2.0, 14.0, True)
    undo()
    assert (other.window.reference, other.open) == (None, False)


def test_a_refused_load_keeps_the_weights_of_the_window() -> None:
    clock = StepClock(GradientAccumulationPlugin(num_steps=4))
    clock.tick()
    clock.window.weight = clock.window.denominator = 3.0
    undo, before = clock.undo(), clock.weights()
    clock.load_state_dict({"steps": {"": [0, 0, 1], "0": [1, 1, 4]}})
    assert clock.weights() == {}
    undo()
    assert clock.weights() == before == {"": 3.0}
    assert list(clock.windows()) == [""]


def test_a_load_that_an_object_refuses_keeps_the_open_window(tmp_path: Path) -> None:
    class Refusing:
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise ValueError("not this one")

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.register_for_checkpointing(Refusing())
    accelerator.save_state(tmp_path / "a")
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((3, 1), 6.0, dtype=torch.float64)).sum(), weight=3)
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(ValueError, match="not this one"):
        accelerator.load_state(tmp_path / "a")
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((1, 1), 2.0, dtype=torch.float64)).sum(), weight=1)
        optimizer.step()
    assert float(model.weight.detach()) == pytest.approx(-(18.0 + 2.0) / 4, rel=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp1"])
def test_resumed_ranks_without_a_further_backward_step_with_the_gradients_that_were_saved(
    tmp_path: Path, rank: int, strategy: str
) -> None:
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(1, 1, bias=False, dtype=torch.float64))
    nn.init.zeros_(model[0].weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((1, 1), 6.0 + 4 * rank, dtype=torch.float64)).sum())
    accelerator.load_state(accelerator.save_state(tmp_path / "open"))
    with accelerator.accumulate(model):
        optimizer.step()
    with accelerator.full_parameters(model):
        assert float(accelerator.unwrap_model(model)[0].weight) == -4.0
    accelerator.end_training()


class Parts(nn.Module):
    """Two weights, one of which a call may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        self.seldom = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.always.weight)
        nn.init.zeros_(self.seldom.weight)

    def forward(self, rows: torch.Tensor, *, both: bool) -> torch.Tensor:
        return self.always(rows) + self.seldom(rows) if both else self.always(rows)


SHARDED = pytest.param(
    FSDPConfig,
    marks=pytest.mark.skipif(
        not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
        reason="FSDP 2 needs torch 2.13 to leave parts out",
    ),
)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("config", [DDPConfig, SHARDED])
def test_resumed_ranks_average_what_the_rest_of_the_window_leaves_out(
    tmp_path: Path, rank: int, config: type[DDPConfig | FSDPConfig]
) -> None:
    for both in (True, False):
        strategy = config(find_unused_parameters=True)
        accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
        plain = Parts()
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
        if not both:
            accelerator.load_state(tmp_path / "open")
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), 6.0 + 4 * rank, dtype=torch.float64), both=both).sum())
            optimizer.step()
        if both:
            accelerator.save_state(tmp_path / "open")
    with accelerator.full_parameters(model):
        assert float(accelerator.unwrap_model(model).seldom.weight) == -4.0
        assert float(accelerator.unwrap_model(model).always.weight) == -8.0
    accelerator.end_training()
