"""strategy="auto": chosen when a model is prepared, alike on all ranks, and trained with."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, ParallelismConfig
from accel_backends import BackendConfig, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accel_backends.core.config import StrategyFacts
from accel_planner import AutoStrategy, Hardware, PlanError, choose, optimizer_facts, plan_all, profile_model
from accel_planner.auto import able, completing, first_batch
from accel_state import AccelError, BackendError, ConfigError, Device, Topology
from accel_testing.equivalence.models import TinyTransformer


def model() -> nn.Module:
    torch.manual_seed(0)
    return TinyTransformer(64, 32, layers=4, heads=4)


TOKENS = torch.arange(32 * 16).view(32, 16) % 64


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def memory_for(strategy: str, ranks: int) -> int:
    """Bytes of a device with which exactly this strategy is the fastest that fits."""
    built = model()
    profile = profile_model(built, TOKENS[:8], loss=loss_of)
    facts = optimizer_facts(torch.optim.AdamW(built.parameters()), profile.parameters)
    hardware = Hardware.of_cpu(ranks, 1, 2**34)
    plans = plan_all(profile, facts, hardware, able(hardware, profile.blocks))
    (wanted,) = [plan for plan in plans if plan.candidate.name == strategy]
    assert choose(plans, wanted.peak, 0.0).plan is wanted
    return wanted.peak * ranks


def facts_of_ranks(ranks: int, device: str = "cpu") -> StrategyFacts:
    return StrategyFacts(Topology.from_env({"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}), Device(device))


def auto(**options: Any) -> AutoStrategy:
    return AutoStrategy(sample=TOKENS[:8], loss=loss_of, margin=0.0, **options)


def trained(strategy: Any, rank: int, world: int) -> tuple[Accelerator, dict[str, torch.Tensor]]:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    built = model()
    optimizer: Any = torch.optim.AdamW(built.parameters(), lr=0.01, eps=1e-3)
    prepared, optimizer = accelerator.prepare(built, optimizer)
    for step in range(3):
        accelerator.backward(loss_of(prepared, TOKENS[8 * step :][:8].chunk(world)[rank]))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, accelerator.get_state_dict(prepared)


@pytest.mark.sampled(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("fitting", "backend"),
    [("ddp", "ddp"), ("ddp+ckpt", "ddp"), ("fsdp:full_shard+ckpt", "fsdp")],
)
def test_ranks_choose_alike_and_train_as_one_would(fitting: str, backend: str, rank: int, world_size: int) -> None:
    hardware = Hardware.of_cpu(world_size, 1, memory_for(fitting, world_size))
    accelerator, state = trained(auto(hardware=hardware), rank, world_size)
    assert accelerator.choice.name == accelerator.backend.name == backend
    assert f"chose {fitting}" in str(accelerator.choice)
    assert len(set(accelerator.gather_for_metrics([str(accelerator.choice)], use_gather_object=True))) == 1
    again, expected = trained("ddp", rank, world_size)
    if rank == 0:
        assert set(state) == set(expected)
        assert all(torch.allclose(state[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)
    for one in (accelerator, again):
        one.free_memory()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_sharding_strategy_is_chosen_where_it_says_auto(recomputed: bool, rank: int, world_size: int) -> None:
    plugin = FullyShardedDataParallelPlugin(sharding_strategy="AUTO", activation_checkpointing=recomputed)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert accelerator.choice.name == "ddp"
    built = model()
    loader = DataLoader(TOKENS[:8], batch_size=8)
    prepared, *_ = accelerator.prepare(built, torch.optim.AdamW(built.parameters()), loader)
    options: Any = accelerator.backend.config
    assert accelerator.backend.name == "fsdp"
    assert options.sharding_strategy.name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    assert (options.activation_checkpointing, options.cpu_offload) == (recomputed, False)
    chosen = f"fsdp:{options.sharding_strategy.name.lower()}{'+ckpt' * recomputed}"
    assert accelerator.choice.reasons[0] == f"strategy 'auto' chose {chosen}"
    accelerator.backward(loss_of(prepared, TOKENS[:2]))
    accelerator.free_memory()


def test_the_chosen_sharding_strategy_is_the_fastest_that_fits() -> None:
    built = model()
    profile = profile_model(built, TOKENS[:8], loss=loss_of)
    facts = optimizer_facts(torch.optim.AdamW(built.parameters()), profile.parameters)
    plugin = FullyShardedDataParallelPlugin(sharding_strategy="auto")
    run = facts_of_ranks(2)
    hardware = Hardware.of_cpu(2, 1, 2**34)
    plans = plan_all(profile, facts, hardware, completing(able(hardware, profile.blocks), plugin, run))
    assert [plan.candidate.name for plan in plans] == ["fsdp:no_shard", "fsdp:shard_grad_op", "fsdp:full_shard"]
    for memory in (min(plan.peak for plan in plans), 2**34):
        chosen = choose(plans, memory, 0.0).plan
        assert chosen.peak <= memory
        assert chosen.seconds == min(plan.seconds for plan in plans if plan.peak <= memory)
        config: Any = plugin.resolve(replace(run, plan=chosen.candidate.options)).config
        assert f"fsdp:{config.sharding_strategy.name.lower()}" == chosen.candidate.name


def test_a_sharding_strategy_that_nothing_leaves_open_is_refused() -> None:
    plugin = FullyShardedDataParallelPlugin(sharding_strategy="auto")
    with pytest.raises(ConfigError, match="'auto' does not exist with degrees of parallelism; nearest: 'FULL_SHARD'"):
        Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(dp_shard_size=1))
    with pytest.raises(ConfigError, match="planner completes FSDPConfig and does not see activation_checkpointing"):
        Accelerator(cpu=True, fsdp_plugin=plugin, activation_checkpointing=True)
    with pytest.raises(BackendError, match="needs an Accelerator's prepare; nearest: FULL_SHARD"):
        plugin.of_version(2, "fsdp1")
    with pytest.raises(ConfigError, match="'auto' does not exist with XLA devices"):
        plugin.resolve(facts_of_ranks(1, "xla"))


needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


@needs_deepspeed
@pytest.mark.ranks(2)
def test_auto_may_choose_zero(rank: int, world_size: int) -> None:
    accelerator, state = trained(auto(candidates=["zero:2"]), rank, world_size)
    assert accelerator.choice.name == accelerator.backend.name == "deepspeed"
    assert accelerator.backend.config.zero_stage == 2
    _, expected = trained("ddp", rank, world_size)
    if rank == 0:
        assert all(torch.allclose(state[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)


@needs_deepspeed
@pytest.mark.ranks(2)
def test_the_stage_is_chosen_where_it_says_auto(rank: int, world_size: int) -> None:
    plugin = {"zero_stage": "auto", "offload_optimizer": False, "gradient_clipping": 1.0}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    built = model()
    loader = DataLoader(TOKENS[:8], batch_size=8)
    accelerator.prepare(built, torch.optim.AdamW(built.parameters()), loader)
    options = accelerator.deepspeed_plugin
    assert options.zero_stage in (1, 2, 3)
    assert options.offload_optimizer_device == "none"
    assert {key: origin for key, _, origin in options.explain()}["zero_optimization.stage"] == "the planner"
    assert f"chose zero:{options.zero_stage}" in str(accelerator.choice)
    accelerator.free_memory()


@needs_deepspeed
def test_a_stage_that_nothing_leaves_open_is_not_chosen() -> None:
    from accel_deepspeed import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero_stage="auto", offload_optimizer_device="none", offload_param_device="cpu")
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    with pytest.raises(ConfigError, match="leaves no choice"):
        accelerator.prepare(model(), DataLoader(TOKENS[:8], batch_size=8))


@needs_deepspeed
@pytest.mark.parametrize(("optimizer", "there"), [("AdamW", True), ("SGD", False)])
def test_offloading_is_chosen_only_for_optimizers_that_it_can_step_with(optimizer: str, there: bool) -> None:
    found = able(Hardware(devices=8), blocks=True, optimizer=optimizer)
    assert any(one.name == "zero:2+offload" for one in found) == there


class ByRows(torch.optim.SGD):
    """Of no library that the planner knows: one learning rate for each row."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is not None
                parameter.data.sub_(parameter.grad / parameter.grad.norm(dim=-1, keepdim=True), alpha=group["lr"])


@needs_deepspeed
@pytest.mark.ranks(1)
@pytest.mark.parametrize(("kind", "there"), [(torch.optim.SGD, True), (ByRows, False)])
def test_flat_pieces_are_chosen_only_for_optimizers_that_can_step_on_them(rank: int, kind: Any, there: bool) -> None:
    accelerator = Accelerator(cpu=True, strategy=auto(candidates=["zero:1"]))
    built = model()
    if there:
        accelerator.prepare(built, kind(built.parameters(), lr=0.1))
        assert accelerator.backend.name == "deepspeed"
    else:
        with pytest.raises(PlanError, match="no plan to choose from"):
            accelerator.prepare(built, kind(built.parameters(), lr=0.1))
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_nothing_fits_on_every_rank(rank: int) -> None:
    accelerator = Accelerator(cpu=True, strategy=auto(hardware=Hardware.of_cpu(2, 1, 2000)))
    with pytest.raises(AccelError, match=r"nothing fits 2 x 1000 B .* Nearest is fsdp:full_shard") as raised:
        accelerator.prepare(model())
    assert isinstance(raised.value, PlanError) == (rank == 0)


def test_until_a_model_is_prepared_the_run_has_the_backend_of_its_processes() -> None:
    accelerator = Accelerator(cpu=True, strategy="auto")
    assert accelerator.choice.name == accelerator.backend.name == "single"
    assert "until a model is prepared" in str(accelerator.choice)


def test_a_loader_of_the_same_call_says_what_a_batch_is_like() -> None:
    accelerator = Accelerator(cpu=True, strategy="auto")
    built = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    loader = DataLoader(TensorDataset(torch.randn(40, 8), torch.randint(3, (40,))), batch_size=10, shuffle=True)
    prepared, optimizer, loader = accelerator.prepare(built, torch.optim.SGD(built.parameters(), lr=0.1), loader)
    assert "chose single" in str(accelerator.choice)
    assert "not counted" not in str(accelerator.choice)
    for inputs, labels in loader:
        accelerator.backward(nn.functional.cross_entropy(prepared(inputs), labels))
        optimizer.step()


def test_looking_at_a_loader_moves_no_random_number() -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return (super().__getitem__(index)[0] + torch.rand(()),)

    before = torch.get_rng_state()
    batch = first_batch(DataLoader(Noisy(torch.zeros(5, 2)), batch_size=8), 2)
    assert batch[0].shape == (4, 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "data", [{"a": torch.zeros(2), "b": torch.zeros(2)}, {(0, 8): torch.zeros(2)}], ids=["names", "pairs"]
)
def test_a_dataset_with_keys_of_its_own_says_nothing_of_a_batch(data: Any) -> None:
    loader: Any = DataLoader(data, batch_size=2, sampler=list(data))
    assert first_batch(loader, 1) is None
    accelerator = Accelerator(cpu=True, strategy="auto")
    accelerator.prepare(nn.Linear(2, 1), loader)
    assert "not counted" in str(accelerator.choice)


def test_a_model_that_only_evaluates_decides_nothing() -> None:
    accelerator = Accelerator(cpu=True, strategy="auto")
    accelerator.prepare_model(model(), evaluation_mode=True)
    assert "until a model is prepared" in str(accelerator.choice)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hardware": "8x80GB"}, "8 devices, and there are 1"),
        ({"hardware": "80QB"}, "is no size"),
        ({"candidates": ["ddq"]}, "no candidate 'ddq'"),
    ],
)
def test_what_auto_is_told_has_to_fit(options: dict[str, Any], words: str) -> None:
    accelerator = Accelerator(cpu=True, strategy=auto(**options))
    with pytest.raises(ConfigError, match=words):
        accelerator.prepare(model())


def test_auto_looks_at_one_model() -> None:
    with pytest.raises(ConfigError, match="looks at one model, and 2 were given"):
        Accelerator(cpu=True, strategy=auto()).prepare(model(), model())


def test_auto_does_not_go_with_what_it_would_choose() -> None:
    with pytest.raises(ConfigError, match=r"chooses .* and FSDPConfig says it already|both given"):
        Accelerator(cpu=True, strategy="auto", fsdp_plugin=FullyShardedDataParallelPlugin())


def test_degrees_beside_auto_are_refused_with_what_proposes_them() -> None:
    with pytest.raises(
        ConfigError, match=r"all degrees 1\); leave one of them out .*accel plan CONFIG` proposes degrees"
    ):
        Accelerator(cpu=True, strategy="auto", parallelism_config=ParallelismConfig(tp_size=1))


def test_options_of_ddp_wait_for_ddp_to_be_chosen() -> None:
    accelerator = Accelerator(
        cpu=True, strategy=auto(), kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)]
    )
    accelerator.prepare(model())
    assert accelerator.choice.name == "single"


def test_zero_is_chosen_from_only_where_its_library_is() -> None:
    names = {candidate.backend for candidate in able(Hardware(devices=8), blocks=True)}
    assert ("deepspeed" in names) == (find_spec("deepspeed") is not None)
    assert isinstance(AutoStrategy(), BackendConfig)
