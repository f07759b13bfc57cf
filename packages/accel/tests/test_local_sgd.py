"""Local SGD: apart inside of a round, together at its end."""

from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.local_sgd import LocalSGD
from accel_state.errors import ConfigError


def spread(accelerator: Accelerator, model: nn.Module) -> float:
    weights = accelerator.gather(
        model.weight.detach()[None] if not hasattr(model, "module") else model.module.weight[None]
    )
    return (weights[0] - weights[-1]).abs().max().item()


@pytest.mark.ranks(2)
def test_parameters_meet_every_few_steps_and_at_the_end(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    alone = [model.weight.detach().clone() for _ in range(2)]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.randn(5, 2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    spreads = []
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        for batch in inputs:
            accelerator.backward(model(batch[rank]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            spreads.append(spread(accelerator, model) > 0)
    assert spreads == [True, False, True, False, True]
    assert spread(accelerator, model) == 0.0
    for number, batch in enumerate(inputs, 1):
        alone = [w - 0.1 * 2 * (batch[r] @ w.T).T @ batch[r] / 4 for r, w in enumerate(alone)]
        if number in (2, 4, 5):
            alone = [(alone[0] + alone[1]) / 2] * 2
    torch.testing.assert_close(model.module.weight.detach(), alone[0], rtol=1e-12, atol=1e-14)


def test_one_process_has_nothing_to_average() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    with LocalSGD(accelerator, model, 1) as local:
        local.step()
    assert not local.enabled


@pytest.mark.parametrize("steps", [0, -1, 2.5, None, "2"])
def test_a_round_of_no_whole_number_of_steps_is_refused(steps: Any) -> None:
    with pytest.raises(ConfigError, match=f"local_sgd_steps is {steps!r}; expected an integer"):
        LocalSGD(Accelerator(cpu=True), nn.Linear(2, 2), steps)
