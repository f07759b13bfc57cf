"""An engine behind the ordinary loop: what its steps add up to, what it refuses, and several of them at once."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Bundle, Run, load_backend
from accel_deepspeed import DeepSpeedPlugin, DummyOptim, DummyScheduler
from accel_precision import PrecisionPolicy
from accel_state import Session
from accel_state.errors import BackendError, PrepareError

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

STAGES = [0, 1, 2, 3]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@contextmanager
def opened(precision: str = "no", **options: Any) -> Iterator[Any]:
    with Session.open(cpu=True) as session:
        backend = load_backend("deepspeed")(
            Run(session, PrecisionPolicy.parse(precision, device_type="cpu")), DeepSpeedPlugin.build(options)
        )
        try:
            yield backend
        finally:
            backend.close()


def prepared(backend: Any, model: nn.Module, optimizer: Any, *schedulers: Any) -> tuple[Any, Any, list[Any]]:
    bundle = backend.prepare(Bundle([model], [optimizer], list(schedulers)))
    return bundle.models[0], bundle.optimizers[0], bundle.schedulers


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 5, generator=generator)).pow(2).mean()


def distance(backend: Any, engine: Any, reference: nn.Module) -> float:
    state = backend.states.full_model(engine, main_only=False)
    return max((state[name] - value).abs().max().item() for name, value in reference.state_dict().items())


@dataclass
class Pair:
    """An engine of two ranks, and beside it the same model, which one process trains on what both ranks see."""

    backend: Any
    engine: Any
    optimizer: Any
    reference: nn.Module
    plain: torch.optim.Optimizer

    def mean(self, *losses: tuple[float, int]) -> torch.Tensor:
        """The reference's losses of these weights and steps, added up, and the mean over ranks."""
        return sum(weight * loss_of(self.reference, r, step) for r in range(2) for weight, step in losses) / 2

    def step(self) -> None:
        """Steps both."""
        assert self.backend.step(self.optimizer)
        self.plain.step()
        self.plain.zero_grad()


@contextmanager
def beside(stage: int) -> Iterator[Pair]:
    """A pair, whose weights are compared at the end."""
    reference, model = make_net(), make_net()
    with opened(zero_stage=stage) as backend:
        engine, optimizer, _ = prepared(backend, model, momentum(model))
        yield Pair(backend, engine, optimizer, reference, momentum(reference))
        assert distance(backend, engine, reference) < 1e-6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_two_losses_of_a_micro_batch_add_up(rank: int, world_size: int, stage: int) -> None:
    """Both forwards first, then both backwards: stage 3 by itself would keep the second's gradients only."""
    with beside(stage) as pair:
        for step in range(3):
            first, second = loss_of(pair.engine, rank, step), loss_of(pair.engine, rank, 100 + step)
            pair.backend.backward(first)
            pair.backend.backward(second, scale=0.5)
            pair.mean((1, step), (0.5, 100 + step)).backward()
            pair.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_clip_of_gradients_that_are_dropped_does_not_reach_the_next_step(
    rank: int, world_size: int, stage: int
) -> None:
    with beside(stage) as pair:
        pair.backend.backward(loss_of(pair.engine, rank, 0))
        pair.backend.gradients.clip_norm(pair.engine.parameters(), 1e-3)
        pair.backend.zero_grad(pair.optimizer)
        pair.backend.backward(loss_of(pair.engine, rank, 1))
        pair.mean((1, 1)).backward()
        pair.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_norm_in_mid_window_changes_nothing(rank: int, world_size: int, stage: int) -> None:
    with beside(stage) as pair:
        for step in range(3):
            pair.backend.backward(loss_of(pair.engine, rank, step))
            pair.mean((1, step)).backward()
            compare_norms(pair, math.inf)
            pair.backend.backward(loss_of(pair.engine, rank, 50 + step))
            pair.backend.gradients.scale([pair.engine], 0.5)
            pair.mean((1, 50 + step)).backward()
            for parameter in pair.reference.parameters():
                parameter.grad *= 0.5
            compare_norms(pair, 0.1)
            pair.step()


def compare_norms(pair: Pair, limit: float) -> None:
    norm = pair.backend.gradients.clip_norm(pair.engine.parameters(), limit)
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(pair.reference.parameters(), limit).item(), 1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("spoilt", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.sampled(6)
def test_a_norm_that_is_not_finite_is_infinite_on_both(
    rank: int, world_size: int, stage: int, groups: int, spoilt: float
) -> None:
    """DeepSpeed marks such norms of groups with -1; rank 1 alone brings what is not finite."""
    model = make_net()
    each = [list(model.parameters())] if groups == 1 else [list(model[0].parameters()), list(model[2].parameters())]
    optimizer = torch.optim.SGD([{"params": params} for params in each], lr=0.1)
    with opened(zero_stage=stage) as backend:
        engine, inner, _ = prepared(backend, model, optimizer)
        backend.backward(loss_of(engine, rank, 0) * (spoilt if rank == 1 else 1.0))
        assert backend.gradients.clip_norm(engine.parameters(), math.inf).item() == math.inf
        with pytest.raises(BackendError, match="norm of the gradients is inf"):
            backend.gradients.clip_norm(engine.parameters(), 1.0, error_if_nonfinite=True)
        backend.zero_grad(inner)
        backend.backward(loss_of(engine, rank, 0))
        assert 0 < backend.gradients.clip_norm(engine.parameters(), math.inf).item() < 100


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_discarded_gradients_are_gone(rank: int, world_size: int, stage: int) -> None:
    with beside(stage) as pair:
        for step in range(3):
            pair.backend.backward(loss_of(pair.engine, rank, 7 + step), scale=100.0)
            pair.backend.zero_grad(pair.optimizer)
            buckets = pair.engine.optimizer.ipg_buckets.values() if stage in (1, 2) else ()
            assert not any(bucket.buffer for bucket in buckets)  # their memory is free until the next backward
            pair.backend.backward(loss_of(pair.engine, rank, step))
            pair.mean((1, step)).backward()
            pair.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_held_gradients_go_on_where_they_were(rank: int, world_size: int, stage: int) -> None:
    with beside(stage) as pair:
        pair.backend.backward(loss_of(pair.engine, rank, 0))
        held = pair.backend.gradients.unreduced(pair.engine)
        pair.backend.zero_grad(pair.optimizer)
        pair.backend.gradients.set_unreduced(pair.engine, held)
        pair.backend.backward(loss_of(pair.engine, rank, 1))
        pair.mean((1, 0), (1, 1)).backward()
        pair.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_layers_that_are_frozen_before_a_second_prepare_are_in_the_state(
    rank: int, world_size: int, stage: int
) -> None:
    model, reference = make_net(), make_net()
    with opened(zero_stage=stage) as backend:
        for phase, (trained, expected) in enumerate(((model, reference), (model[2], reference[2]))):
            for net in (model, reference) if phase else ():
                net[0].requires_grad_(False)
            engine, optimizer, _ = prepared(backend, model, momentum(trained))
            plain = momentum(expected)
            backend.backward(loss_of(engine, rank, phase))
            backend.step(optimizer)
            (sum(loss_of(reference, each, phase) for each in range(2)) / 2).backward()  # type: ignore[union-attr]
            plain.step()
            plain.zero_grad()
            assert distance(backend, engine, reference) < 1e-6
            backend.release([engine])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_values_are_limited_element_by_element(rank: int, world_size: int, stage: int) -> None:
    with beside(stage) as pair:
        pair.backend.backward(loss_of(pair.engine, rank, 0))
        pair.backend.gradients.clip_value(pair.engine.parameters(), 0.01)
        pair.mean((1, 0)).backward()
        nn.utils.clip_grad_value_(pair.reference.parameters(), 0.01)
        pair.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_goes_through_two_engines(rank: int, world_size: int, stage: int) -> None:
    """As a generator's loss goes through the discriminator; each has its own optimizer and steps by itself."""
    ours, theirs = make_net(), nn.Linear(3, 2)
    torch.manual_seed(1)
    with opened(zero_stage=stage) as backend:
        model, head = make_net(), nn.Linear(3, 2)
        head.load_state_dict(theirs.state_dict())
        engine, optimizer, _ = prepared(backend, model, momentum(model))
        top, above, _ = prepared(backend, head, momentum(head))
        theirs.load_state_dict(backend.states.full_model(top, main_only=False))
        steps = [momentum(ours), momentum(theirs)]
        for step in range(2):
            x = [torch.randn(4, 5, generator=torch.Generator().manual_seed(9 * step + r)) for r in range(2)]
            backend.backward(top(engine(x[rank])).pow(2).mean())
            backend.backward(top(engine(x[rank]).detach()).abs().mean())
            for one in (optimizer, above):
                backend.step(one)
            mean = sum(theirs(ours(b)).pow(2).mean() + theirs(ours(b).detach()).abs().mean() for b in x) / 2
            mean.backward()
            for plain in steps:
                plain.step()
                plain.zero_grad()
        assert distance(backend, engine, ours) < 1e-6
        assert distance(backend, top, theirs) < 1e-6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_changed_full_parameters_train_on(rank: int, world_size: int, stage: int) -> None:
    with opened("bf16", zero_stage=stage) as backend:
        model = make_net()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        engine, optimizer, _ = prepared(backend, model, momentum(model))
        with backend.states.full_parameters(engine), torch.no_grad():
            engine.module[0].weight.zero_()
        with backend.states.full_parameters(engine, writeback=False), torch.no_grad():
            engine.module[2].weight.zero_()
        state = backend.states.full_model(engine, main_only=False)
        assert state["0.weight"].abs().max() == 0
        assert torch.equal(state["2.weight"], before["2.weight"])  # fp32, all of its bits
        assert state["2.weight"].dtype == torch.float32
        assert engine(torch.ones(1, 5)).dtype == torch.float32
        backend.backward(loss_of(engine, rank, 0))
        assert backend.step(optimizer)


@pytest.mark.ranks(2)
def test_weights_are_handed_out_as_the_model_computes(rank: int, world_size: int) -> None:
    with opened("bf16", zero_stage=3, zero3_save_16bit_model=True) as backend:
        model = make_net()
        engine, _, _ = prepared(backend, model, momentum(model))
        state = backend.states.full_model(engine)
        assert {value.dtype for value in state.values()} == ({torch.bfloat16} if rank == 0 else set())


@pytest.mark.ranks(2)
def test_optimizer_and_scheduler_of_the_configuration(rank: int, world_size: int) -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
                "warmup_type": "linear",
            },
        },
        "zero_optimization": {"stage": 2},
    }
    with opened(**config) as backend:
        model = make_net()
        dummy = DummyOptim(model.parameters(), lr=0.02, weight_decay=0.1)
        engine, optimizer, (scheduler,) = prepared(backend, model, dummy, DummyScheduler(dummy, 10, 4))
        assert type(optimizer).__name__ == "AdamW"
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
        rates = []
        for step in range(6):
            backend.backward(loss_of(engine, rank, step))
            backend.step(optimizer)
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        assert max(rates) <= 0.02
        assert rates[0] < rates[2] > 0


@pytest.mark.ranks(2)
def test_a_scheduler_of_the_user_drives_the_optimizer_of_the_engine(rank: int, world_size: int) -> None:
    with opened(zero_stage=2) as backend:
        model = make_net()
        given = momentum(model)
        engine, optimizer, (scheduler,) = prepared(
            backend, model, given, torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.5)
        )
        backend.backward(loss_of(engine, rank, 0))
        backend.step(optimizer)
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_an_optimizer_that_has_stepped_goes_on(rank: int, world_size: int, stage: int) -> None:
    reference, model = make_net(), make_net()
    plain, given = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (reference, model))
    for net, optimizer in ((reference, plain), (model, given)):
        sum(loss_of(net, r, 0) for r in range(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with opened(zero_stage=stage) as backend:
        engine, optimizer, _ = prepared(backend, model, given)
        backend.backward(loss_of(engine, rank, 1))
        backend.step(optimizer)
        (sum(loss_of(reference, r, 1) for r in range(2)) / 2).backward()
        plain.step()
        assert distance(backend, engine, reference) < 1e-6


class Checkpointed(nn.Module):
    """Checkpoints its middle with DeepSpeed's own function, which recomputes in a backward of its own."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.first, self.middle = (nn.Linear(5, 5) if first else nn.Identity()), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from deepspeed.runtime.activation_checkpointing import checkpointing

        return checkpointing.checkpoint(lambda y: torch.tanh(self.middle(y)), self.first(x))


@pytest.mark.ranks(2)
def test_checkpointing_that_would_lose_gradients_is_refused(rank: int, world_size: int) -> None:
    with opened(zero_stage=1, activation_checkpointing={"partition_activations": False}) as backend:
        lost, kept = Checkpointed(first=False), Checkpointed(first=True)
        engine, _, _ = prepared(backend, lost, momentum(lost))
        with pytest.raises(BackendError, match="none of which requires gradients"):
            engine(torch.randn(2, 5))
        engine, optimizer, _ = prepared(backend, kept, momentum(kept))
        backend.backward(engine(torch.randn(2, 5)).mean())
        assert backend.step(optimizer)


@pytest.mark.ranks(2)
def test_models_are_partitioned_while_they_are_built(rank: int, world_size: int) -> None:
    with opened(zero_stage=3) as backend:
        with backend.zero_init():
            model = make_net()
        assert model[0].weight.numel() == 0
        engine, optimizer, _ = prepared(backend, model, momentum(model))
        backend.backward(loss_of(engine, rank, 0))
        assert backend.step(optimizer)
        assert backend.states.full_model(engine, main_only=False)["0.weight"].shape == (7, 5)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def with_scalar(model: nn.Module) -> nn.Module:
    model.register_parameter("scalar", nn.Parameter(torch.ones(())))
    return model


REFUSED: dict[str, tuple[dict[str, Any], Callable[[nn.Module], list[Any]], str]] = {
    "offload_sgd": ({"zero_stage": 2, "offload_optimizer": True}, lambda m: [momentum(m)], "SGD cannot update"),
    "offload_amsgrad": (
        {"zero_stage": 2, "offload_optimizer": True},
        lambda m: [torch.optim.Adam(m.parameters(), amsgrad=True)],
        "amsgrad",
    ),
    "two_optimizers": ({}, lambda m: [adam(m), adam(m)], "one optimizer"),
    "optimizer_twice": ({"optimizer": {"type": "Adam"}}, lambda m: [adam(m)], "cannot specify an optimizer"),
    "dummy_for_nothing": ({}, lambda m: [DummyOptim(m.parameters())], "without specifying an optimizer"),
    "no_dimension": (
        {},
        lambda m: [m.register_parameter("s", nn.Parameter(torch.ones(()))), adam(m)][1:],
        "no dimension",
    ),
    "some_parameters": ({}, lambda m: [momentum(m[0])], "lacks 2 parameters"),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("case", REFUSED)
def test_pieces_that_cannot_work_are_refused(rank: int, world_size: int, case: str) -> None:
    options, make, message = REFUSED[case]
    with opened(**options) as backend:
        model = make_net()
        with pytest.raises(PrepareError, match=message):
            backend.prepare(Bundle([model], make(model)))


@pytest.mark.ranks(1)
def test_two_models_of_one_call_are_refused(rank: int, world_size: int) -> None:
    with opened() as backend, pytest.raises(PrepareError, match="one model in a call"):
        backend.prepare(Bundle([make_net(), make_net()]))


@pytest.mark.ranks(1)
def test_calls_that_cannot_work_are_refused(rank: int, world_size: int) -> None:
    with opened(zero_stage=1, gradient_clipping=1.0) as backend:
        model = make_net()
        engine, optimizer, _ = prepared(backend, model, adam(model))
        backend.backward(loss_of(engine, rank, 0))
        with pytest.raises(BackendError, match="gradient_clipping is 1"):
            backend.gradients.clip_norm(engine.parameters(), 0.5)
        with pytest.raises(BackendError, match="no closure"):
            backend.step(optimizer, lambda: None)
        with pytest.raises(BackendError, match="retain_graph"):
            backend.backward(loss_of(engine, rank, 0), create_graph=True)
        with pytest.raises(BackendError, match="expected one number"):
            backend.backward(engine(torch.ones(2, 5)))


@pytest.mark.ranks(2)
def test_an_optimizer_that_only_stage_1_in_bf16_has_is_refused_with_what_selects_it(rank: int, world_size: int) -> None:
    config = {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": True}}
    model = make_net()
    message = r"BF16_Optimizer is not supported; .*data_types.grad_accum_dtype fp32: leave that out, or use stage 2"
    with opened("bf16", hf_ds_config=config) as backend, pytest.raises(BackendError, match=message):
        prepared(backend, model, momentum(model))
