"""The load-balancing loss of a router counts the tokens of all ranks, whatever the shards of sequences hold."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel_backends.parallel.context_parallel import Context
from accel_backends.parallel.router_loss import sum_router_loss
from accel_backends.parallel.sdpa import apply_context_parallel
from accel_backends.parallel.sequence_inputs import SequenceInputs

from .tiny_models import distance, mixtral, tokens


def whole_mixtral() -> nn.Module:
    return mixtral(output_router_logits=True, router_aux_loss_coef=0.5, use_cache=False)


def sequence_parallel_mixtral(mesh: DeviceMesh) -> nn.Module:
    model, context = whole_mixtral(), Context(mesh, "ulysses")
    sum_router_loss(model, None, evaluation=context.group)
    apply_context_parallel(model, context)
    SequenceInputs(context).attach(model)
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_shard_of_padding_only_has_no_part_in_the_loss(rank: int, side: str) -> None:
    """Neither the loss nor a gradient is NaN, and no layer sees the padding."""
    expected = whole_mixtral()
    model = sequence_parallel_mixtral(init_device_mesh("cpu", (2,), mesh_dim_names=("sp",)))
    ids, mask = tokens(0), torch.zeros(2, 16, dtype=torch.long)
    for row, real in enumerate((8, 5)):
        mask[row, slice(None, real) if side == "right" else slice(16 - real, None)] = 1
    places = torch.arange(16).expand(2, 16)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100), "position_ids": places}
    wanted, found = expected(**batch), model(**batch)
    for one in (wanted, found):
        one.loss.backward()
    assert float(found.aux_loss) == pytest.approx(float(wanted.aux_loss), rel=1e-5)
    assert float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-5)
    for (name, ours), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        assert distance(ours.grad / 2, other.grad) < 1e-5, name


@pytest.mark.ranks(4)
def test_replicas_evaluate_different_numbers_of_batches(rank: int) -> None:
    """Without gradients only the ranks with shards of the same sequences communicate."""
    model = sequence_parallel_mixtral(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))["sp"])
    expected = whole_mixtral()
    with torch.no_grad():
        for step in range(1 + rank // 2):
            wanted = float(expected(input_ids=tokens(step)).aux_loss)
            assert float(model(input_ids=tokens(step)).aux_loss) == pytest.approx(wanted, rel=1e-5)
    dist.barrier()
