"""State dicts of engines whose model has hooks of its own."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Bundle, Run, load_backend
from accel_deepspeed import DeepSpeedPlugin
from accel_precision import PrecisionPolicy
from accel_state import Session

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Renames the weight, and adds an entry of its own."""
    state[f"{prefix}renamed"] = state.pop(f"{prefix}weight")
    state[f"{prefix}added"] = torch.ones(2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_weight_that_a_hook_renames_is_saved_in_full_under_its_own_name(
    rank: int, world_size: int, stage: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    model[0].register_state_dict_post_hook(rename)
    with Session.open(cpu=True) as session:
        policy = PrecisionPolicy.parse("bf16", device_type="cpu")
        backend = load_backend("deepspeed")(Run(session, policy), DeepSpeedPlugin.build({"zero_stage": stage}))
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine = backend.prepare(Bundle([model], [optimizer], [])).models[0]
            state = backend.states.full_model(engine, main_only=False)
            backend.states.load_model(engine, state)
            again = backend.states.full_model(engine, main_only=False)
        finally:
            backend.close()
    assert set(state) == {*expected, "0.added"}
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)  # fp32 master weights, not rounded
        torch.testing.assert_close(again[name], value, rtol=0, atol=0)
