"""Inputs of checkpointed units in host memory; on a CPU, where the option does nothing, it is set by hand."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Bundle
from accel_backends.fsdp import shard

from .test_backend import OPTIMIZERS, assert_trained, make_model, open_backend, reference, train


class Two(nn.Module):
    def __init__(self, *, offload: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), shard.checkpointed(nn.Linear(8, 8), offload=offload)
        self.between: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = self.first(x)
        self.between = weakref.ref(between)
        return self.last(between).square().mean()


def gradients(model: Two) -> tuple[list[torch.Tensor], bool]:
    """The gradients, and whether the input of the checkpointed layer was kept between forward and backward."""
    loss = model(torch.ones(3, 4))
    kept = model.between() is not None
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], kept


def test_the_input_of_a_checkpointed_unit_leaves_the_device_until_the_backward() -> None:
    plain, kept = gradients(Two(offload=False))
    offloaded, still_kept = gradients(Two(offload=True))
    assert (kept, still_kept) == (True, False)
    assert len(plain) == 4
    assert all(map(torch.equal, plain, offloaded))


@pytest.mark.parametrize("offload", [False, True])
def test_names_are_those_of_the_plain_module(offload: bool) -> None:
    assert list(Two(offload=offload).state_dict()) == ["first.weight", "first.bias", "last.weight", "last.bias"]


@pytest.mark.ranks(2)
def test_offloaded_inputs_train_as_one_process(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wrap = shard.checkpointed
    monkeypatch.setattr(shard, "checkpointed", lambda block, offload: wrap(block, offload=True))
    backend = open_backend(activation_checkpointing=True)
    model = make_model("transformer", dtype=torch.float64, seed=rank)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    backend.prepare(Bundle([model], [optimizer]))
    assert sum("OffloadWrapper" in type(module).__name__ for module in model.modules()) > 0
    train(backend, model, optimizer, micro=2, clip=0.5)
    assert_trained(backend, model, reference(clip=0.5))
    backend.close()
