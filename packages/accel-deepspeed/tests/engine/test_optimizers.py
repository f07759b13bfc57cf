"""Optimizers and values in ZeRO's flat pieces: each steps as on full parameters, or is refused when it is prepared."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Bundle, Run, load_backend
from accel_backends.ops.optimizer_support import steps_by_element
from accel_deepspeed import DeepSpeedPlugin
from accel_deepspeed.library import extensions_folder
from accel_precision import PrecisionPolicy
from accel_state import PrepareError, Session
from accel_state.errors import AccelError

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

ELEMENTWISE = ["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop"]
BEYOND = ["Adafactor", "LBFGS", "Muon"]
STEPS = 3


class ByRows(torch.optim.Optimizer):
    """One learning rate for each row, as factored optimizers have."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                size = parameter.grad.square().mean(-1, keepdim=True).sqrt() + 1e-8
                parameter.data.sub_(parameter.grad / size, alpha=group["lr"])


class ByNorm(ByRows):
    """A step as long as the parameter, as LAMB and LARS take."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                trust = parameter.data.norm() / (parameter.grad.norm() + 1e-8)
                parameter.data.sub_(parameter.grad * trust, alpha=group["lr"])


class BySign(ByRows):
    """Looks at nothing but signs of single elements."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad.sign(), alpha=group["lr"])


class WithNoise(BySign):
    """Is not the same twice, so that nothing can be found out by trying."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter), alpha=group["lr"])


def matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 15, bias=False), nn.Tanh(), nn.Linear(15, 5, bias=False))


def made(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, kind):
        pytest.skip(f"this torch has no {kind}")
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    return optimizer


def loss_of(model: nn.Module, step: int, part: slice) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(8, 8, generator=torch.Generator().manual_seed(step))[part]).square().mean()
    return loss


@contextmanager
def opened(stage: int, precision: str = "no", **options: Any) -> Iterator[Any]:
    with Session.open(cpu=True) as session:
        policy = PrecisionPolicy.parse(precision, device_type="cpu")
        backend = load_backend("deepspeed")(Run(session, policy), DeepSpeedPlugin(zero_stage=stage, **options))
        try:
            yield backend
        finally:
            backend.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        *((2, kind) for kind in ELEMENTWISE),
        *(pytest.param(stage, kind, marks=pytest.mark.slow) for stage in (1, 3) for kind in ELEMENTWISE),
        (0, "Adafactor"),
        (0, "Muon"),
    ],
)
@pytest.mark.sampled(4)
def test_an_optimizer_steps_on_pieces_as_on_full_parameters(rank: int, stage: int, kind: str) -> None:
    expected = matrices()
    stepping = made(kind, expected)
    model = matrices()
    with opened(stage) as backend:
        bundle = backend.prepare(Bundle([model], [made(kind, model)]))
        for step in range(STEPS):
            backend.backward(loss_of(bundle.models[0], step, slice(4 * rank, 4 * rank + 4)))
            assert backend.step(bundle.optimizers[0])
            loss_of(expected, step, slice(None)).backward()
            stepping.step()
            stepping.zero_grad()
        state = backend.states.full_model(bundle.models[0], main_only=False)
    for name, value in expected.named_parameters():
        assert torch.allclose(state[name], value, rtol=1e-4, atol=1e-5), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", BEYOND)
def test_one_that_looks_at_full_parameters_is_refused(rank: int, stage: int, kind: str) -> None:
    words = (
        "closure" if kind == "LBFGS" else f"full parameters, and ZeRO stage {stage} .*zero_stage=0, or strategy='ddp'"
    )
    model = matrices()
    with opened(stage) as backend, pytest.raises(PrepareError, match=f"{kind} .*{words}"):
        backend.prepare(Bundle([model], [made(kind, model)]))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", [ByRows, ByNorm])
def test_one_of_another_library_that_looks_at_full_parameters_is_refused(rank: int, kind: type[ByRows]) -> None:
    model = matrices()
    with opened(2) as backend, pytest.raises(PrepareError, match=f"{kind.__name__} looks at full parameters"):
        backend.prepare(Bundle([model], [kind(model.parameters())]))
    with opened(0) as backend:
        backend.prepare(Bundle([model], [kind(model.parameters())]))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(ByRows, False), (ByNorm, False), (BySign, True), (WithNoise, True), (torch.optim.Adam, True)],
)
def test_trying_tells_whether_elements_are_all_that_matters(
    kind: Callable[..., torch.optim.Optimizer], expected: bool
) -> None:
    model = matrices()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    state = torch.random.get_rng_state()
    assert steps_by_element(kind(model.parameters(), lr=0.1)) == expected
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("where", ["everywhere", "rank 1"])
def test_float64_is_refused_on_every_rank_and_not_rounded(rank: int, stage: int, where: str) -> None:
    model = matrices()
    if where == "everywhere" or rank == 1:
        model.get_submodule("2").double()
    words = r"Sequential\.2\.weight is float64, and DeepSpeed trains in float32 at most; nearest: strategy='fsdp'"
    with opened(stage) as backend:
        with pytest.raises(AccelError, match=words):
            backend.prepare(Bundle([model], [made("SGD", model)]))
        assert model.get_parameter("0.weight").dtype == torch.float32


@pytest.mark.sampled(1)
@pytest.mark.skipif(not (extensions_folder() / "cpu_adam").exists(), reason="DeepSpeed's cpu_adam is not built")
@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["SequentialLR", "ChainedScheduler"])
def test_schedulers_inside_of_a_scheduler_drive_the_optimizer_on_the_host(rank: int, kind: str) -> None:
    from torch.optim import lr_scheduler as schedulers

    def scheduled(optimizer: torch.optim.Optimizer) -> Any:
        inner = [schedulers.LinearLR(optimizer, 0.5, total_iters=2), schedulers.ExponentialLR(optimizer, 0.5)]
        if kind == "SequentialLR":
            return schedulers.SequentialLR(optimizer, inner, [2])
        return schedulers.ChainedScheduler(inner, optimizer)

    other = made("AdamW", matrices())
    expected = scheduled(other)
    model = matrices()
    given = made("AdamW", model)
    with opened(2, offload_optimizer_device="cpu") as backend:
        bundle = backend.prepare(Bundle([model], [given], [scheduled(given)]))
        for step in range(4):
            backend.backward(loss_of(bundle.models[0], step, slice(None)))
            backend.step(bundle.optimizers[0])
            other.step()
            bundle.schedulers[0].step()
            expected.step()
            assert bundle.optimizers[0].param_groups[0]["lr"] == other.param_groups[0]["lr"]
