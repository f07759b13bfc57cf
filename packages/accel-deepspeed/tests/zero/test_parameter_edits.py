"""Loops that write into the weights of an engine train as one process does at every stage, or are refused by name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Bundle, Run, load_backend
from accel_deepspeed import DeepSpeedPlugin
from accel_precision import PrecisionPolicy
from accel_state import Session
from accel_state.errors import BackendError

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

# Stages, where the optimizer is, and whether stage 3 keeps small parameters whole.
CASES = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (1, "cpu"), (2, "cpu"), (3, "cpu"), (3, "spread")]
HELD = [case for case in CASES if case[1] != "spread"]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@contextmanager
def engine(
    stage: int, where: str, precision: str = "no", frozen: bool = False
) -> Iterator[tuple[Any, nn.Module, torch.optim.Optimizer]]:
    """A backend, its engine of ``small`` and the engine's optimizer."""
    zero: dict[str, Any] = {"stage": stage}
    if where == "cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
    if where == "spread":
        zero["stage3_param_persistence_threshold"] = 0
    with Session.open(cpu=True) as session:
        options = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
        policy = PrecisionPolicy.parse(precision, device_type="cpu")
        backend: Any = load_backend("deepspeed")(Run(session, policy), DeepSpeedPlugin.build({"hf_ds_config": options}))
        try:
            model = small()
            model[0].requires_grad_(not frozen)  # type: ignore[index]
            bundle = backend.prepare(Bundle([model], [momentum(model)]))
            yield backend, bundle.models[0], bundle.optimizers[0]
        finally:
            backend.close()


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    result: torch.Tensor = model(torch.randn(4, 6, generator=generator)).pow(2).mean()
    return result


def plain(edit: Callable[[nn.Module], None], *, frozen: bool = False, steps: int = 4, passes: int = 1) -> nn.Module:
    """What one process makes of these steps, ``passes`` times, with ``edit`` before each."""
    model = small()
    model[0].requires_grad_(not frozen)  # type: ignore[index]
    optimizer = momentum(model)
    for step in [*range(steps)] * passes:
        edit(model)
        (sum(loss_of(model, rank, step) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_alike(backend: Any, trained: nn.Module, reference: nn.Module, tolerance: float = 1e-5) -> None:
    state = backend.states.full_model(trained, main_only=False)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name].float(), value, rtol=0, atol=tolerance)


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.2, 0.2)


def clamp_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def load(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = {name: value.shape for name, value in small().state_dict().items()}
    model.load_state_dict({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})


def train(backend: Any, model: nn.Module, optimizer: Any, rank: int, edit: Callable[[nn.Module], None]) -> None:
    for step in range(4):
        edit(model.module)  # type: ignore[arg-type]
        backend.backward(loss_of(model, rank, step))
        backend.step(optimizer)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "where"), HELD)
@pytest.mark.sampled(2)
def test_weights_written_between_steps_are_stepped(rank: int, world_size: int, stage: int, where: str) -> None:
    with engine(stage, where) as (backend, model, optimizer):
        train(backend, model, optimizer, rank, clamp)
        assert_alike(backend, model, plain(clamp))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_written_past_autograd_are_stepped_in_fp32(rank: int, world_size: int, stage: int) -> None:
    with engine(stage, "none") as (backend, model, optimizer):
        train(backend, model, optimizer, rank, clamp_data)
        assert_alike(backend, model, plain(clamp))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "where"), CASES)
@pytest.mark.sampled(2)
def test_weights_loaded_between_steps_are_stepped(rank: int, world_size: int, stage: int, where: str) -> None:
    def once(model: nn.Module) -> None:
        if next(steps) == 1:
            load(model)

    with engine(stage, where) as (backend, model, optimizer):
        steps = iter(range(4))
        train(backend, model, optimizer, rank, once)
        steps = iter(range(4))
        assert_alike(backend, model, plain(once))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "where"), CASES)
def test_loaded_weights_are_in_the_state_before_any_step(rank: int, world_size: int, stage: int, where: str) -> None:
    with engine(stage, where, "bf16") as (backend, model, _):
        load(model.module)  # type: ignore[arg-type]
        expected = small()
        load(expected)
        assert_alike(backend, model, expected.bfloat16().float())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "where"), CASES)
@pytest.mark.sampled(2)
def test_copies_keep_their_bits_where_a_write_changes_nothing(
    rank: int, world_size: int, stage: int, where: str
) -> None:
    def nothing(model: nn.Module) -> None:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with backend.states.full_parameters(prepared, writeback=False):
            state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state)

    ends = []
    for edit in (nothing, lambda model: None):
        with engine(stage, where, "bf16") as (backend, prepared, optimizer):
            train(backend, prepared, optimizer, rank, edit)
            ends.append(backend.states.full_model(prepared, main_only=False))
    for name, value in ends[1].items():
        assert torch.equal(ends[0][name], value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "where"), HELD)
@pytest.mark.sampled(2)
def test_frozen_weights_may_be_written(rank: int, world_size: int, stage: int, where: str) -> None:
    with engine(stage, where, frozen=True) as (backend, model, optimizer):
        train(backend, model, optimizer, rank, clamp)
        assert_alike(backend, model, plain(clamp, frozen=True))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_changes_of_a_gather_of_deepspeed_are_stepped(rank: int, world_size: int, precision: str) -> None:
    from deepspeed.runtime.zero import GatheredParameters

    def gathered(model: nn.Module) -> None:
        with GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
            for parameter in model.parameters() if rank == 0 else ():
                parameter.clamp_(-0.2, 0.2)

    with engine(3, "spread", precision) as (backend, model, optimizer):
        train(backend, model, optimizer, rank, gathered)
        assert_alike(backend, model, plain(clamp), 1e-5 if precision == "no" else 1e-2)


@pytest.mark.ranks(2)
def test_writing_where_a_parameter_has_no_values_is_refused(rank: int, world_size: int) -> None:
    with engine(3, "spread") as (backend, model, optimizer):
        backend.backward(loss_of(model, rank, 0))
        clamp(model.module)  # type: ignore[arg-type]
        with pytest.raises(BackendError, match=r"0\.weight, 0\.bias, .*full_parameters\(model\)"):
            backend.step(optimizer)
        with backend.states.full_parameters(model):
            clamp(model.module)  # type: ignore[arg-type]
        backend.step(optimizer)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_exchanging_parameters_is_refused(rank: int, world_size: int, stage: int) -> None:
    with engine(stage, "none") as (_, model, _), pytest.raises(BackendError, match=r"assign=True\) of Linear"):
        model.module.load_state_dict(small().state_dict(), assign=True)  # type: ignore[union-attr,operator]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_optimizer_inside_of_an_engine_is_not_stepped_by_itself(rank: int, world_size: int, stage: int) -> None:
    with engine(stage, "none") as (backend, model, optimizer):
        backend.backward(loss_of(model, rank, 0))
        with pytest.raises(BackendError, match=r"SGD that was given to prepare.*the optimizer that prepare returned"):
            optimizer.step()
        backend.step(optimizer)
    optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_refused_to_readers_while_ranks_have_parts(rank: int, world_size: int, stage: int) -> None:
    def norm() -> torch.Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    with engine(stage, "none") as (backend, model, optimizer):
        for step in range(2):
            backend.backward(loss_of(model, rank, step))
            measured = backend.gradients.clip_norm(model.parameters(), float("inf"))
            with pytest.raises(BackendError, match=r"0\.weight\.grad was read.*accelerator\.clip_grad_norm_"):
                norm()
            assert measured == backend.gradients.clip_norm(model.parameters(), float("inf"))
            model.module.zero_grad()  # type: ignore[union-attr,operator]
            backend.step(optimizer)
            assert norm() == 0
        assert_alike(backend, model, plain(lambda model: None, steps=2))
        assert {type(one) for one in model.parameters()} == {nn.Parameter}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_ranks_have_in_parts_may_be_deleted(rank: int, world_size: int, stage: int) -> None:
    with engine(stage, "none") as (backend, model, optimizer):
        backend.backward(loss_of(model, rank, 0))
        for parameter in model.parameters():
            del parameter.grad
        backend.step(optimizer)
        assert_alike(backend, model, plain(lambda model: None, steps=1))
    assert not any("_accel_name" in vars(parameter) for parameter in model.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "where"), CASES)
@pytest.mark.sampled(2)
def test_an_engine_goes_on_from_a_checkpoint_that_deepspeed_wrote(
    rank: int, world_size: int, stage: int, where: str, tmp_path: Path
) -> None:
    with engine(stage, where) as (backend, model, optimizer):
        train(backend, model, optimizer, rank, lambda _: None)
        backend.export_native(model, str(tmp_path), "four")
    with engine(stage, where) as (backend, model, optimizer):
        model.load_checkpoint(str(tmp_path), "four")  # type: ignore[operator]
        train(backend, model, optimizer, rank, lambda _: None)
        assert_alike(backend, model, plain(lambda _: None, passes=2))
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.module.load_state_dict({name: torch.empty(0) for name in small().state_dict()})  # type: ignore[union-attr,operator]
