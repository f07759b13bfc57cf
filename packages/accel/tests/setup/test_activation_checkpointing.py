"""``activation_checkpointing`` of an Accelerator: one switch, the same steps with every strategy."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from accel import Accelerator, ActivationCheckpointing, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accel_state import ConfigError, ParallelismConfig
from accel_testing.equivalence.causal_lms import VOCABULARY, tiny_llama, with_exact_loss

# Options of each strategy, and the difference that a second sum over the same gradients may make.
STRATEGIES: Mapping[str, tuple[dict[str, Any], float]] = {
    "ddp": ({"strategy": "ddp"}, 1e-12),
    "fsdp": ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}, 1e-12),
    "fsdp1": ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)}, 1e-12),
    "zero1": ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=1)}, 1e-6),
    "zero2": ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)}, 1e-6),
    "zero3": ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3)}, 1e-6),
    "tp": ({"parallelism_config": ParallelismConfig(tp_size=2)}, 1e-12),
    "cp": ({"parallelism_config": ParallelismConfig(cp_size=2)}, 1e-12),
    "sp": ({"parallelism_config": ParallelismConfig(sp_size=2)}, 1e-12),
    "pp": ({"parallelism_config": ParallelismConfig(pp_size=2)}, 1e-12),
}


def train(name: str, asked: bool | ActivationCheckpointing | None) -> tuple[dict[str, torch.Tensor], int]:
    """Two steps of two micro-batches; returns the full weights, and how often this rank ran a block forward."""
    options, _ = STRATEGIES[name]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, activation_checkpointing=asked, **options)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = with_exact_loss(tiny_llama(**heads, use_cache=name not in ("pp", "cp", "sp")))
    model = model if name.startswith("zero") else model.double()
    calls = []
    for block in model.model.layers:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(1) if torch.is_grad_enabled() else None)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(accelerator.data_shard.index)
    for _ in range(4):
        tokens = torch.randint(0, VOCABULARY, (2, 16), generator=generator)
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
    state = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    accelerator.free_memory()
    return state, len(calls)


def check_recomputed(rank: int, name: str, asked: bool | ActivationCheckpointing) -> None:
    """Compares the weights with those of a run that recomputes nothing, and the forwards of blocks."""
    plain, once = train(name, None)
    found, twice = train(name, asked)
    # A pipeline finds the shapes of activations by one micro-batch more, whose backward ends before the first stage.
    assert twice == 2 * once - (name == "pp" and rank == 0) > 0
    assert found.keys() == plain.keys()
    for key, value in plain.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=STRATEGIES[name][1])


def strategies(*few: str) -> pytest.MarkDecorator:
    """All strategies, of which the default suite has a few."""
    others = [pytest.param(one, marks=pytest.mark.slow) for one in STRATEGIES if one not in few]
    return pytest.mark.parametrize("name", [*few, *others])


@pytest.mark.ranks(2)
@strategies("ddp", "fsdp", "zero3", "pp")
@pytest.mark.sampled(1)
def test_blocks_are_recomputed_and_the_weights_are_the_same(rank: int, name: str) -> None:
    check_recomputed(rank, name, True)


@pytest.mark.ranks(2)
@strategies("zero3", "pp")
def test_blocks_keep_what_a_policy_chooses_and_the_weights_are_the_same(rank: int, name: str) -> None:
    kept = []

    def policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        if operation not in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            return CheckpointPolicy.PREFER_RECOMPUTE
        kept.append(operation)
        return CheckpointPolicy.MUST_SAVE

    check_recomputed(rank, name, ActivationCheckpointing(save=policy))
    assert kept


def test_the_launch_setting_holds_unless_the_call_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_ACTIVATION_CHECKPOINTING", "true")
    assert Accelerator(cpu=True).backend.run.activation_checkpointing == ActivationCheckpointing()
    assert Accelerator(cpu=True, activation_checkpointing=False).backend.run.activation_checkpointing is None
    own = ActivationCheckpointing(save="matmuls")
    assert Accelerator(cpu=True, activation_checkpointing=own).backend.run.activation_checkpointing is own


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpointing is \['Block'\]; expected True, False"):
        Accelerator(cpu=True, activation_checkpointing=["Block"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="activation_checkpointing"):
        Accelerator(cpu=True, activation_checkpointing="full")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="strategy 'auto' chooses activation checkpointing itself"):
        Accelerator(cpu=True, strategy="auto", activation_checkpointing=True)
