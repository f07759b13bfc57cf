"""Collectives of sharded models that fail because another rank has left name that rank."""

from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Backend, Bundle, FSDP1Backend, FSDPBackend, FSDPConfig, Run
from accel_precision import PrecisionPolicy
from accel_state import CollectiveError, Session
from accel_testing.equivalence.models import make_model
from accel_testing.ranks.groups import leave_group

VERSIONS = {2: FSDPBackend, 1: FSDP1Backend}


def prepared(version: int, **options: Any) -> tuple[Backend, nn.Module]:
    session = Session.open(cpu=True)
    run = Run(session, PrecisionPolicy.parse("no", device_type="cpu"))
    backend = VERSIONS[version](run, FSDPConfig(fsdp_version=version, **options))
    model = make_model("transformer", dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return backend, backend.prepare(Bundle([model], [optimizer])).models[0]


def tokens() -> torch.Tensor:
    return torch.arange(12).view(2, 6)


@pytest.mark.fault
@pytest.mark.ranks(2)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_forward_names_the_rank_that_has_left(rank: int, version: int) -> None:
    _, model = prepared(version)
    if rank == 1:
        leave_group(patience=3)
        return
    with pytest.raises(CollectiveError, match=r"rank 1 will not come to forward\((?s:.*)rank 1 has ended"):
        model(tokens())


@pytest.mark.fault
@pytest.mark.ranks(2)
def test_a_backward_by_hand_names_the_rank_that_has_left(rank: int) -> None:
    _, model = prepared(2)
    loss = model(tokens()).square().mean()
    if rank == 1:
        leave_group(patience=3)
        return
    with pytest.raises(CollectiveError, match=r"rank 1 will not come to(?s:.*)rank 1 has ended"):
        loss.backward()


@pytest.mark.fault
@pytest.mark.ranks(2)
@pytest.mark.parametrize("version", VERSIONS)
def test_clipping_names_the_rank_that_has_left(rank: int, version: int) -> None:
    backend, model = prepared(version)
    backend.backward(model(tokens()).square().mean())
    if rank == 1:
        leave_group(patience=3)
        return
    with pytest.raises(CollectiveError, match=r"rank 1 will not come to gradient norm(?s:.*)rank 1 has ended"):
        backend.gradients.clip_norm(model.parameters(), 1.0)


@pytest.mark.fault
@pytest.mark.ranks(2)
@pytest.mark.parametrize("version", VERSIONS)
def test_an_error_of_the_model_itself_stays_as_it_is(rank: int, version: int) -> None:
    _, model = prepared(version)
    with pytest.raises(IndexError):
        model(tokens() + 100)


@pytest.mark.ranks(2)
def test_memory_for_communication_may_still_come_from_the_group(rank: int) -> None:
    backend, model = prepared(2)
    if not hasattr(model, "set_allocate_memory_from_process_group_for_comm"):
        pytest.skip("this torch has no such option")
    backend.backward(model(tokens()).square().mean())
    expected = backend.gradients.full(model)
    backend.gradients.drop(model)
    model.set_allocate_memory_from_process_group_for_comm(True)
    backend.backward(model(tokens()).square().mean())
    found = backend.gradients.full(model)
    assert expected.keys() == found.keys() == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.ranks(2)
def test_the_wrapper_of_version_1_is_torchs_by_name(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    _, model = prepared(1)
    assert isinstance(model, FullyShardedDataParallel)
    assert repr(model).startswith("FullyShardedDataParallel(")
