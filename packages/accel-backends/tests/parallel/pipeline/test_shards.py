"""Models whose stages cannot be sharded over data-parallel ranks are refused with the parameter and what works."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from accel_backends.parallel.pipeline.causal_lm import CausalLM
from accel_backends.parallel.pipeline.shards import StageShards, check_optimizers, check_shardable
from accel_state.errors import PrepareError
from accel_testing.equivalence.causal_lms import tiny_llama

AXES = ("ep_size", "cp_size")


def test_a_parameter_without_dimension_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(
        PrepareError, match=r"scale of Linear has no dimension to shard; nearest: .*instead of ep_size and cp_size$"
    ):
        check_shardable(model, axes=AXES, upcast=False)


@pytest.mark.ranks(2)
def test_parameters_without_elements_stay_full(rank: int) -> None:
    model = tiny_llama()
    model.lm_head.scale, model.model.layers[0].scale = nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(0, 7))
    check_shardable(model, axes=AXES, upcast=False)
    group = dist.group.WORLD
    assert group is not None
    shards = StageShards(CausalLM.of(model), init_device_mesh("cpu", (2,)), group, axes=AXES)
    with shards.gathered():
        unused = model.lm_head.scale.sum() + model.model.layers[0].scale.sum()
        (model(input_ids=torch.arange(8 * rank, 8 * rank + 8)[None]).logits.square().mean() + unused).backward()
    shards.reduce()
    expected = tiny_llama()
    for each in range(2):
        (expected(input_ids=torch.arange(8 * each, 8 * each + 8)[None]).logits.square().mean() / 2).backward()
    found = dict(model.named_parameters())
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[name].grad.full_tensor(), parameter.grad)
    assert found["lm_head.scale"].grad.shape == (0,)


def test_trained_parameters_have_one_dtype() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with pytest.raises(
        PrepareError,
        match=r"stages that ep_size and cp_size shard .*0.weight is fp32, 1.weight is bf16; nearest: model.to",
    ):
        check_shardable(model, axes=AXES, upcast=False)
    check_shardable(model, axes=AXES, upcast=True)
    model[1].requires_grad_(False)
    check_shardable(model, axes=AXES, upcast=False)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.Adafactor, r"Adafactor looks at full parameters, .*of which ep_size and cp_size .*nearest: AdamW"),
        (lambda own: torch.optim.SGD(own, fused=True), r"SGD\(fused=True\): torch has no fused step .*foreach=True"),
    ],
)
def test_optimizers_that_cannot_step_on_shards_are_refused(make, words: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = make(model.parameters())
    with pytest.raises(PrepareError, match=words):
        check_optimizers([optimizer], {id(one): one for one in model.parameters()}, axes=AXES)
    check_optimizers([optimizer], {}, axes=AXES)


def test_a_state_of_another_shape_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight]["exp_avg"] = torch.zeros(4)
    with pytest.raises(PrepareError, match=r"AdamW holds exp_avg of shape \(4,\) for a parameter of shape \(2, 2\)"):
        check_optimizers([optimizer], {id(model.weight): model.weight}, axes=AXES)
