"""Gradients that a save finds: those of later steps go on in a resumed run, and those of earlier steps do not."""

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accel import Accelerator
from accel.checkpoints.gradients import GRADIENTS, ZEROS
from accel_backends import DDPConfig, FSDPConfig
from accel_ckpt import open_checkpoint
from accel_deepspeed import DeepSpeedConfig

STEPS = 14
WRITER, CRITIC = 0, 1
STRATEGIES = {"zero2": DeepSpeedConfig(zero_stage=2), "zero3": DeepSpeedConfig(zero_stage=3)}
UNUSED = {"ddp": DDPConfig(find_unused_parameters=True), "fsdp": FSDPConfig(find_unused_parameters=True)}
SHARDED = pytest.param(
    "fsdp",
    marks=pytest.mark.skipif(
        not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
        reason="FSDP 2 needs torch 2.13 to leave parts out",
    ),
)
Run = Callable[..., torch.Tensor]


class Parts(nn.Module):
    """A layer, and one that few micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(3, 2)
        self.seldom = nn.Linear(3, 2)

    def forward(self, rows: torch.Tensor, *, both: bool) -> torch.Tensor:
        return self.always(rows) + self.seldom(rows) if both else self.always(rows)


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def weights(accelerator: Accelerator, *models: nn.Module) -> torch.Tensor:
    """All weights of sharded models are those of the main process; the others have none."""
    found = [accelerator.get_state_dict(model) for model in models]
    return torch.cat([torch.zeros(0), *(one.detach().reshape(-1) for state in found for one in state.values())])


def adversaries(strategy: str | None, clears: str, place: Path, *, save: int = -1, load: int = -1) -> torch.Tensor:
    """Weights of two networks, the second of which goes backward with the losses of both, in windows of their own."""
    accelerator = Accelerator(cpu=True, strategy=STRATEGIES.get(strategy, strategy), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    dtype = torch.float32 if strategy in STRATEGIES else torch.float64
    parts = [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))]
    made = [(one.to(dtype), torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)) for one in parts]
    models, optimizers = zip(*(accelerator.prepare(*one) for one in made), strict=True)
    writer, critic = models
    if load >= 0:
        accelerator.load_state(place / str(load))
    for number, batch in enumerate(rows()):
        if number <= load:
            continue
        turn = WRITER if number % 3 == 2 else CRITIC
        with accelerator.accumulate(models[turn]):
            if clears == "before":
                optimizers[turn].zero_grad()
            written = writer(batch.to(dtype))
            if turn == WRITER:
                loss = (critic(written) - 1).square().mean()
            else:
                loss = critic(written.detach()).mean() + (critic(batch.to(dtype)) - 1).square().mean()
            accelerator.backward(loss)
            optimizers[turn].step()
            if clears == "after":
                optimizers[turn].zero_grad()
            if number == save:
                accelerator.save_state(place / str(save))
            if clears == "after the save":
                optimizers[turn].zero_grad()
    result = weights(accelerator, writer, critic)
    accelerator.end_training()
    return result


def seldom_used(strategy: str | None, clears: str, place: Path, *, save: int = -1, load: int = -1) -> torch.Tensor:
    """Weights of a model whose optimizer moves a part without gradients of its own by momentum: they are zero."""
    accelerator = Accelerator(cpu=True, strategy=UNUSED.get(strategy, strategy), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = Parts().double()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    if load >= 0:
        accelerator.load_state(place / str(load))
    for number, batch in enumerate(rows()):
        if number <= load:
            continue
        with accelerator.accumulate(model):
            if clears == "before":
                optimizer.zero_grad(set_to_none=False)
            accelerator.backward(model(batch, both=number < 2).square().mean())
            optimizer.step()
            if clears == "after":
                optimizer.zero_grad(set_to_none=False)
            if number == save:
                accelerator.save_state(place / str(save))
            if clears == "after the save":
                optimizer.zero_grad(set_to_none=False)
    result = weights(accelerator, model)
    accelerator.end_training()
    return result


def check_every_resumption(
    run: Run, strategy: str | None, clears: str, place: Path, numbers: Iterable[int], tolerance: float = 1e-12
) -> None:
    """A run that is saved after a micro-batch and resumed ends with the weights of one that went on."""
    for number in numbers:
        expected = run(strategy, clears, place, save=number)
        resumed = run(strategy, clears, place, load=number)
        torch.testing.assert_close(resumed, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("clears", ["before", "after", "after the save"])
@pytest.mark.parametrize("run", [adversaries, seldom_used])
def test_a_resumed_run_has_the_gradients_of_later_steps(tmp_path: Path, run: Run, clears: str) -> None:
    check_every_resumption(run, None, clears, tmp_path, range(1, 10))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("clears", ["before", "after", "after the save"])
@pytest.mark.parametrize("run", [adversaries, seldom_used])
@pytest.mark.parametrize("strategy", ["ddp", SHARDED, "fsdp1"])
@pytest.mark.ranks(2)
def test_resumed_ranks_have_the_gradients_of_later_steps(tmp_path: Path, strategy: str, run: Run, clears: str) -> None:
    check_every_resumption(run, strategy, clears, tmp_path, range(2, 6))


@pytest.mark.sampled(1)
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("clears", ["before", "after", "after the save"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.ranks(2)
def test_resumed_engines_have_the_gradients_of_later_steps(tmp_path: Path, strategy: str, clears: str) -> None:
    check_every_resumption(adversaries, strategy, clears, tmp_path, range(2, 6), tolerance=1e-6)


@pytest.mark.parametrize("run", [adversaries, seldom_used])
def test_another_number_of_ranks_has_the_gradients_of_later_steps(rank_pool, tmp_path: Path, run: Run) -> None:
    for number in range(2, 6):
        expected = rank_pool.run(run, "ddp", "before", tmp_path, save=number, ranks=2)[0]
        resumed = rank_pool.run(run, "ddp", "before", tmp_path, load=number, ranks=1)[0]
        torch.testing.assert_close(resumed, expected, rtol=1e-12, atol=1e-14)


def test_gradients_that_no_later_step_uses_are_not_saved(tmp_path: Path) -> None:
    """Those that an optimizer has stepped with are about to be cleared, by whatever the loop calls first."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for clear in (None, optimizer.zero_grad):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        if clear is not None:
            clear()
        saved = accelerator.save_state(tmp_path / "state")
        assert not {GRADIENTS, ZEROS} & set(open_checkpoint(saved).local_names(0))
