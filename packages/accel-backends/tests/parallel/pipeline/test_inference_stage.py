"""Stages for inference, run one after the other in one process: they compute what the full model computes."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from accel_backends.parallel.pipeline.call_order import CallOrder
from accel_backends.parallel.pipeline.inference_stage import InferenceStage, StageCut
from accel_backends.parallel.pipeline.split_points import balanced_split_points
from accel_state.errors import BackendError, PrepareError

IDS = torch.randint(3, 64, (2, 10), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(num_layers=3, num_decoder_layers=3, **sizes))


def bart():
    from transformers import BartConfig, BartForConditionalGeneration

    sides = {f"{side}_{key}": size for side in ("encoder", "decoder") for key, size in (("layers", 3), ("ffn_dim", 48))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return BartForConditionalGeneration(
        BartConfig(vocab_size=64, d_model=32, max_position_embeddings=32, **sides, **heads)
    )


def deberta():
    """Reads the weight of an embedding of positions without calling it, and the embeddings again behind block 0."""
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    relative = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
    return DebertaV2ForMaskedLM(DebertaV2Config(num_hidden_layers=6, conv_kernel_size=3, **relative, **SIZES))


def in_stages(model, ranges, inputs, called=None):
    """Output of the last stage, where each stage is cut from a copy of the model; ``called``: other inputs for them."""
    message = {}
    for number in range(len(ranges)):
        own = copy.deepcopy(model)
        order = CallOrder.of(own, partial(own.forward, **inputs))
        cut = StageCut.of(order, ranges, number)
        stage = InferenceStage(cut, own.forward)
        stage.check(cut, inputs)
        stage.release()
        with torch.no_grad():
            message = stage.compute(message, inputs if called is None else called)
    return message


@pytest.mark.parametrize("make", [t5, bart, deberta])
@pytest.mark.parametrize("stops", [[2, 3, 4], [1, 2, 3, 4, 5], [3], [5]])
@pytest.mark.sampled(3)
def test_stages_compute_what_the_model_computes(make, stops):
    torch.manual_seed(0)
    model = make().double().eval()
    inputs = (
        {"input_ids": IDS, "use_cache": False, "decoder_input_ids": IDS[:, :6]}
        if make is not deberta
        else {"input_ids": IDS}
    )
    ranges = [range(*ends) for ends in zip([0, *stops], [*stops, 6], strict=True)]
    other = {key: one.flip(0).repeat(2, 1) if isinstance(one, torch.Tensor) else one for key, one in inputs.items()}
    with torch.no_grad():
        wanted = model(**other)
    found = in_stages(model, ranges, inputs, other)
    assert float((found.logits - wanted.logits).abs().max()) <= 1e-10


class Skipping(nn.Module):
    """The first block's output is added to that of the last one."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return x + outputs[0]


def test_a_model_whose_blocks_need_an_earlier_output_is_refused():
    torch.manual_seed(0)
    model, inputs = Skipping(), {"x": torch.rand(3, 4)}
    with pytest.raises(
        PrepareError, match=r"begins with blocks\.2 does not compute .* \(other values\).*; nearest: another"
    ):
        in_stages(model, [range(2), range(2, 4)], inputs)
    assert torch.equal(in_stages(model, [range(1), range(1, 4)], inputs), model(**inputs))


def test_a_block_that_runs_several_times_is_no_stage():
    from transformers import AlbertConfig, AlbertModel

    model = AlbertModel(AlbertConfig(embedding_size=16, num_hidden_layers=4, **SIZES))
    with pytest.raises(PrepareError, match=r"a module of encoder\.albert_layer_groups runs 4 times"):
        CallOrder.of(model, partial(model.forward, input_ids=IDS))


class Leaving(nn.Module):
    """Runs all blocks, or with ``early`` none."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, early=False):
        for block in () if early else self.blocks:
            x = block(x)
        return x


def test_a_call_that_runs_other_modules_than_the_example_is_an_error():
    model, inputs = Leaving(), {"x": torch.rand(3, 4)}
    with pytest.raises(BackendError, match=r"without a call of blocks\.1, .*; nearest: arguments"):
        in_stages(model, [range(2), range(2, 4)], inputs, {**inputs, "early": True})
    model = t5().eval()
    order = CallOrder.of(model, partial(model.forward, input_ids=IDS, decoder_input_ids=IDS, use_cache=False))
    assert balanced_split_points(order, 2) == ["decoder.block.0"]
    stage = InferenceStage(StageCut.of(order, [range(2), range(2, 6)], 0), model.forward)
    encoded = (torch.zeros(2, 10, 32),)
    with pytest.raises(BackendError, match="decoder is on another rank of the pipeline"):
        stage.compute({}, {"encoder_outputs": encoded, "decoder_input_ids": IDS, "use_cache": False})
    stage.restore()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in t5().named_parameters()]
