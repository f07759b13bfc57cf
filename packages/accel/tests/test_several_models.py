"""Several models, optimizers and schedulers in one loop."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accel import Accelerator, DataLoaderConfiguration, GradScalerKwargs
from accel_state.errors import BackendError, PrepareError


def two(accelerator: Accelerator):
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 2).double(), nn.Linear(2, 1).double()
    return accelerator.prepare(
        generator,
        critic,
        torch.optim.SGD(generator.parameters(), lr=0.1),
        torch.optim.SGD(critic.parameters(), lr=0.1),
    )


def noise(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def adversarial(accelerator: Accelerator, steps: int, ranks: list[int]) -> list[torch.Tensor]:
    """A GAN loop; this process sees the noise of ``ranks``."""
    generator, critic, generator_optimizer, critic_optimizer = two(accelerator)
    for step in range(steps):
        z = torch.cat([noise(step, rank) for rank in ranks])
        with accelerator.accumulate(critic):
            with torch.no_grad():
                fake = generator(z)
            accelerator.backward((critic(fake) - critic(z)).mean())
            critic_optimizer.step()
            critic_optimizer.zero_grad()
        with accelerator.accumulate(generator):
            accelerator.backward(-critic(generator(z)).square().mean())
            generator_optimizer.step()
            generator_optimizer.zero_grad()
            critic_optimizer.optimizer.zero_grad()
    models = (accelerator.unwrap_model(generator), accelerator.unwrap_model(critic))
    return [parameter.detach() for model in models for parameter in model.parameters()]


@pytest.mark.ranks(2)
def test_a_gan_on_two_ranks_equals_one_on_all_the_noise(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    mine = adversarial(accelerator, 6, [rank])
    generator, critic = nn.Linear(2, 2).double(), nn.Linear(2, 1).double()
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 2).double(), nn.Linear(2, 1).double()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    for step in range(6):
        z = torch.cat([noise(step, 0), noise(step, 1)])
        (critic(generator(z).detach()) - critic(z)).mean().backward()
        optimizers[1].step()
        critic.zero_grad()
        (-critic(generator(z)).square().mean()).backward()
        optimizers[0].step()
        generator.zero_grad()
        critic.zero_grad()
    plain = [parameter.detach() for model in (generator, critic) for parameter in model.parameters()]
    for one, two_ in zip(mine, plain, strict=True):
        torch.testing.assert_close(one, two_, rtol=1e-10, atol=1e-12)


def test_each_model_steps_when_its_own_window_is_full() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    generator, critic, *_ = two(accelerator)
    dues = []
    for _ in range(4):
        for model in (critic, generator):
            with accelerator.accumulate(model):
                dues.append(accelerator.sync_gradients)
    assert dues == [False, False, True, True] * 2


def test_weights_of_two_losses_do_not_mix() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second, *_ = two(accelerator)
    x = torch.ones(3, 2, dtype=torch.float64)
    for _ in range(2):
        with accelerator.accumulate(first):
            accelerator.backward(first(x).sum(), weight=3)
        with accelerator.accumulate(second):
            accelerator.backward(second(x).sum(), weight=30)
    assert first.bias.grad.tolist() == pytest.approx([1.0, 1.0])
    assert second.bias.grad.tolist() == pytest.approx([0.1])


def test_a_model_that_was_not_prepared_cannot_accumulate() -> None:
    accelerator = Accelerator(cpu=True)
    two(accelerator)
    with pytest.raises(PrepareError, match="prepare did not return"), accelerator.accumulate(nn.Linear(1, 1)):
        pass


def test_a_teacher_in_evaluation_mode_is_placed_but_not_synchronised() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    teacher = accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True)
    assert type(teacher).__name__ == "Linear"
    assert teacher(torch.ones(1, 2)).dtype == torch.float32


def two_in_fp16(accumulate: int = 1):
    """Two models in fp16 whose first optimizer overflows when the loss is multiplied by 1e30."""
    scaling = GradScalerKwargs(init_scale=1024.0, growth_interval=2)
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", gradient_accumulation_steps=accumulate, kwargs_handlers=[scaling]
    )
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    return accelerator, *accelerator.prepare(*models, *(torch.optim.SGD(one.parameters(), lr=0.01) for one in models))


def half_a_round(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, *, bad: bool = False):
    with accelerator.accumulate(model):
        loss = model(torch.ones(2, 2)).square().mean()
        accelerator.backward(loss * (1e38 if bad else 1.0))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("bad", "scale"), [((), 2048.0), ((0,), 512.0), ((1,), 512.0), ((0, 1), 512.0)])
def test_a_round_of_two_optimizers_changes_the_loss_scale_once(bad: tuple[int, ...], scale: float) -> None:
    """Two good rounds let it grow (``growth_interval`` of 2); one with an overflow, of one or both, halves it once."""
    accelerator, first, second, *optimizers = two_in_fp16()
    for number in range(2 if not bad else 1):
        for position, model in enumerate((first, second)):
            half_a_round(accelerator, model, optimizers[position], bad=position in bad)
            assert accelerator.scaler.current == 1024.0, (number, position)
            assert optimizers[position].step_was_skipped == (position in bad)
    half_a_round(accelerator, first, optimizers[0])
    assert accelerator.scaler.current == scale


def test_the_loss_scale_stays_while_another_models_window_is_open() -> None:
    """Its gradients carry the scale, so that they would otherwise be divided by another than they were made with."""
    accelerator, first, second, *optimizers = two_in_fp16(accumulate=2)
    half_a_round(accelerator, second, optimizers[1])
    half_a_round(accelerator, first, optimizers[0], bad=True)
    half_a_round(accelerator, first, optimizers[0])  # overflows, and steps no more
    assert optimizers[0].step_was_skipped
    half_a_round(accelerator, first, optimizers[0])
    assert accelerator.scaler.current == 1024.0
    expected = 2 * (second(torch.ones(2, 2)).mean() * torch.ones(2)).detach()
    before = second.weight.detach().clone()
    with accelerator.accumulate(second):
        accelerator.backward(second(torch.ones(2, 2)).square().mean())
        accelerator.unscale_gradients()
        assert second.weight.grad[0].tolist() == pytest.approx(expected.tolist(), rel=1e-2)
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert not torch.equal(second.weight, before)
    half_a_round(accelerator, second, optimizers[1])
    half_a_round(accelerator, second, optimizers[1])
    half_a_round(accelerator, first, optimizers[0])  # closes the last window that was open
    half_a_round(accelerator, first, optimizers[0])
    assert accelerator.scaler.current == 512.0


def test_clipping_one_model_leaves_the_scale_in_the_gradients_of_another() -> None:
    accelerator, first, second, *optimizers = two_in_fp16(accumulate=2)
    half_a_round(accelerator, second, optimizers[1])
    held = second.weight.grad.clone()
    half_a_round(accelerator, first, optimizers[0])
    half_a_round(accelerator, first, optimizers[0])
    assert torch.equal(second.weight.grad, held)


def joint(models: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return models[1](models[0](x)).square().sum()


def steps_of(weighted: bool, named: int, batches: int) -> list[torch.Tensor]:
    """Weights after windows of three micro-batches of a loss of two models, of which ``accumulate`` is given some."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    generator, critic, *optimizers = two(accelerator)
    rows = torch.randn(2 * batches, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    stream = accelerator.prepare(DataLoader(Stream(rows), batch_size=2))
    for number, batch in enumerate(stream):
        with accelerator.accumulate(*[generator, critic][:named]):
            loss = joint([generator, critic], batch)
            accelerator.backward(loss if weighted else loss / 2, weight=1 + 2 * number if weighted else None)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.detach() for model in (generator, critic) for parameter in model.parameters()]


class Stream(IterableDataset[torch.Tensor]):
    """Rows whose number is not known before the last."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.rows)


@pytest.mark.parametrize(("weighted", "batches"), [(True, 6), (False, 5)], ids=["weighted", "short window"])
def test_a_second_model_of_the_loss_is_normalised_though_accumulate_is_given_the_first(
    weighted: bool, batches: int
) -> None:
    for one, other in zip(steps_of(weighted, 1, batches), steps_of(weighted, 2, batches), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_an_open_window_goes_on_when_another_model_is_prepared() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = accelerator.prepare(nn.Linear(2, 1))
    dues = []
    for number in range(6):
        if number == 1:
            accelerator.prepare(nn.Linear(2, 1))
        with accelerator.accumulate(model):
            dues.append(accelerator.sync_gradients)
    assert dues == [False, False, True] * 2


def test_a_prepared_model_that_is_compiled_accumulates() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.compile(accelerator.prepare(nn.Linear(2, 1)), backend="eager")
    dues = []
    for _ in range(2):
        with accelerator.accumulate(model):
            dues.append(accelerator.sync_gradients)
    assert dues == [False, True]


def test_a_scheduler_of_an_optimizer_that_is_not_prepared_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    foreign = torch.optim.lr_scheduler.StepLR(torch.optim.Adam(model.parameters()), 1)
    with pytest.raises(PrepareError, match=r"StepLR drives a Adam that is not prepared \(SGD is\)"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), foreign)
    optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[1]
    with pytest.raises(PrepareError, match="StepLR drives a Adam"):
        accelerator.prepare(foreign)
    for one in (optimizer, optimizer.optimizer):
        assert accelerator.prepare(torch.optim.lr_scheduler.StepLR(one, 1)).optimizers == (optimizer,)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp1"])
@pytest.mark.sampled(2)
def test_inside_a_window_the_norm_is_that_of_what_this_process_has_accumulated(
    rank: int, strategy: str, precision: str
) -> None:
    scaling = GradScalerKwargs(init_scale=1024.0)
    accelerator = Accelerator(
        cpu=True,
        strategy=strategy,
        mixed_precision=precision,
        gradient_accumulation_steps=3,
        kwargs_handlers=[scaling],
    )
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = copy.deepcopy(plain)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(2):
        x = torch.full((2, 4), 1.0 + rank + number)
        (plain(x).square().mean() / 3).backward()
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        expected = nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
        torch.testing.assert_close(norm.float(), expected, rtol=1e-2 if precision == "fp16" else 1e-5, atol=1e-5)
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_weights_within_a_join_are_refused_on_every_rank(rank: int) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    model = accelerator.prepare(nn.Linear(2, 1))
    with accelerator.join_uneven_inputs([model]):
        loss = model(torch.ones(2, 2)).sum()
        with pytest.raises(BackendError, match=r"weight=.*join_uneven_inputs.*even_batches=True"):
            accelerator.backward(loss, weight=2)
    accelerator.backward(model(torch.ones(2, 2)).sum(), weight=2)
    accelerator.end_training()
