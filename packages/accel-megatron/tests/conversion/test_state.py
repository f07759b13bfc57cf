"""Conversion of state dicts is exact in both directions, for all degrees; it needs no megatron-core."""

from itertools import product

import pytest
import torch

from accel_megatron import from_megatron, to_megatron
from accel_state.errors import PrepareError


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama tied", "bert", "bert words", "megatron bert"])
@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (1, 2), (2, 2), (2, 4)])
@pytest.mark.sampled(12)
def test_there_and_back_gives_the_same_bits(kind, degrees):
    from loops import make_model

    model = make_model(kind)
    state = {name: value.detach() for name, value in model.named_parameters()}
    places = [(rank, stage) for rank in range(degrees[0]) for stage in range(degrees[1])]
    there = {place: to_megatron(model.config, state, place=place, degrees=degrees) for place in places}
    back = from_megatron(model.config, there, degrees)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], value) for name, value in state.items())


@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 4), (2, 1, 2), (2, 2, 2, 2), (1, 1, 1, 4)])
def test_experts_there_and_back_give_the_same_bits(degrees):
    from loops import make_model

    model = make_model("mixtral")
    state = {name: value.detach() for name, value in model.named_parameters()}
    places = list(product(*map(range, degrees)))
    there = {place: to_megatron(model.config, state, place=place, degrees=degrees) for place in places}
    assert sum(".local_experts." in name for name in there[places[0]]) == 2 * 16 // degrees[1] // degrees[2]
    back = from_megatron(model.config, there, degrees)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], value) for name, value in state.items())


@pytest.mark.parametrize("kind", ["t5", "t5 gated"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_encoder_and_decoder_there_and_back_give_the_same_bits(kind, size):
    from loops import make_model

    model = make_model(kind)
    state = {name: value.detach() for name, value in model.named_parameters()}
    there = {(rank, 0): to_megatron(model.config, state, place=(rank, 0), degrees=(size, 1)) for rank in range(size)}
    back = from_megatron(model.config, there, (size, 1))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], value) for name, value in state.items())


def test_degrees_that_do_not_divide_the_model_are_refused():
    from loops import make_model

    model = make_model("llama")
    with pytest.raises(PrepareError, match="num_attention_heads=4 is not divisible by tp_degree=3; nearest: 2"):
        to_megatron(model.config, {}, degrees=(3, 1))
    with pytest.raises(PrepareError, match="4 layers are not divisible by pp_degree=3; nearest: 2"):
        to_megatron(model.config, {}, degrees=(1, 3))
    with pytest.raises(PrepareError, match="expert_model_parallel_size=2, and the layers of the model have no experts"):
        to_megatron(model.config, {}, degrees=(1, 1, 2))
    with pytest.raises(PrepareError, match="4 experts are not divisible by expert_model_parallel_size=3; nearest: 2"):
        to_megatron(make_model("mixtral").config, {}, degrees=(1, 1, 3))
    of_each = "intermediate_size=48 is not divisible by expert_tensor_parallel_size=5; nearest: 4"
    with pytest.raises(PrepareError, match=of_each):
        to_megatron(make_model("mixtral").config, {}, degrees=(1, 1, 1, 5))
    with pytest.raises(PrepareError, match="num_attention_heads=4 is not divisible by tp_degree=3; nearest: 2"):
        from_megatron(model.config, {}, (3, 1))
    with pytest.raises(PrepareError, match=r"pp_degree=2: the schedules .* pass one tensor .*; nearest: pp_degree=1"):
        to_megatron(make_model("t5").config, {}, degrees=(1, 2))


def test_other_models_are_refused():
    from transformers import BertConfig, OPTConfig

    known = "'llama', 'mixtral', 'gpt2', 'bert', 'megatron-bert', 't5'"
    with pytest.raises(PrepareError, match=f"{known}, and this one is 'opt'; nearest: strategy='fsdp'"):
        to_megatron(OPTConfig(), {})
    with pytest.raises(PrepareError, match="is_decoder=True, which megatron-core does not compute"):
        to_megatron(BertConfig(is_decoder=True), {})
