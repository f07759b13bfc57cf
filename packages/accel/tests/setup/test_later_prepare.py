"""Optimizers and schedulers that are prepared in a call after the model's, with every strategy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accel_state import ParallelismConfig, PrepareError
from accel_testing.equivalence.causal_lms import VOCABULARY, tiny_llama, tiny_mixtral, with_exact_loss
from accel_testing.equivalence.compare import assert_close_state

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
    "fsdp1": {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)},
    "tp": {"parallelism_config": ParallelismConfig(tp_size=2)},
    "cp": {"parallelism_config": ParallelismConfig(cp_size=2)},
    "sp": {"parallelism_config": ParallelismConfig(sp_size=2)},
    "ep": {"parallelism_config": ParallelismConfig(ep_size=2)},
    "pp": {"parallelism_config": ParallelismConfig(pp_size=2)},
}
# Those of the default suite.
FEW = ("fsdp", "pp")
CASES = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name not in FEW)]


def model_for(name: str) -> Any:
    make = tiny_mixtral if name == "ep" else tiny_llama
    return with_exact_loss(make(num_key_value_heads=2, use_cache=False)).double()


def made(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    """An optimizer of two groups, and its scheduler."""
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-3)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def train(name: str, when: str) -> tuple[dict[str, torch.Tensor], float, set[str]]:
    """Two steps of two micro-batches; returns the weights, the learning rate and the names in the saved groups."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **STRATEGIES.get(name, {}))
    model = model_for(name)
    if when == "with the model":
        model, optimizer, scheduler = accelerator.prepare(model, *made(model))
    elif when == "built before":
        optimizer, scheduler = made(model)
        model = accelerator.prepare(model)
        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    elif when == "built after":
        model = accelerator.prepare(model)
        optimizer, scheduler = accelerator.prepare(*made(model))
    else:
        optimizer, scheduler = made(model)
        model, optimizer = accelerator.prepare(model, optimizer)
        scheduler = accelerator.prepare(scheduler)
    generator = torch.Generator().manual_seed(accelerator.data_shard.index)
    for _ in range(4):
        tokens = torch.randint(0, VOCABULARY, (2, 16), generator=generator)
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    state = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
    rate = optimizer.param_groups[0]["lr"]
    groups = accelerator.backend.states.optimizer(optimizer.optimizer, [model])["param_groups"]
    accelerator.end_training()
    accelerator.free_memory()
    return state, rate, {one for group in groups for one in group["params"]}


def one_group(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


LATER = ("built before", "built after", "the scheduler alone")


def check_same(name: str) -> None:
    state, rate, names = train(name, "with the model")
    assert rate == 0.01 * 0.5**2
    # Which parameters a group has, is another question if a rank builds it of its own stages.
    for when in LATER if name != "pp" else ("built before", "the scheduler alone"):
        found, its_rate, its_names = train(name, when)
        assert (its_rate, its_names) == (rate, names), when
        assert_close_state(found, state, rtol=0, atol=0)


def test_one_device_trains_as_in_one_call() -> None:
    check_same("single")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_in_one_call(rank: int, name: str) -> None:
    check_same(name)


@pytest.mark.ranks(2)
def test_an_optimizer_of_prepared_stages_saves_and_loads_those_of_all(rank: int, tmp_path: Path) -> None:
    found = []
    for later in (False, True):
        accelerator = Accelerator(cpu=True, **STRATEGIES["pp"])
        model = model_for("pp")
        if later:
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(one_group(model))
            accelerator.load_state(tmp_path)
        else:
            model, optimizer = accelerator.prepare(model, one_group(model))
            tokens = torch.arange(32).view(2, 16)
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            accelerator.save_state(tmp_path)
        states = accelerator.backend.states
        found.append(states.full_optimizer(optimizer.optimizer, [model], main_only=False))
        accelerator.end_training()
        accelerator.free_memory()
    saved, loaded = found
    assert {*loaded["param_groups"][0]["params"]} == {*saved["param_groups"][0]["params"]} == saved["state"].keys()
    for name, values in saved["state"].items():
        assert_close_state(loaded["state"][name], values, rtol=0, atol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "optimizer", "words"),
    [
        ("fsdp", torch.optim.Adafactor, "Adafactor cannot step on shards|Adafactor looks at full parameters"),
        ("pp", torch.optim.LBFGS, "LBFGS computes its steps from all parameters"),
    ],
)
def test_an_optimizer_that_cannot_step_is_refused_in_a_later_call(
    rank: int, name: str, optimizer: Any, words: str
) -> None:
    accelerator = Accelerator(cpu=True, **STRATEGIES[name])
    model = accelerator.prepare(model_for(name))
    with pytest.raises(PrepareError, match=words):
        accelerator.prepare(optimizer(model.parameters()))


@pytest.mark.ranks(2)
def test_an_optimizer_of_another_model_is_refused_in_a_later_call(rank: int) -> None:
    accelerator = Accelerator(cpu=True, **STRATEGIES["pp"])
    models = [accelerator.prepare(model_for("pp")) for _ in range(2)]
    both = torch.optim.SGD([one for model in models for one in model.parameters()], lr=0.1)
    with pytest.raises(PrepareError, match="SGD updates parameters of several models"):
        accelerator.prepare(both)
    with pytest.raises(PrepareError, match="SGD updates parameters of no prepared model"):
        accelerator.prepare(torch.optim.SGD(model_for("pp").parameters(), lr=0.1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_needs_its_optimizer_at_once(rank: int, stage: int) -> None:
    pytest.importorskip("deepspeed")
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
    own = tiny_llama()
    accelerator.prepare(own)
    with pytest.raises(PrepareError, match=r"an engine is made of both: prepare\(model, optimizer\)"):
        accelerator.prepare(torch.optim.AdamW(own.parameters()))
