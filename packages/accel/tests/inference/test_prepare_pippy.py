"""prepare_pippy: a model in stages computes what the plain model computes, with the arguments of rank 0."""

import copy

import pytest
import torch

from accel import prepare_pippy
from accel_state.errors import BackendError, CollectiveError, PrepareError
from accel_testing.equivalence.causal_lms import VOCABULARY, tiny_gpt2, tiny_llama, with_exact_loss

pytestmark = pytest.mark.timeout(300)

TOKENS = torch.randint(0, VOCABULARY, (9, 12), generator=torch.Generator().manual_seed(3))


def llama(*, tie=False):
    return with_exact_loss(tiny_llama(num_hidden_layers=4, tie_word_embeddings=tie))


def gpt2():
    return with_exact_loss(tiny_gpt2(n_layer=4))


@pytest.mark.ranks(2)
def test_the_last_rank_has_the_outputs_of_the_plain_model(rank):
    model = llama(tie=True).double()
    assert prepare_pippy(model, example_args=(TOKENS[:2],)) is model
    assert model.hf_split_points == ["model.layers.2"]
    assert model.pippy_stage.blocks == (range(2) if rank == 0 else range(2, 4))
    expected = llama(tie=True).double().eval()
    assert sum(one.numel() for one in model.parameters()) < sum(one.numel() for one in expected.parameters())
    for samples in (4, 3, 1):
        given = TOKENS[:samples] if rank == 0 else TOKENS[8:9]  # those of other ranks are not used
        found = model(given, attention_mask=torch.ones_like(given))
        if rank == 1:
            wanted = expected(TOKENS[:samples]).logits
            assert float((found.logits - wanted).abs().max()) <= 1e-10
            assert not found.logits.requires_grad
        else:
            assert found is None
    options = {"max_new_tokens": 3, "do_sample": False}
    given = (TOKENS[:2, :5],) if rank == 0 else ()
    assert model.generate(*given, **options).equal(expected.generate(TOKENS[:2, :5], use_cache=False, **options))


@pytest.mark.ranks(2)
def test_outputs_are_gathered_where_a_split_point_is_given(rank):
    model, expected = gpt2().double(), gpt2().double().eval()
    options = {"no_split_module_classes": "GPT2Block", "num_chunks": 4, "gather_output": True}
    prepare_pippy(model, ["transformer.h.1"], **options)
    assert [number for number, block in enumerate(model.transformer.h) if list(block.parameters())] == (
        [0] if rank == 0 else [1, 2, 3]
    )
    batch = {"input_ids": TOKENS[:8], "labels": TOKENS[:8]}
    found, wanted = model(**batch) if rank == 0 else model(), expected(**batch)
    assert float((found.logits - wanted.logits).abs().max()) <= 1e-10
    assert float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-10)
    with pytest.raises(BackendError, match=r"an argument of class object, which cannot be sent .*; nearest: tensors"):
        model(TOKENS[:2], position_ids=object())
    with pytest.raises(BackendError, match="a pipeline needs a tensor with a row for each sample"):
        model()
    with pytest.raises(CollectiveError if rank else ValueError, match="input_ids or inputs_embeds"):
        model(attention_mask=TOKENS[:2])
    found = model(**batch)  # an error of a call leaves the pipeline as it was
    assert float((found.logits - wanted.logits).abs().max()) <= 1e-10


def masked_bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(num_hidden_layers=4, max_position_embeddings=32, **SIZES))


def classifying_gpt2():
    from transformers import GPT2Config, GPT2ForSequenceClassification

    return GPT2ForSequenceClassification(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=32, pad_token_id=0)
    )


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(num_layers=3, num_decoder_layers=3, **sizes))


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return ViTForImageClassification(ViTConfig(num_hidden_layers=4, image_size=8, patch_size=4, **sizes))


SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
IMAGES = torch.rand(6, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
PADDED = (torch.arange(12) < torch.tensor([[12], [7], [12], [12], [5], [12]])).long()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("make", "batch", "point"),
    [
        (masked_bert, {"input_ids": TOKENS[:6], "attention_mask": PADDED}, "bert.encoder.layer.2"),
        (classifying_gpt2, {"input_ids": TOKENS[:6]}, "transformer.h.2"),
        (
            t5,
            {"input_ids": TOKENS[:6], "attention_mask": PADDED, "decoder_input_ids": TOKENS[3:, :7]},
            "decoder.block.0",
        ),
        (vit, {"pixel_values": IMAGES}, "vit.layers.2"),
    ],
    ids=["bert", "gpt2-classification", "t5", "vit"],
)
@pytest.mark.sampled(1)
def test_encoders_and_encoder_decoders_compute_what_the_plain_model_computes(rank, make, batch, point):
    torch.manual_seed(0)
    model = make().double().eval()
    expected = copy.deepcopy(model)
    prepare_pippy(model, example_kwargs={name: one[:2] for name, one in batch.items()}, gather_output=True)
    assert model.hf_split_points == [point]
    assert sum(one.numel() for one in model.parameters()) < 0.75 * sum(one.numel() for one in expected.parameters())
    with torch.no_grad():
        wanted = expected(**batch)
    found = model(**batch) if rank == 0 else model()
    assert type(found) is type(wanted)
    assert list(found) == [name for name, one in wanted.items() if isinstance(one, torch.Tensor)]
    for name, one in found.items():
        assert float((one - wanted[name]).abs().max()) <= 1e-10
    if make is t5:
        with pytest.raises(BackendError, match=r"generate of T5\w+ over the stages .* causal language models only"):
            model.generate(*([batch["input_ids"]] if rank == 0 else []), max_new_tokens=3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(ranks, marks=pytest.mark.ranks(ranks)) for ranks in (3, 4)])
def test_more_stages_compute_the_plain_model(rank, ranks):
    model, expected = llama(tie=True).double(), llama(tie=True).double().eval()
    prepare_pippy(model, gather_output=True)
    assert len(model.hf_split_points) == ranks - 1
    for samples in (2 * ranks, ranks + 1, 1):
        found = model(TOKENS[:samples]) if rank == 0 else model()
        with torch.no_grad():
            assert float((found.logits - expected(TOKENS[:samples]).logits).abs().max()) <= 1e-10
    options = {"max_new_tokens": 3, "do_sample": False}
    given = (TOKENS[:2, :5],) if rank == 0 else ()
    assert model.generate(*given, **options).equal(expected.generate(TOKENS[:2, :5], use_cache=False, **options))


@pytest.mark.ranks(2)
def test_what_cannot_be_split_is_refused_on_every_rank(rank):
    model = llama()
    for options, message in (
        ({"split_points": ["model.layers.0"]}, "'model.layers.0' of .* is not a block behind the first one"),
        ({"split_points": "model.layer.2"}, "did you mean 'model.layers.2'"),
        ({"split_points": ["model.layers.1", "model.layers.2"]}, "for 2 pipeline stages; expected 1 different blocks"),
        ({"split_points": 2}, "split_points is 2; expected a name or a list of names"),
        ({"no_split_module_classes": ["LlamaModel"]}, r"holds the blocks .* nearest: \['LlamaDecoderLayer'\]"),
        ({"no_split_module_classes": ["LlamaDecoder"]}, "no module of this class; did you mean 'LlamaDecoderLayer'"),
        ({"num_chunks": 0}, "number of micro-batches is 0; expected at least 1"),
    ):
        with pytest.raises(PrepareError, match=message):
            prepare_pippy(model, **options)
    with pytest.raises(PrepareError, match=r"Linear has no dummy_inputs, .* nearest: example_args"):
        prepare_pippy(torch.nn.Linear(2, 2))
    with pytest.raises(
        PrepareError, match=r"Linear cannot be split .*, because it has no list of blocks .* nearest: the"
    ):
        prepare_pippy(torch.nn.Linear(2, 2), example_args=(torch.ones(2, 2),))
    with pytest.raises(PrepareError, match="ranks split a model differently"):
        prepare_pippy(model, num_chunks=2 + rank)
    with pytest.raises(PrepareError if rank else CollectiveError, match="no_split_module_classes has 'Block'"):
        prepare_pippy(model, no_split_module_classes=["Block"] if rank else None)
    with pytest.raises(BackendError, match="output_attentions was given"):
        prepare_pippy(model, example_args=(TOKENS[:2],), example_kwargs={"output_attentions": True})
    assert prepare_pippy(model, ["model.layers.1"]).hf_split_points == ["model.layers.1"]  # refusals left it whole


def test_one_process_keeps_the_model():
    model, expected = llama(), llama().eval()
    assert prepare_pippy(model, example_args=(TOKENS[:2],)) is model
    assert model.hf_split_points == []
    assert model(TOKENS[:2]).logits.equal(expected(TOKENS[:2]).logits)
    with pytest.raises(PrepareError, match="with one process, which has one stage"):
        prepare_pippy(model, ["model.layers.2"])
