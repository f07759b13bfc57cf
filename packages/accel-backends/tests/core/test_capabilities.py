import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_backends import Capabilities, load_backend
from accel_backends.core.capabilities import PRECISIONS, precision_of
from accel_precision import PrecisionPolicy


@pytest.mark.parametrize(
    ("capabilities", "spec", "device_type", "world_size", "words"),
    [
        (Capabilities(frozenset({"cuda"})), "no", "cpu", 1, "does not run on device type 'cpu', only on cuda"),
        (Capabilities(ranks=(1, 1)), "no", "cpu", 2, "runs on 1 process(es), and there are 2"),
        (Capabilities(ranks=(2, None)), "no", "cpu", 1, "runs on 2 or more process(es)"),
        (Capabilities(ranks=(2, 4)), "no", "cpu", 5, "runs on 2 to 4 process(es)"),
        (Capabilities(precisions=frozenset({"no", "bf16"})), "fp16", "cpu", 1, "nearest that it does: 'bf16'"),
        (Capabilities(precisions=frozenset({"no", "fp16"})), "fp64", "cpu", 1, "nearest that it does: 'no'"),
    ],
)
def test_a_refusal_says_what_would_do(capabilities, spec, device_type, world_size, words):
    reason = capabilities.refusal("some", PrecisionPolicy.parse(spec), device_type, world_size)
    assert reason is not None
    assert words in reason
    assert "'some'" in reason


@settings(deadline=None)
@given(st.sampled_from(sorted(PrecisionPolicy.Named)), st.sampled_from(["cpu", "cuda", "mps"]), st.integers(1, 8))
def test_the_defaults_refuse_nothing(name, device_type, world_size):
    assert Capabilities().refusal("any", PrecisionPolicy.Named[name], device_type, world_size) is None


@pytest.mark.parametrize("name", PRECISIONS)
def test_every_precision_is_a_policys(name):
    assert precision_of(PrecisionPolicy.parse(name)) == name


def test_a_policy_made_of_roles_comes_under_a_name():
    assert precision_of(PrecisionPolicy.parse("params=fp32,compute=fp16,reduce=bf16")) == "fp16"


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "fsdp1", "deepspeed"])
def test_devices_that_record_computations_take_their_own_backend_only(name):
    backend = load_backend(name)
    policy = PrecisionPolicy.parse("no", device_type="cpu")
    ranks = backend.capabilities.ranks[0]
    assert "does not run on device type 'xla'" in backend.capabilities.refusal(name, policy, "xla", ranks)
    assert backend.capabilities.refusal(name, policy, "cpu", ranks) is None
