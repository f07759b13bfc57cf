"""Layouts of model axes train as one process does, and errors of each axis are caught and named."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_testing.equivalence.causal_lms import (
    VOCABULARY,
    tiny_gpt2,
    tiny_llama,
    tiny_mixtral,
    with_exact_layers,
    with_exact_loss,
)
from accel_testing.equivalence.equivalence import assert_equivalent
from accel_testing.equivalence.program import Program
from accel_testing.ranks.pool import RankPool

STEPS, SAMPLES, LENGTH = 4, 8, 8


def llama(*, tied: bool = False, kv_heads: int = 2) -> Program:
    """A tiny Llama and its own loss, with clipping that bites."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_key_value_heads": kv_heads}
    model = with_exact_loss(tiny_llama(**sizes, tie_word_embeddings=tied, use_cache=False))
    batches = torch.randint(0, VOCABULARY, (STEPS, SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    return Program(model, loss_of, list(batches), clip=0.5)


def gpt2() -> Program:
    """A tiny GPT-2, whose positions are an embedding, and its own loss."""
    model = with_exact_loss(tiny_gpt2(n_embd=16, use_cache=False))
    batches = torch.randint(0, VOCABULARY, (STEPS, SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    return Program(model, loss_of, list(batches), clip=0.5)


def tied_llama() -> Program:
    return llama(tied=True)


def wide_llama() -> Program:
    """``llama`` with as many heads of keys and values as four ranks need."""
    return llama(kv_heads=4)


def mixtral(*, router_loss: bool = False) -> Program:
    """A tiny Mixtral and its own loss.

    The weight of its routers' loss makes the rounding of that loss, float32 in transformers, less than 1e-10.
    """
    sizes = {"hidden_size": 16, "intermediate_size": 24, "router_aux_loss_coef": 1e-4}
    model = with_exact_loss(tiny_mixtral(**sizes, output_router_logits=router_loss, use_cache=False))
    batches = torch.randint(0, VOCABULARY, (STEPS, SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    return Program(model, loss_of, list(batches), clip=0.5)


def balanced_mixtral() -> Program:
    return mixtral(router_loss=True)


def exact_llama() -> Program:
    """``llama`` with exact layers."""
    program = llama()
    return replace(program, model=with_exact_layers(program.model))


def summed_mixtral() -> Program:
    """A Mixtral with exact layers, and the sum over tokens with a label, of which batches have different numbers."""
    program = mixtral()
    return replace(program, model=with_exact_layers(program.model), loss=sum_of, weight=labelled)


def sum_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=labels_of(tokens), num_items_in_batch=1).loss
    return loss


def labelled(tokens: Tensor) -> float:
    return float((labels_of(tokens)[:, 1:] >= 0).sum())


def labels_of(tokens: Tensor) -> Tensor:
    return tokens.masked_fill(tokens < VOCABULARY // 3, -100)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("program", "layout"),
    [
        (llama, "tp:2/fp64/acc=2"),
        (tied_llama, "tp:2/dp_shard=2/fp64/acc=2"),
        (llama, "cp:2/fp64/acc=2"),
        (gpt2, "sp:2/fp64/acc=2/weighted"),
        (llama, "sp:2/dp_shard:2/fp64/acc=2/short"),
        pytest.param(llama, "sp:2/fp64/acc=2/weighted", marks=pytest.mark.slow),
        pytest.param(balanced_mixtral, "sp:2/fp64", marks=pytest.mark.slow),
        pytest.param(balanced_mixtral, "cp:2/fp64", marks=pytest.mark.slow),
        pytest.param(balanced_mixtral, "sp:2/dp_shard:2/fp64", marks=pytest.mark.slow),
        pytest.param(llama, "sp:4/fp64/acc=2", marks=pytest.mark.slow),
        pytest.param(gpt2, "sp:2/dp_shard:2/fp64/acc=2/short", marks=pytest.mark.slow),
        pytest.param(gpt2, "sp:2/dp_shard:2/fp64/acc=2/weighted", marks=pytest.mark.slow),
        pytest.param(gpt2, "sp:2/dp_replicate:2/fp64/acc=2", marks=pytest.mark.slow),
        pytest.param(tied_llama, "sp:2/tp:2/fp64/acc=2", marks=pytest.mark.slow),
        pytest.param(llama, "sp:2/fp64/activation_checkpointing=true", marks=pytest.mark.slow),
        pytest.param(llama, "sp:2/fp64/sharding_strategy=SHARD_GRAD_OP", marks=pytest.mark.slow),
        pytest.param(llama, "sp:2/bf16", marks=pytest.mark.slow),
        (tied_llama, "pp:2/fp64/acc=2"),
        (balanced_mixtral, "ep:2/cp:2/fp64"),
        pytest.param(balanced_mixtral, "ep:2/fp64", marks=pytest.mark.slow),
        pytest.param(balanced_mixtral, "ep:2/tp:2/fp64", marks=pytest.mark.slow),
        pytest.param(balanced_mixtral, "ep:2/sp:2/fp64", marks=pytest.mark.slow),
        pytest.param(balanced_mixtral, "ep:2/dp_replicate=2/fp64", marks=pytest.mark.slow),
        pytest.param(mixtral, "ep:2/dp_shard=2/fp64/acc=2/short", marks=pytest.mark.slow),
        pytest.param(mixtral, "ep:2/dp_shard=2/fp64/acc=2/weighted", marks=pytest.mark.slow),
        pytest.param(mixtral, "ep:2/dp_shard=2/fp64/activation_checkpointing=true", marks=pytest.mark.slow),
        pytest.param(mixtral, "ep:2/dp_shard=2/fp64/cpu_offload=true", marks=pytest.mark.slow),
        pytest.param(mixtral, "ep:2/dp_shard=2/fp64/reshard_after_forward=2", marks=pytest.mark.slow),
        pytest.param(mixtral, "ep:2/dp_shard=2/fp64/sharding_strategy=SHARD_GRAD_OP", marks=pytest.mark.slow),
        pytest.param(mixtral, "ep:2/dp_shard=2/fp64/find_unused_parameters=true", marks=pytest.mark.slow),
        pytest.param(mixtral, "ep:2/dp_shard=2/bf16", marks=pytest.mark.slow),
        pytest.param(mixtral, "ep:2/fp32", marks=pytest.mark.slow),
        (tied_llama, "pp:2/dp_shard:2/fp64/acc=2"),
        pytest.param(gpt2, "pp:2/cp:2/fp64/acc=2/weighted", marks=pytest.mark.slow),
        pytest.param(exact_llama, "pp:2/fp64/acc=2/weighted", marks=pytest.mark.slow),
        pytest.param(exact_llama, "pp:2/cp:2/fp64/acc=2/weighted", marks=pytest.mark.slow),
        pytest.param(tied_llama, "pp:2/cp:2/fp64/acc=2/short", marks=pytest.mark.slow),
        pytest.param(gpt2, "pp:2/sp:2/fp64/acc=2/weighted", marks=pytest.mark.slow),
        pytest.param(gpt2, "pp:2/sp:2/fp64/acc=2/short", marks=pytest.mark.slow),
        pytest.param(mixtral, "pp:2/ep:2/fp64/acc=2/short", marks=pytest.mark.slow),
        pytest.param(summed_mixtral, "pp:2/ep:2/fp64/acc=2", marks=pytest.mark.slow),
        pytest.param(balanced_mixtral, "pp:2/fp64/schedule=gpipe", marks=pytest.mark.slow),
        pytest.param(balanced_mixtral, "pp:2/ep:2/fp64/schedule=gpipe", marks=pytest.mark.slow),
        pytest.param(balanced_mixtral, "pp:2/dp_shard:2/fp64/schedule=gpipe", marks=pytest.mark.slow),
        pytest.param(tied_llama, "pp:2/tp:2/fp64/acc=2", marks=pytest.mark.slow),
        pytest.param(llama, "pp:2/dp_shard:2/fp64/acc=2/short", marks=pytest.mark.slow),
        pytest.param(llama, "pp:2/dp_replicate=2/fp64/acc=2", marks=pytest.mark.slow),
        pytest.param(llama, "pp:2/tp:2/fp32", marks=pytest.mark.slow),
        pytest.param(llama, "pp:2/dp_shard:2/fp32", marks=pytest.mark.slow),
        pytest.param(llama, "tp:2/fp32", marks=pytest.mark.slow),
        pytest.param(llama, "cp:2/fp32", marks=pytest.mark.slow),
        pytest.param(gpt2, "sp:2/fp32", marks=pytest.mark.slow),
        pytest.param(llama, "pp:2/fp32", marks=pytest.mark.slow),
    ],
)
def test_a_model_axis_equals_one_process(rank_pool: RankPool, program: Callable[[], Program], layout: str) -> None:
    assert_equivalent(program, [layout], pool=rank_pool)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "layout"),
    [
        (wide_llama, "tp:4/fp64/acc=2"),
        (gpt2, "tp:4/fp64/acc=2/weighted"),
        (wide_llama, "tp:4/fp32"),
        (llama, "cp:4/fp64/acc=2"),
        (gpt2, "cp:4/fp64/acc=2/short"),
        (balanced_mixtral, "cp:4/fp64"),
        (llama, "cp:4/fp32"),
    ],
)
def test_an_axis_of_four_ranks_equals_one_process(
    rank_pool: RankPool, program: Callable[[], Program], layout: str
) -> None:
    assert_equivalent(program, [layout], pool=rank_pool)


# Mutations: what an axis could do wrong, done on purpose in its ranks.


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def doubled_tensor_gradient() -> Iterator[None]:
    """The gradient with respect to the input of a column-wise layer is summed twice over its ranks."""
    from accel_backends.parallel.styles import Colwise

    def double(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (2 * inputs[0] - inputs[0].detach(), *inputs[1:])

    def make(original: Any) -> Any:
        def install(self: Any, module: nn.Module, mesh: Any) -> None:
            original(self, module, mesh)
            module.register_forward_pre_hook(double, prepend=True)

        return install

    with replaced(Colwise, "install", make):
        yield


@contextmanager
def wrong_divisor_of_sequences() -> Iterator[None]:
    """Each rank with a shard of a sequence divides its loss by the tokens of all ranks, and ranks average once more."""
    from accel_backends.parallel.sequence_inputs import SequenceInputs

    def make(original: Any) -> Any:
        def shard(self: Any, *given: Any) -> Any:
            args, kwargs = original(self, *given)
            return args, {**kwargs, "num_items_in_batch": kwargs["num_items_in_batch"] * self.context.mesh.size()}

        return shard

    with replaced(SequenceInputs, "_shard", make):
        yield


@contextmanager
def heads_of_other_ranks() -> Iterator[None]:
    """Attention's outputs come back in the reverse order of ranks, and of the heads of each rank."""
    from accel_backends.parallel.attention import exchanged

    with replaced(exchanged, "_tokens_for_heads", lambda original: lambda *given: original(*given).flip(1)):
        yield


@contextmanager
def dropped_sum_of_tied_weight() -> Iterator[None]:
    """The first and the last stage keep their gradients of the weight that they share to themselves."""
    from accel_backends.pipeline.model import PipelinedModel

    with replaced(PipelinedModel, "_sum_tied", lambda original: lambda self: None):
        yield


@contextmanager
def router_loss_averaged_twice() -> Iterator[None]:
    """Each rank's part of the gradient of the routers' loss is divided by the ranks, and ranks average once more."""
    from accel_backends.parallel import router_loss

    def make(original: Any) -> Any:
        def halve(*args: Any, **kwargs: Any) -> Tensor:
            loss = original(*args, **kwargs)
            return loss.detach() + (loss - loss.detach()) / 2

        return halve

    with replaced(router_loss, "load_balancing_loss", make):
        yield


@contextmanager
def doubled_gradient_of_experts() -> Iterator[None]:
    """The gradients of experts are those of the sum over two ranks, not of the mean."""
    from accel_backends.parallel import expert_parallel

    def make(original: Any) -> Any:
        return lambda *args, average=True, **kwargs: original(*args, average=False, **kwargs)

    with replaced(expert_parallel, "apply_expert_parallel", make):
        yield


@contextmanager
def halved_gradients_of_shards() -> Iterator[None]:
    """The gradients of stages are divided by their data-parallel ranks twice."""
    from accel_backends.parallel.pipeline import shards

    def make(original: Any) -> Any:
        def reduce(units: Any) -> None:
            for unit in units:
                for entry in shards.unit_parameters(unit):
                    full = shards.full_parameter(entry)
                    full.grad = None if full.grad is None else full.grad * 0.5
            original(units)

        return reduce

    with replaced(shards, "reduce_unit_gradients", make):
        yield


@pytest.mark.parametrize(
    ("mutation", "program", "layout", "words"),
    [
        (doubled_tensor_gradient, llama, "tp:2", r"at step 0:\n  the gradient norm is"),
        (wrong_divisor_of_sequences, llama, "cp:2", r"(?s)at step 0:\n  the loss is .*the gradient norm .*1/2 of it"),
        pytest.param(
            wrong_divisor_of_sequences,
            llama,
            "sp:2",
            r"(?s)at step 0:\n  the loss is .*the gradient norm .*1/2 of it",
            marks=pytest.mark.slow,
        ),
        pytest.param(heads_of_other_ranks, llama, "sp:2", r"at step 0:\n  the loss is", marks=pytest.mark.slow),
        (router_loss_averaged_twice, balanced_mixtral, "ep:2", r"at step 0:\n  the gradient norm is"),
        pytest.param(
            doubled_gradient_of_experts, mixtral, "ep:2", r"at step 0:\n  the gradient norm is", marks=pytest.mark.slow
        ),
        (dropped_sum_of_tied_weight, tied_llama, "pp:2", r"at step 0:\n  the gradient norm is"),
        pytest.param(
            halved_gradients_of_shards,
            llama,
            "pp:2/dp_shard:2",
            r"(?s)at step 0:\n  .*the gradient norm .*1/2 of it",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.sampled(1)
def test_a_mutation_of_an_axis_is_caught_and_named(
    rank_pool: RankPool, mutation: Any, program: Any, layout: str, words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        assert_equivalent(program, [layout], precisions=["fp64"], pool=rank_pool, around=mutation)
