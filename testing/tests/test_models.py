"""Models and data depend on their seed alone."""

import pytest
import torch

from accel_testing.equivalence.compare import assert_close_state, assert_equal_state
from accel_testing.equivalence.models import MODELS, SyntheticData, SyntheticTokens, make_model


@pytest.mark.parametrize("name", MODELS)
def test_same_seed_same_model_whatever_came_before(name: str) -> None:
    first = make_model(name, seed=3)
    torch.rand(5)
    assert_equal_state(first, make_model(name, seed=3))


@pytest.mark.parametrize("name", MODELS)
def test_double_model_is_the_single_one(name: str) -> None:
    assert_close_state(make_model(name, dtype=torch.float64).float(), make_model(name), rtol=0.0)


def test_making_a_model_leaves_the_random_state() -> None:
    before = torch.get_rng_state()
    make_model("mlp")
    assert torch.equal(before, torch.get_rng_state())


def test_transformer_shares_its_embedding() -> None:
    model = make_model("transformer")
    assert model.head.weight is model.embedding.weight
    assert model(SyntheticTokens()[0][None]).shape == (1, 16, 32)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "transformer"])
def test_regression_models_take_the_regression_data(name: str) -> None:
    x, y = SyntheticData(4)[0:4]
    assert make_model(name)(x).shape == y.shape


def test_frozen_and_unused_parameters_get_no_gradient() -> None:
    for name, without in (("frozen", "frozen"), ("unused", "unused")):
        model = make_model(name)
        model(SyntheticData(4)[0:4][0]).sum().backward()
        missing = {key.partition(".")[0] for key, value in model.named_parameters() if value.grad is None}
        assert missing == {without}


def test_buffers_count_calls_in_training() -> None:
    model = make_model("buffers")
    model(torch.ones(2, 8))
    model.eval()(torch.ones(2, 8))
    assert model.calls.item() == 1


def test_samples_depend_on_seed_and_index() -> None:
    assert torch.equal(SyntheticData(8)[3][0], SyntheticData(8)[3][0])
    assert not torch.equal(SyntheticData(8)[3][0], SyntheticData(8, seed=1)[3][0])
    assert SyntheticTokens(8).tokens.max() < 32


def test_unknown_model_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match="no model 'gpt'; there are: mlp, transformer"):
        make_model("gpt")
