"""Profiles: exact bytes and operations of a model, without memory for it."""

from typing import Any

import pytest
import torch
from torch import nn

from accel_planner import (
    Batch,
    PlanError,
    profile_model,
)
from accel_planner.profile.profile import Variant
from accel_testing.equivalence.models import TinyMLP, TinyTransformer


def transformer(layers: int = 8, **options: int) -> nn.Module:
    return TinyTransformer(64, 32, layers=layers, **options)


def tokens(batch: int = 4, length: int = 16) -> Batch:
    return Batch(torch.zeros(batch, length, dtype=torch.long))


def test_looking_at_a_model_changes_nothing_of_it() -> None:
    model = transformer()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    profile_model(model, tokens(), policy="bf16")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_bytes_of_parameters_are_exact_and_tied_ones_count_once() -> None:
    model = transformer()
    profile = profile_model(model)
    assert sum(parameter.nbytes for parameter in profile.parameters) == sum(p.nbytes for p in model.parameters())
    assert "head.weight" not in {parameter.name for parameter in profile.parameters}


def test_checkpointing_trades_activations_for_operations() -> None:
    plain, again = (
        profile_model(transformer, tokens()).timeline(native=False, checkpointed=ckpt) for ckpt in (False, True)
    )
    assert again.activations < 0.5 * plain.activations
    assert 1.2 < again.flops / plain.flops < 1.4


def test_operations_are_those_of_the_usual_count() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    flops = profile_model(model, Batch(torch.zeros(32, 64, requires_grad=False))).timelines[Variant()].flops
    assert flops == (3 + 2) * 2 * 32 * 64 * 64  # nobody asks for the first layer's gradient of its input


def test_without_a_batch_activations_are_left_out_and_it_says_so() -> None:
    profile = profile_model(TinyMLP)
    assert profile.timelines[Variant()].activations == 0
    assert "activations are not counted" in profile.notes[0]


class NeedsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, int(torch.ones(1).item()) + 1)


def test_a_constructor_that_fails_on_the_meta_device_is_run_for_real_and_it_says_so() -> None:
    profile = profile_model(NeedsValues)
    assert profile.numel == 10
    assert "fails on the meta device" in profile.notes[0]


def broken() -> nn.Module:
    raise RuntimeError("no weights here")


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        (broken, {}, r"broken\(\) cannot build its model: on the meta device, RuntimeError: no weights here"),
        (lambda: 3, {}, "gives a int; expected an nn.Module"),
        (3, {}, "a int is no model"),
        (TinyMLP, {"sample": torch.zeros(2, 3)}, r"cannot be run with a batch of \(2, 3\) float32 .*give a sample"),
        (TinyMLP, {"batch_size": 2}, "does not say what TinyMLP is called with"),
        (TinyMLP, {"sample": torch.zeros(2, 8), "loss": lambda m, b: m(b)}, r"the loss of TinyMLP is \(2, 4\)"),
        (TinyMLP, {"sample": torch.zeros(2, 8), "loss": lambda m, b: 1.0}, "the loss of TinyMLP is float"),
        (nn.Bilinear(2, 2, 2), {"seq_length": 3}, "needs input1, input2, and token ids are but one"),
    ],
)
def test_what_cannot_be_looked_at_is_explained(source: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        profile_model(source, options.pop("sample", None), **options)


class Normed(torch.autograd.Function):
    """The identity, whose backward reads a value."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float(ctx.saved_tensors[0].abs().max())


def test_a_backward_that_reads_values_is_refused_with_a_way_out() -> None:
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Normed.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]

    with pytest.raises(PlanError, match=r"backward of Model .* without values \(\w+: .*name a strategy"):
        profile_model(Model(3, 1), torch.zeros(2, 3))
