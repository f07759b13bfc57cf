import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_backends import Bundle, DDPConfig, ModelFacts, SingleConfig, installed_backends, load_backend, select_backend
from accel_backends.core.config import BackendConfig
from accel_state import BackendError, Device, Topology

ONE, TWO = Topology(), Topology(rank=0, world_size=2, local_world_size=2)
CPU, XLA = Device("cpu"), Device("xla")


class Sharding(BackendConfig):
    backend = "fsdp"


@pytest.mark.parametrize(
    ("topology", "device", "config", "name", "reason"),
    [
        (ONE, CPU, None, "single", "one process"),
        (TWO, CPU, None, "ddp", "2 processes"),
        (TWO, CPU, DDPConfig(), "ddp", "DDPConfig was given"),
        (ONE, CPU, DDPConfig(), "single", "nothing to do"),
        (TWO, CPU, Sharding(), "fsdp", "Sharding was given"),
        (ONE, CPU, Sharding(), "fsdp", "Sharding was given"),
        (ONE, CPU, SingleConfig(), "single", "SingleConfig was given"),
        (TWO, CPU, "deepspeed", "deepspeed", "'deepspeed' was asked for"),
        (TWO, XLA, None, "xla", "xla"),
        (ONE, XLA, None, "xla", "xla"),
        (ONE, XLA, DDPConfig(), "xla", "nothing to do"),
    ],
)
def test_the_choice_and_its_reasons(topology, device, config, name, reason):
    choice = select_backend(topology, device, config)
    assert choice.name == name
    assert reason in str(choice)


def test_frozen_models_are_a_reason():
    assert "stay bare" in str(select_backend(TWO, CPU, None, ModelFacts(trainable=0)))


@settings(deadline=None)
@given(st.integers(1, 64))
def test_every_choice_has_a_reason_and_a_backend(world_size):
    choice = select_backend(Topology(rank=0, world_size=world_size, local_world_size=world_size), CPU)
    assert choice.reasons
    assert choice.name in installed_backends()


@pytest.mark.parametrize("name", ["single", "ddp"])
def test_backends_load_by_name(name):
    backend = load_backend(name)
    assert backend.name == name
    assert backend.Config.backend == name


def test_both_are_entry_points_too():
    from importlib.metadata import entry_points

    points = {point.name: point for point in entry_points(group="accel.backends")}
    assert all(points[name].load() is load_backend(name) for name in ("single", "ddp"))


def test_an_unknown_backend_lists_the_installed_and_the_nearest():
    with pytest.raises(BackendError, match=r"no backend 'dpp'; installed: .*ddp.*did you mean 'ddp'"):
        load_backend("dpp")


def test_a_bundle_says_which_models_are_placed():
    from accel_state import PrepareError

    assert Bundle([]).placed == ()
    with pytest.raises(PrepareError, match="place has 1 entries for 0 models"):
        Bundle([], place=(True,))
