"""Which parameter a bad loss came from, where every rank sees only parts of the gradients."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator

DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
RUNS: dict[str, dict[str, Any]] = {
    **{f"zero {stage}": {"deepspeed_plugin": {"zero_stage": stage}} for stage in range(4)},
    "zero 2 in bf16": {"deepspeed_plugin": {"zero_stage": 2}, "mixed_precision": "bf16"},
    "zero 1, clipped": {"deepspeed_plugin": {"zero_stage": 1, "gradient_clipping": 0.01}},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, looked at late": {"strategy": "fsdp"},
    "ddp": {"strategy": "ddp"},
}
WIDTH, STEPS, EVERY = 7, 21, 3


class TwoWays(nn.Module):
    """The first number goes through the layer that is last, the others through another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.others, self.last = nn.Linear(WIDTH, 9), nn.Linear(1, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.others(x[:, 1:]).square().mean() + self.last(x[:, :1]).square().mean()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.rand(4, 1 + WIDTH, generator=torch.Generator().manual_seed(7 * step + rank)) + 0.5


@pytest.mark.sampled(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("run", [pytest.param(run, marks=DEEPSPEED if "zero" in run else ()) for run in RUNS])
@pytest.mark.parametrize("kind", ["spike", "nonfinite"])
@pytest.mark.parametrize("whose", [0, 1])
def test_a_bad_loss_names_the_parameter_whichever_rank_holds_it(rank: int, run: str, kind: str, whose: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **RUNS[run])
    net = TwoWays()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-4))
    meter = accelerator.meter(every=EVERY)
    meter._late = run.endswith("late")
    for step in range(STEPS):
        total = torch.zeros(())
        for part in range(2):
            inputs = batch(2 * step + part, rank)
            if step == STEPS - 1 and rank == whose and part == 0:
                inputs[:, 0] = 1e3 if kind == "spike" else torch.nan
            with accelerator.accumulate(model):
                loss = model(inputs)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach().float()
        meter.step(total)
    accelerator.free_memory()
    assert len(meter.troubles) == (1 if rank in (0, whose) else 0)
    for trouble in meter.troubles:
        assert (trouble.rank, trouble.kind, trouble.step) == (whose, kind, STEPS)
        names = [name.partition(" ")[0] for name in trouble.parameters.split(", ")]
        assert set(names[:2]) == {"last.weight", "last.bias"}
        assert len(names) == (3 if kind == "spike" else 2)
