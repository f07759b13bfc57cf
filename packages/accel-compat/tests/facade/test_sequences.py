"""Sequence parallelism of DeepSpeed in scripts for Accelerate: the loop of its guide equals one process."""

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader

from accel_testing import RankPool
from accel_testing.equivalence.compare import assert_close_state

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None or find_spec("transformers") is None, reason="needs deepspeed and transformers"
)
LENGTH, SAMPLES, IGNORED = 8, 4, -100


def make_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, max_position_embeddings=64, **sizes)
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


def make_samples(start: int) -> list[dict[str, torch.Tensor]]:
    """Samples whose first positions are ``start``, and whose second halves have fewer labels than their first."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number in range(SAMPLES):
        ids = torch.randint(0, 32, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[LENGTH - 1 - number :] = IGNORED
        samples.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(LENGTH) + start})
    return samples


def train_shared(stage: int, start: int) -> dict[str, torch.Tensor]:
    from accel_compat.state.accelerator_state import SharedAcceleratorState

    try:
        return _train_shared(stage, start)
    finally:
        SharedAcceleratorState._reset_state(reset_partial_state=True)


def _train_shared(stage: int, start: int) -> dict[str, torch.Tensor]:
    from deepspeed.utils import groups

    from accel_compat.facade.accelerator import CompatAccelerator as Accelerator
    from accel_state import ParallelismConfig
    from accel_state.parallelism.axis_options import DeepSpeedSequenceParallelConfig

    accelerator = Accelerator(
        deepspeed_plugin=_plugin(stage) if "ACCELERATE_USE_DEEPSPEED" in os.environ else None,
        parallelism_config=ParallelismConfig(
            sp_size=2,
            sp_backend="deepspeed",
            sp_handler=DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"),
        ),
    )
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(make_samples(start), batch_size=1))
    assert len(loader) == SAMPLES
    group = groups._get_sequence_parallel_group()
    for batch in loader:
        assert batch["input_ids"].shape == (1, LENGTH // 2)
        labels = batch["shift_labels"]
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        counted = (labels != IGNORED).sum()
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        losses, counts = all_gather(loss, group=group), all_gather(counted, group=group)
        accelerator.backward(sum(losses) / sum(counts))
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.free_memory()
    with pytest.raises(KeyError, match="No sequence parallel group"):
        groups._get_sequence_parallel_group()
    return state


def _plugin(stage: int) -> Any:
    from accel_compat.options.deepspeed import CompatDeepSpeedPlugin

    return CompatDeepSpeedPlugin(zero_stage=stage, gradient_clipping=100.0)


def train_alone(start: int) -> dict[str, torch.Tensor]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(make_samples(start), batch_size=1):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("stage", "start"), [(2, 0), (3, 24), *(pytest.param(s, 24, marks=pytest.mark.slow) for s in (0, 1))]
)
def test_ranks_that_share_sequences_train_as_one_process(rank_pool: RankPool, stage: int, start: int) -> None:
    shared = rank_pool.run(train_shared, stage, start, ranks=2, variables={"ACCELERATE_USE_DEEPSPEED": "true"})
    assert_close_state(shared[0], train_alone(start), rtol=0, atol=1e-5)


def test_sequences_are_split_by_deepspeed_only(rank_pool: RankPool) -> None:
    with pytest.raises(ValueError, match=r"sp_size=2 needs DeepSpeed"):
        rank_pool.run(train_shared, 2, 0, ranks=2)
