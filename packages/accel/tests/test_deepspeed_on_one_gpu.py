"""DeepSpeed's engine in one process, on a GPU and, with the same body, on the CPU: the weights of a loop by hand."""

import copy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import Accelerator, DeepSpeedPlugin

pytestmark = [
    pytest.mark.ranks(1, group=False, timeout=180),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]
STEPS = 4


@pytest.mark.parametrize(
    ("stage", "device"),
    [
        *(pytest.param(stage, "gpu", marks=pytest.mark.gpu) for stage in range(4)),
        *((stage, "cpu") for stage in (0, 3)),
    ],
)
def test_a_stage_trains_and_resumes_as_a_loop_by_hand(stage: int, device: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    model = copy.deepcopy(reference)
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=2)
    accelerator = Accelerator(cpu=device == "cpu", deepspeed_plugin=plugin)
    reference.to(accelerator.device)
    by_hand = torch.optim.AdamW(reference.parameters(), lr=0.01)
    engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def train(first: int) -> None:
        for number in range(first, first + 2 * STEPS):
            batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).to(accelerator.device)
            with accelerator.accumulate(engine):
                accelerator.backward(engine(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            (reference(batch).square().mean() / 2).backward()
            if number % 2:
                by_hand.step()
                by_hand.zero_grad()

    train(0)
    accelerator.save_state(tmp_path / "saved")
    accelerator.load_state(tmp_path / "saved")
    train(2 * STEPS)
    found = accelerator.get_state_dict(engine)
    for name, expected in reference.state_dict().items():
        assert torch.allclose(found[name].to(expected), expected, atol=1e-5), name
    accelerator.end_training()
