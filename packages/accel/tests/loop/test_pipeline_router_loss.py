"""The load-balancing loss of routers on several stages is that of one process, with its gradients."""

import pytest
import torch
from torch.nn import functional

from accel_state.errors import BackendError, CollectiveError, PrepareError
from accel_testing.equivalence.causal_lms import tiny_mixtral, with_exact_loss

from .pipelines import accelerator_of, distance, llama, loader, optimizer_of

pytestmark = pytest.mark.timeout(300)
GPIPE = {"schedule": "gpipe"}


def exact_loss(logits, experts, top_k, mask):
    """The loss in the dtype of the logits, which transformers computes in float32."""
    probabilities = torch.cat([one.softmax(-1) for one in logits])
    chosen = functional.one_hot(probabilities.topk(top_k, dim=-1).indices, experts).sum(1).to(probabilities.dtype)
    weight = torch.ones_like(probabilities[:, :1]) if mask is None else mask.reshape(-1, 1).repeat(len(logits), 1)
    share, mean = ((one * weight).sum(0) / weight.sum() for one in (chosen, probabilities))
    return experts * (share * mean).sum()


def balanced(monkeypatch, **options):
    """A Mixtral whose routers' loss weighs much."""
    from transformers.models.mixtral import modeling_mixtral

    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", exact_loss)
    sizes = {"num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 24, "router_aux_loss_coef": 0.5}
    model = tiny_mixtral(**{**sizes, "output_router_logits": True, "use_cache": False, **options})
    return with_exact_loss(model).double()


def assert_equals_one_process(monkeypatch, degrees, config, *, masked=True, **options):
    accelerator = accelerator_of(degrees, {**GPIPE, **config})
    expected, model = balanced(monkeypatch, **options), balanced(monkeypatch, **options)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    wanted_optimizer = optimizer_of(expected)
    shard = accelerator.data_shard
    for batch in list(loader(4 * shard.count))[:2]:
        if not masked:
            batch = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
        own = {name: rows.chunk(shard.count)[shard.index] for name, rows in batch.items()}
        if shard.count > 1:  # a sum divided by one number, because ranks have different numbers of tokens with a label
            own["num_items_in_batch"] = int((batch["labels"][:, 1:] >= 0).sum()) / shard.count
        found, wanted = model(**own), expected(**batch)
        accelerator.backward(found.loss)
        wanted.loss.backward()
        assert float(found.aux_loss) == pytest.approx(float(wanted.aux_loss.detach()), rel=1e-10)
        losses = accelerator.reduce(found.loss.detach().clone(), "mean")
        assert float(losses) == pytest.approx(float(wanted.loss.detach()), rel=1e-10)
        gradients = accelerator.full_gradients(model)
        for name, one in expected.named_parameters():
            assert distance(gradients[name], one.grad) <= 1e-10, name
        for one in (optimizer, wanted_optimizer):
            one.step()
            one.zero_grad()
    with torch.no_grad():
        found, wanted = model.eval()(**batch), expected.eval()(**batch)
    assert float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-10)
    assert float(found.aux_loss) == pytest.approx(float(wanted.aux_loss), rel=1e-10)
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_a_batch_of_two_micro_batches(rank, monkeypatch):
    assert_equals_one_process(monkeypatch, {"pp_size": 2}, {})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", [1, 4])
def test_other_numbers_of_micro_batches(rank, count, monkeypatch):
    assert_equals_one_process(monkeypatch, {"pp_size": 2}, {"num_microbatches": count}, masked=False)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("axis", ["dp_shard_size", "dp_replicate_size", "ep_size", "tp_size", "cp_size", "sp_size"])
def test_ranks_that_compute_on_other_tokens(rank, axis, monkeypatch):
    options = {"num_key_value_heads": 2, "num_attention_heads": 2}
    masked = axis != "cp_size"  # whose attention would see padding
    assert_equals_one_process(monkeypatch, {"pp_size": 2, axis: 2}, {}, masked=masked, **options)


@pytest.mark.ranks(2)
def test_a_first_stage_without_routers(rank, monkeypatch):
    """And a call that asks for the loss, which the configuration of the model does not."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    monkeypatch.setattr(modeling_qwen3_moe, "load_balancing_loss_func", exact_loss)
    accelerator = accelerator_of({"pp_size": 2}, GPIPE)

    def made():
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 24, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
        config = Qwen3MoeConfig(**sizes, **heads, **experts, mlp_only_layers=[0], router_aux_loss_coef=0.5)
        return with_exact_loss(Qwen3MoeForCausalLM(config)).double()

    expected, model = made(), made()
    model = accelerator.prepare(model)
    batch = next(iter(loader()))
    for asked in ({"output_router_logits": True}, {}):
        found, wanted = model(**batch, **asked), expected(**batch, **asked)
        assert float(found.loss) == pytest.approx(float(wanted.loss.detach()), rel=1e-10)
        assert ("aux_loss" in found) == bool(asked)
        accelerator.backward(found.loss)
        wanted.loss.backward()
    gradients = accelerator.full_gradients(model)
    for name, one in expected.named_parameters():
        assert one.grad is None or distance(gradients[name], one.grad) <= 1e-10, name
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_what_cannot_be_exact_is_refused(rank, monkeypatch):
    accelerator = accelerator_of({"pp_size": 2}, {})
    with pytest.raises(PrepareError, match=r"the schedule '1f1b': .*choices of all micro-batches.*schedule=\"gpipe\""):
        accelerator.prepare(balanced(monkeypatch))
    model = accelerator.prepare(balanced(monkeypatch, output_router_logits=False))
    batch = next(iter(loader()))
    with pytest.raises(
        BackendError, match=r"^MixtralForCausalLM with output_router_logits=True and the schedule '1f1b'"
    ):
        model(**batch, output_router_logits=True)
    with torch.no_grad():  # evaluation has no backwards
        assert model(**batch, output_router_logits=True).aux_loss > 0
    assert model(**batch).loss.isfinite()
    plain = accelerator.prepare(llama().double())
    with pytest.raises(BackendError, match=r"LlamaForCausalLM with output_router_logits=True: .*nearest: .*=False"):
        plain(**batch, output_router_logits=True)
    accelerator.end_training()
    accelerator = accelerator_of({"pp_size": 2}, {**GPIPE, "loss_fn": lambda outputs, batch: outputs.logits.sum()})
    with pytest.raises(PrepareError, match=r"and loss_fn, .*routers of that stage only; nearest: labels"):
        accelerator.prepare(balanced(monkeypatch))
    accelerator.end_training()


@pytest.mark.ranks(4)
def test_replicas_learn_of_a_batch_that_does_not_divide(rank, monkeypatch):
    accelerator = accelerator_of({"pp_size": 2, "dp_replicate_size": 2}, GPIPE)
    model = accelerator.prepare(balanced(monkeypatch))
    failing = accelerator.data_shard.index == 1
    with pytest.raises(BackendError if failing else CollectiveError, match="a batch of 3 samples does not divide"):
        model(**next(iter(loader(3 if failing else 4))))
    assert model(**next(iter(loader(4)))).loss.isfinite()
    accelerator.end_training()
