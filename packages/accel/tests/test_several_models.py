"""Several models, optimizers and schedulers in one loop."""

import pytest
import torch
from torch import nn

from accel import Accelerator


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
