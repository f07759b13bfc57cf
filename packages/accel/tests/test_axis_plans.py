"""Predictions for degrees of parallelism against what ranks hold: parameters, gradients and states within 1 %."""

from typing import Any

import pytest

from accel import Accelerator, ParallelismConfig
from accel_planner import Hardware
from accel_planner.cost.axis_degrees import AxisDegrees
from accel_planner.cost.axis_plan import Batching, plan_degrees
from accel_planner.cost.transformer_shape import TransformerShape
from accel_testing import RankPool

pytest.importorskip("transformers")


def model_of(experts: bool) -> Any:
    from accel_testing.equivalence.causal_lms import tiny_llama, tiny_mixtral

    return tiny_mixtral() if experts else tiny_llama()


def held(degrees: dict[str, int], experts: bool) -> tuple[int, int, int]:
    """Bytes of this rank after a step: parameters, gradients, optimizer states."""
    import torch

    accelerator = Accelerator(
        cpu=True, parallelism_config=ParallelismConfig(**{f"{axis}_size": size for axis, size in degrees.items()})
    )
    own = model_of(experts)
    model, optimizer = accelerator.prepare(own, torch.optim.AdamW(own.parameters()))
    batch = torch.arange(64).view(4, 16)
    accelerator.backward(model(input_ids=batch, labels=batch).loss)
    optimizer.step()
    found = accelerator._monitor.memory()
    return found.parameters, found.gradients, found.optimizer


@pytest.mark.parametrize(
    "degrees",
    [
        {"tp": 2},
        {"pp": 2},
        {"ep": 2},
        pytest.param({"sp": 2}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "dp_shard": 2}, marks=pytest.mark.slow),
        pytest.param({"cp": 2, "dp_shard": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp_shard": 2}, marks=pytest.mark.slow),
        pytest.param({"ep": 2, "dp_shard": 2}, marks=pytest.mark.slow),
        pytest.param({"ep": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"ep": 2, "cp": 2}, marks=pytest.mark.slow),
        pytest.param({"ep": 2, "sp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.sampled(1)
def test_ranks_hold_what_is_predicted(degrees: dict[str, int], rank_pool: RankPool) -> None:
    experts = "ep" in degrees
    planned = AxisDegrees(**degrees)
    shape = TransformerShape.from_config(model_of(experts).config.to_dict())
    plan = plan_degrees(shape, Hardware(devices=planned.ranks), planned, Batching(64, 4, 16), checkpointing=False)
    found = rank_pool.run(held, degrees, experts, ranks=planned.ranks)
    most = tuple(max(column) for column in zip(*found, strict=True))
    off = [predicted / real - 1 for predicted, real in zip(predicted_of(plan), most, strict=True)]
    assert all(abs(part) <= 0.01 for part in off), (predicted_of(plan), most)


def predicted_of(plan: Any) -> tuple[int, int, int]:
    return plan.parameters, plan.gradients, plan.optimizer
