"""KV caches of a dispatched model: each layer's is where the layer computes."""

from inspect import signature

import pytest
import torch

from accel_inference.dispatch.dispatch import dispatch_model

pytest.importorskip("transformers")
import transformers

from .architectures import inputs_of, make

CACHE = "cache" if "cache" in signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
LAST = 2


def place(last, rest, model):
    names = [name for name, _ in model.model.named_children() if name != "layers"]
    layers = {f"model.layers.{index}": rest for index in range(LAST)}
    return {**{f"model.{name}": rest for name in names}, **layers, "lm_head": rest, f"model.layers.{LAST}": last}


def devices(cache):
    return [layer.keys.device.type for layer in cache.layers]


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@torch.no_grad()
def test_a_cache_follows_the_execution_device_of_its_layer(kind):
    model = make("llama")
    options = {"max_cache_len": 16} if kind == "StaticCache" else {}
    cache = getattr(transformers, kind)(config=model.config, **options)
    dispatch_model(model, place("meta", "cpu", model) | {"model.norm": "meta", "lm_head": "meta"}, "cpu")
    with pytest.raises(NotImplementedError, match="meta"):  # the logits cannot return to the device of the inputs
        model(**inputs_of("llama"), **{CACHE: cache}, use_cache=True)
    assert devices(cache) == ["cpu", "cpu", "meta"]


@torch.no_grad()
def test_the_cache_of_an_offloaded_layer_stays_on_its_execution_device(tmp_path):
    model = make("llama")
    ids, options = inputs_of("llama")["input_ids"], {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    dispatch_model(model, place("disk", "cpu", model), offload_dir=tmp_path)
    got = model.generate(ids, **options, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected)
    cache = getattr(got, "past_key_values", None) or got.cache
    assert devices(cache) == ["cpu", "cpu", "cpu"]
    assert model.model.layers[LAST].self_attn.k_proj.weight.is_meta
