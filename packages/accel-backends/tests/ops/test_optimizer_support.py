"""Optimizers of other libraries on shards: each steps as on full parameters, or is refused when it is prepared."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Bundle, FSDPConfig, Run, load_backend
from accel_backends.ops.optimizer_support import OptimizerTrial
from accel_precision import PrecisionPolicy
from accel_state import PrepareError, Session

Closure = Callable[[], torch.Tensor]


class BySign(torch.optim.Optimizer):
    """Looks at nothing but signs of single elements."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        for parameter, change in zip(parameters, self.changes([one.grad for one in parameters]), strict=True):
            parameter.sub_(change, alpha=self.param_groups[0]["lr"])

    def changes(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        return [gradient.sign() for gradient in gradients]


class ByRows(BySign):
    """One learning rate for each row, as factored optimizers have."""

    def changes(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        return [one / (one.square().mean(-1, keepdim=True).sqrt() + 1e-8) for one in gradients]


class ByColumns(BySign):
    """One learning rate for each column, in place and by slices."""

    def changes(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        return [one / (one.square().mean(0, keepdim=True).sqrt() + 1e-8) for one in gradients]


class ByAll(BySign):
    """Steps of one length, that of all parameters together."""

    def changes(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        norm = torch.stack([one.norm() for one in gradients]).norm()
        return [one / norm for one in gradients]


class ByViews(BySign):
    """Goes behind the tensors that it is given, as optimizers with kernels of their own do."""

    def changes(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        local = [getattr(one, "_local_tensor", one) for one in gradients]
        changes = [part / part.norm() for part in local]
        return [change if one is part else one.from_local(change, one.device_mesh, one.placements)  # type: ignore[attr-defined]
                for one, part, change in zip(gradients, local, changes, strict=True)]  # fmt: skip


class Sam(torch.optim.Optimizer):
    """Steps with the gradient found a little uphill, as sharpness-aware optimizers do."""

    def __init__(self, params: Any, inner: type[torch.optim.Optimizer], rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.inner = inner(self.param_groups, lr=0.01)  # type: ignore[call-arg]

    def step(self, closure: Closure) -> None:  # type: ignore[override]
        closure()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        with torch.no_grad():
            norm = torch.stack([one.grad.norm() for one in parameters]).norm()
            moves = [self.defaults["rho"] * one.grad / norm for one in parameters]
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.add_(move)
        closure()
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.sub_(move)
        self.inner.step()


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = pytest.importorskip("transformers.optimization").Adafactor(parameters)
    return found


def sam(parameters: Any) -> torch.optim.Optimizer:
    return Sam(parameters, torch.optim.SGD)


KINDS = {"sign": BySign, "rows": ByRows, "columns": ByColumns, "all": ByAll, "sam": sam}
REFUSED = {"rows": ByRows, "columns": ByColumns, "all": ByAll, "views": ByViews, "adafactor": adafactor}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def prepared(version: int, kind: Callable[[Any], torch.optim.Optimizer]) -> tuple[Any, nn.Module, Any]:
    config = FSDPConfig(fsdp_version=version)
    backend = load_backend(config.backend)(Run(Session.open(cpu=True), PrecisionPolicy.parse("no")), config)
    model = model_of()
    bundle = backend.prepare(Bundle([model], [kind(model.parameters())]))
    return backend, bundle.models[0], bundle.optimizers[0]


def train(model: nn.Module, optimizer: Any, backward: Any, step: Any, part: slice) -> None:
    for number in range(3):
        batch = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(number))[part]

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(batch).square().mean()
            backward(loss)
            return loss

        if isinstance(optimizer, Sam):
            step(optimizer, closure)
        else:
            closure()
            step(optimizer)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("version", "kind"), [*((2, kind) for kind in KINDS), (1, "sign")])
@pytest.mark.sampled(2)
def test_it_steps_on_shards_as_on_full_parameters(rank: int, version: int, kind: str) -> None:
    expected = model_of()
    stepping = KINDS[kind](expected.parameters())
    train(expected, stepping, torch.Tensor.backward, lambda one, *closure: one.step(*closure), slice(None))
    backend, model, optimizer = prepared(version, KINDS[kind])
    train(model, optimizer, backend.backward, backend.step, slice(4 * rank, 4 * rank + 4))
    state = backend.states.full_model(model, main_only=False)
    for name, value in expected.named_parameters():
        assert float((state[name] - value).abs().max()) <= 1e-10 * float(value.abs().max()), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", REFUSED.values(), ids=REFUSED)
def test_version_1_refuses_what_looks_at_full_parameters(kind: Any) -> None:
    with pytest.raises(PrepareError, match=r"looks at full parameters, and fsdp_version=1 .*nearest: AdamW, or fsdp"):
        prepared(1, kind)


def test_an_optimizer_is_tried_on_the_device_that_it_steps_on() -> None:
    class ElsewhereOnly(BySign):
        def changes(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
            if gradients[0].device.type != "meta":
                raise RuntimeError("a kernel for another device")
            return super().changes(gradients)

    optimizer = ElsewhereOnly(model_of().parameters())
    there, here = OptimizerTrial.of(optimizer, "meta"), OptimizerTrial.of(optimizer, "cpu")
    assert there.stepped(there.values, there.gradients) is not None
    assert here.stepped(here.values, here.gradients) is None


@pytest.mark.ranks(2)
def test_version_1_refuses_what_cannot_be_tried() -> None:
    with pytest.raises(PrepareError, match=r"Sam could not be tried .*nearest: AdamW, or fsdp_version=2"):
        prepared(1, sam)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (adafactor, r"Adafactor fails on sharded parameters \(.+\), of which .*nearest: AdamW, or strategy='ddp'"),
        (ByViews, "ByViews updates sharded parameters differently from full ones, .*nearest: AdamW, or strategy='ddp'"),
    ],
)
def test_version_2_refuses_what_does_not_step_on_shards(kind: Any, problem: str) -> None:
    with pytest.raises(PrepareError, match=problem):
        prepared(2, kind)
