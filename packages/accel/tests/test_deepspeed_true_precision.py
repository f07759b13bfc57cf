"""Training in bf16 without fp32 copies, by DeepSpeed: as by DDP, which each of them is compared with."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel_state import BackendError, ConfigError

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def make_net() -> nn.Module:
    """So small that a rank's optimizer lacks some of the parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


class Run:
    """One run on this rank, of windows of two micro-batches."""

    def __init__(self, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, mixed_precision="bf16-true", gradient_accumulation_steps=2, **options)
        net = make_net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        self.model, self.optimizer = self.accelerator.prepare(net, optimizer)

    def train(self, steps: range) -> None:
        for step in range(2 * steps.start, 2 * steps.stop):
            with self.accelerator.accumulate(self.model):
                output = self.model(batch(step, self.accelerator.process_index))
                assert output.dtype == torch.bfloat16
                self.accelerator.backward(output.square().mean())
                self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def end(self) -> dict[str, torch.Tensor]:
        state = self.accelerator.get_state_dict(self.model)
        self.accelerator.free_memory()
        self.accelerator.end_training()
        return state


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.sampled(1)
def test_weights_and_states_are_bf16_and_those_of_ddp(rank: int, stage: int) -> None:
    states = []
    for options in ({}, {"deepspeed_plugin": {"zero_stage": stage}}):
        run = Run(**options)
        run.train(range(4))
        kept = [value for state in run.optimizer.state.values() for key, value in state.items() if key != "step"]
        assert {value.dtype for value in kept} == {torch.bfloat16}
        states.append(run.end())
    if rank == 0:
        assert {value.dtype for value in states[1].values()} == {torch.bfloat16}
        for name, value in states[0].items():
            torch.testing.assert_close(states[1][name], value, rtol=2e-2, atol=2e-2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.sampled(1)
def test_a_resumed_run_goes_on_with_the_same_bits(rank: int, stage: int, tmp_path: Path) -> None:
    options = {"deepspeed_plugin": {"zero_stage": stage}}
    first = Run(**options)
    first.train(range(2))
    first.accelerator.save_state(str(tmp_path / "saved"))
    first.train(range(2, 4))
    expected = first.end()
    second = Run(**options)
    second.accelerator.load_state(str(tmp_path / "saved"))
    second.train(range(2, 4))
    found = second.end()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("plugin", "precision", "words"),
    [
        ({"zero_stage": 0}, "bf16-true", "nearest: zero_stage=1"),
        ({"zero_stage": 2, "offload_optimizer_device": "cpu"}, "bf16-true", "with offload_optimizer"),
        (
            {"hf_ds_config": {"bf16": {"bf16_optimizer_states": False}, "zero_optimization": {"stage": 2}}},
            "bf16-true",
            "bf16_optimizer_states = false",
        ),
        ({"zero_stage": 2}, "fp64-true", "nearest that it does: 'fp32-true'"),
    ],
    ids=["stage 0", "offloaded", "config", "fp64"],
)
def test_what_keeps_other_copies_is_refused(rank: int, plugin: dict[str, Any], precision: str, words: str) -> None:
    def prepare() -> None:
        accelerator = Accelerator(cpu=True, mixed_precision=precision, deepspeed_plugin=plugin)
        try:
            net = make_net()
            accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        finally:
            accelerator.end_training()

    with pytest.raises((ConfigError, BackendError), match=words):
        prepare()
