"""The interface of backends: its size, the run that a backend receives, and typed access to what one backend has."""

from typing import ClassVar, final

import pytest
import torch
from torch import nn

from accel_backends import (
    Backend,
    Bundle,
    Capabilities,
    DDPBackend,
    ReplicatedGradients,
    Run,
    SingleBackend,
    build_options,
    load_backend,
)
from accel_backends.core.native import native
from accel_backends.roles.nearest import nearest_strategy
from accel_precision import PrecisionPolicy
from accel_state import BackendError, ParallelismConfig

LOOP = {
    *("prepare", "compile", "unwrap", "release", "close", "no_sync", "trigger_sync", "backward", "step", "zero_grad"),
}


@final
class DoublingGradients(ReplicatedGradients):
    """Gradients of a backend that has its own role."""

    def finite(self, gradients):
        return [False for _ in gradients]


@final
class PreparingBackend(Backend):
    """Prepares everything by itself, as an engine does."""

    name: ClassVar[str] = "preparing"
    capabilities: ClassVar[Capabilities] = Capabilities(sharded=True)

    def __init__(self, run, config=None):
        super().__init__(run, config)
        self.gradients = DoublingGradients(self, ranks=2)

    def prepare(self, bundle):
        return bundle


def test_a_backend_has_the_ten_methods_of_a_loop_of_which_one_is_abstract():
    methods = {name for name, value in vars(Backend).items() if callable(value) and not name.startswith("_")}
    assert methods - {"Config"} == LOOP
    assert Backend.__abstractmethods__ == {"prepare"}


def test_a_backend_that_has_prepare_alone_trains_as_on_one_device(session):
    backend = PreparingBackend(Run(session, PrecisionPolicy()))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.weight.detach().clone()
    model = backend.prepare(Bundle([model], [optimizer])).models[0]
    backend.backward(model(torch.ones(1, 2)).sum(), scale=2.0)
    assert backend.step(optimizer)
    backend.zero_grad(optimizer)
    torch.testing.assert_close(model.weight.detach(), before - 1.0)
    assert set(backend.states.model(model)) == {"weight", "bias"}
    assert backend.gradients.finite([torch.ones(1)]) == [False]


def test_roles_refuse_what_the_capabilities_lack_with_the_nearest_strategy(session):
    backend = PreparingBackend(Run(session, PrecisionPolicy()))
    with pytest.raises(BackendError, match=r"'preparing' every rank takes part .* or strategy='ddp'"):
        backend.gradients.join([nn.Linear(1, 1)])
    with pytest.raises(BackendError, match=r"'preparing' spreads parameters over ranks.*nearest: strategy='ddp'"):
        backend.gradients.average_parameters(nn.Linear(1, 1))
    assert nearest_strategy(backend.run, lambda able: able.gathers_fp8) == "strategy='fsdp'"


def test_a_backend_receives_the_degrees_of_parallelism(session):
    run = Run(session, PrecisionPolicy(), ParallelismConfig(tp_size=4))
    assert SingleBackend(run).run.parallelism.size("tp") == 4
    assert Run(session, PrecisionPolicy()).parallelism.size("tp") == 1


def test_options_are_made_with_those_that_the_name_implies():
    versions = {name: build_options(load_backend(name), {}).fsdp_version for name in ("fsdp", "fsdp1")}
    assert versions == {"fsdp": 2, "fsdp1": 1}


def test_native_returns_the_backend_that_runs(session):
    backend = SingleBackend(Run(session, PrecisionPolicy()))
    assert native(backend, SingleBackend) is backend
    with pytest.raises(BackendError, match=r"DDPBackend was asked for, and backend 'single' runs.*strategy='ddp'"):
        native(backend, DDPBackend)
