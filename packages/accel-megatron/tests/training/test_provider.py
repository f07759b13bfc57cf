"""Models of megatron-core that a user's own function builds. On CPU ranks, under the tests' stand-in for CUDA."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


def relu_model(pre_process=True, post_process=True, config=None, *, vocabulary=64):
    """A Llama whose gates are ReLUs."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config.activation_func = torch.nn.functional.relu
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=vocabulary,
        max_sequence_length=32,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("axis", ["tp_degree", "pp_degree"])
def test_a_provided_model_has_the_given_weights_and_computes_otherwise(rank, axis, prepared):
    from loops import accelerator, largest_difference, make_model, optimizer_of, reference, train
    from torch import nn

    calls = []

    def prepare(provider):
        calls.append(provider)
        return [provider()]

    own = {"custom_model_provider_function": relu_model} | (
        {"custom_prepare_model_function": prepare} if prepared else {}
    )
    with accelerator(num_micro_batches=2, **{axis: 2}, **own) as one:
        expected = make_model("llama").double()
        for layer in expected.model.layers:
            layer.mlp.act_fn = nn.ReLU()
        losses = reference(expected, 1)
        source = make_model("llama")
        model, optimizer = one.prepare(source, optimizer_of(source))
        assert len(calls) == prepared
        assert train(one, model, optimizer, 0) == pytest.approx(losses, abs=1e-5)
        assert largest_difference(one.get_state_dict(model), expected.state_dict()) < 1e-5


@pytest.mark.ranks(2)
def test_other_parameters_are_refused_on_every_rank(rank):
    from functools import partial

    from loops import accelerator, make_model

    from accel_state.errors import CollectiveError, PrepareError

    def wider_head(pre_process=True, post_process=True, config=None):
        return relu_model(pre_process, post_process, config, vocabulary=72 if post_process else 64)

    refused = r"first output_layer\.weight, which is \(72, 32\) there and \(64, 32\) in the converted model"
    expected = pytest.raises((PrepareError, CollectiveError), match=refused)
    with accelerator(pp_degree=2, custom_model_provider_function=wider_head) as one, expected:
        one.prepare(make_model("llama"))
    twice = {"custom_prepare_model_function": lambda provider: [provider(), provider()]}
    expected = pytest.raises(PrepareError, match=r"returned 2 models; .*nearest: lambda provider: \[provider\(\)\]")
    with accelerator(tp_degree=2, custom_model_provider_function=partial(relu_model), **twice) as one, expected:
        one.prepare(make_model("llama"))
