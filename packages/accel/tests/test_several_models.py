"""Several models, optimizers and schedulers in one loop."""

import pytest
import torch
from torch import nn

from accel import Accelerator, GradScalerKwargs


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
    from accel_state.errors import PrepareError

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
