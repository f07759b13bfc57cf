"""A backend of somebody else's: what it gets from the base class, and how it is found."""

from dataclasses import dataclass
from typing import ClassVar, final

import pytest
import torch
from torch import nn

from accel_backends import (
    BackendConfig,
    Bundle,
    Capabilities,
    ModuleBackend,
    Run,
    installed_backends,
    load_backend,
    select_backend,
)
from accel_precision import PrecisionPolicy
from accel_state import BackendError, Device, PrepareError, Topology


@dataclass
class CopyingConfig(BackendConfig):
    backend: ClassVar[str] = "copying"
    rename: bool = False


@final
class CopyingBackend(ModuleBackend):
    """Replaces every parameter by a copy, as sharding does."""

    name: ClassVar[str] = "copying"
    Config: ClassVar[type[BackendConfig]] = CopyingConfig
    capabilities: ClassVar[Capabilities] = Capabilities(precisions=frozenset({"no", "bf16"}), several_models=False)

    def wrap(self, model):
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                del module._parameters[name]
                module.register_parameter(
                    f"new_{name}" if self.config.rename else name, nn.Parameter(parameter.clone())
                )
        return model

    def convert_state(self, parameter, key, value):
        return value.clone() if isinstance(value, torch.Tensor) else value


def trained():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_optimizers_and_their_state_follow_replaced_parameters(session):
    model, optimizer = trained()
    reference, other = trained()
    backend = CopyingBackend(Run(session, PrecisionPolicy()))
    model = backend.prepare(Bundle([model], [optimizer])).models[0]
    assert optimizer.param_groups[0]["params"][0] is model.weight
    backend.backward(model(torch.ones(1, 3)).sum())
    backend.gradients.clip_norm(model.parameters(), 10.0)
    backend.step(optimizer)
    reference(torch.ones(1, 3)).sum().backward()
    other.step()
    assert torch.equal(model.weight, reference.weight)
    assert set(backend.states.optimizer(optimizer, [model])["state"]) == {"weight", "bias"}


def test_parameters_that_vanish_are_named(session):
    model, optimizer = trained()
    with pytest.raises(
        PrepareError, match="no longer has bias, weight, which Adam updates; it has new_weight, new_bias"
    ):
        CopyingBackend(Run(session, PrecisionPolicy()), CopyingConfig(rename=True)).prepare(
            Bundle([model], [optimizer])
        )


@pytest.mark.parametrize(("precision", "nearest"), [("fp16", "bf16"), ("bf16-true", "bf16"), ("fp64", "bf16")])
def test_what_it_cannot_do_is_refused_when_it_is_opened(session, precision, nearest):
    with pytest.raises(
        BackendError, match=f"'copying' does not carry out precision .*nearest that it does: '{nearest}'"
    ):
        CopyingBackend(Run(session, PrecisionPolicy.parse(precision)))


def test_several_models_in_one_call_are_refused_by_a_backend_that_takes_one(session):
    with pytest.raises(PrepareError, match="prepares one model in a call, and got 2"):
        CopyingBackend(Run(session, PrecisionPolicy())).prepare(Bundle([nn.Linear(1, 1), nn.Linear(1, 1)]))


def test_its_options_choose_it():
    choice = select_backend(Topology(), Device("cpu"), CopyingConfig())
    assert choice.name == "copying"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution with two backends, one of which cannot be imported."""
    info = tmp_path / "somebody-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[accel.backends]\nown = somebody_own:Own\nbroken = somebody_missing:Broken\n"
    )
    (tmp_path / "somebody_own.py").write_text(
        "from accel_backends import ModuleBackend\n"
        "class Own(ModuleBackend):\n    name = 'own'\n    def wrap(self, model):\n        return model\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_it_is_found_by_being_installed():
    assert {"single", "ddp", "own", "broken"} <= set(installed_backends())
    assert load_backend("own").name == "own"


@pytest.mark.usefixtures("installed")
def test_one_that_cannot_be_imported_says_why():
    with pytest.raises(BackendError, match=r"'broken' \(somebody_missing:Broken\) cannot be imported: No module"):
        load_backend("broken")


@pytest.mark.usefixtures("installed")
def test_one_that_two_packages_claim_is_refused(tmp_path, monkeypatch):
    info = tmp_path / "another" / "another-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[accel.backends]\nown = another_own:Own\n")
    monkeypatch.syspath_prepend(tmp_path / "another")
    with pytest.raises(
        BackendError, match=r"'own' .*(somebody 1\.0|another 2\.0) .* and .*(somebody 1\.0|another 2\.0)"
    ):
        load_backend("own")
