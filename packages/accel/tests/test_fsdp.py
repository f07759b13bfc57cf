"""Sharded models through an Accelerator: the same weights as one process, states that go anywhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, LocalSGD
from accel_backends import FullyShardedDataParallelPlugin
from accel_state import BackendError, ConfigError, ParallelismConfig
from accel_testing import RankPool
from accel_testing.equivalence.compare import assert_close_state
from accel_testing.equivalence.equivalence import assert_equivalent
from accel_testing.equivalence.models import TinyTransformer, make_model
from accel_testing.equivalence.program import Program, momentum_sgd
from accel_testing.equivalence.programs import adamw_program, sgd_program, train_part
from accel_testing.faults.memory import peak_allocated

HYBRID = "fsdp:4/dp_replicate=2/dp_shard=2"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "program"),
    [
        ("fsdp:1", sgd_program),
        ("fsdp:2/acc=3/weighted", adamw_program),
        pytest.param("fsdp:2/acc=3/short", sgd_program, marks=pytest.mark.slow),
        pytest.param("fsdp:4/fp64", adamw_program, marks=pytest.mark.slow),
        (f"{HYBRID}/fp32/acc=3", sgd_program),
        ("fsdp1:2/acc=3/weighted", adamw_program),
    ],
)
def test_sharded_training_equals_one_process(rank_pool: RankPool, layout: str, program: Callable[[], Program]) -> None:
    assert_equivalent(program, [layout], pool=rank_pool)


# -------------------------------------------------------------------------------------------------- checkpoints


CHAINS = {
    "single-fsdp-ddp-fsdp-single": ["single", "fsdp:2", "ddp:2", "fsdp:4", "single"],
    "fsdp1-fsdp-fsdp1-ddp": ["fsdp1:2", "fsdp:4", "fsdp1:4", "ddp:2"],
    "fsdp-fsdp-single": ["fsdp:4", "fsdp:2", "fsdp:1", "single"],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_run_handed_from_strategy_to_strategy_is_the_uninterrupted_run(
    rank_pool: RankPool, tmp_path: Path, chain: list[str]
) -> None:
    """Two steps in each but the last, ten there; every loss and the weights are those of one process."""
    load, losses, parts = "", [], [4 * number for number in range(len(chain))]
    end = parts[-1] + 20
    for layout, start, stop in zip(chain, parts, [*parts[1:], end], strict=True):
        save = str(tmp_path / str(start))
        state = train_part(rank_pool, f"{layout}/fp64/acc=2", start, stop, load, save)
        losses.append(state.losses)
        load = save
    expected = train_part(rank_pool, "single/fp64/acc=2", 0, end)
    torch.testing.assert_close(torch.cat(losses), expected.losses, rtol=1e-10, atol=0)
    assert_close_state(state, expected)


GRAD_OP = "/sharding_strategy=SHARD_GRAD_OP"
WINDOWS = [
    ("fsdp:2", "fsdp:2"),
    ("fsdp:2", "single"),
    ("ddp:2", "fsdp:4"),
    ("fsdp1:2", "fsdp1:2"),
    ("fsdp1:4", "single"),
    ("fsdp:2", "fsdp1:4"),
    (f"fsdp1:2{GRAD_OP}", f"fsdp1:2{GRAD_OP}"),
    ("fsdp1:2/sharding_strategy=NO_SHARD", "fsdp1:4/sharding_strategy=HYBRID_SHARD/shard_size=2"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chain", WINDOWS, ids="-".join)
def test_an_open_window_goes_on_in_another_strategy(
    rank_pool: RankPool, tmp_path: Path, chain: tuple[str, str]
) -> None:
    """A step and a half before saving, the other half after loading."""
    before, after = (f"{layout}/fp64/acc=2" for layout in chain)
    folder = str(tmp_path / "half")
    train_part(rank_pool, before, 0, 3, save=folder, optimizer=momentum_sgd)
    state = train_part(rank_pool, after, 3, 4, folder, optimizer=momentum_sgd)
    assert_close_state(state, train_part(rank_pool, "single/fp64/acc=2", 0, 4, optimizer=momentum_sgd))


@pytest.mark.parametrize("layout", ["fsdp:2", "fsdp1:2"])
def test_a_window_may_be_saved_again_after_it_was_loaded(rank_pool: RankPool, tmp_path: Path, layout: str) -> None:
    """What was reduced when it was loaded, and what has added up unreduced since."""
    load = ""
    for number in range(3):
        save = str(tmp_path / str(number))
        state = train_part(rank_pool, f"{layout}/fp64/acc=3", number, number + 1, load, save, optimizer=momentum_sgd)
        load = save
    assert_close_state(state, train_part(rank_pool, "single/fp64/acc=3", 0, 3, optimizer=momentum_sgd))


def nothing(module: nn.Module) -> None:
    """Values are loaded afterwards."""


def exported(strategy: str, folder: str) -> None:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = accelerator.prepare(make_model("transformer", seed=6))
    accelerator.save_model(model, folder, max_shard_size="6KB")
    accelerator.end_training()


def imported(strategy: str, folder: str) -> dict[str, torch.Tensor]:
    plugin = FullyShardedDataParallelPlugin(param_init_fn=nothing) if strategy == "fsdp" else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, strategy=None if plugin else strategy)
    with torch.device("meta" if plugin else "cpu"):
        model = TinyTransformer()
    model = accelerator.prepare(model)
    accelerator.load_model(model, folder)
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return state


@pytest.mark.parametrize(
    ("writer", "reader"), [(("fsdp", 2), ("fsdp", 4)), (("single", 1), ("fsdp", 2)), (("fsdp", 2), ("ddp", 2))]
)
@pytest.mark.sampled(1)
def test_weights_of_other_tools_load_into_shards(
    rank_pool: RankPool, tmp_path: Path, writer: tuple[str, int], reader: tuple[str, int]
) -> None:
    rank_pool.run(exported, writer[0], str(tmp_path), ranks=writer[1])
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    state = rank_pool.run(imported, reader[0], str(tmp_path), ranks=reader[1])[0]
    for name, value in make_model("transformer", seed=6).named_parameters():
        assert torch.equal(state[name], value), name


class Tall(nn.Module):
    """Of many equal blocks, so that a rank's part of four and one block are each a small part of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def memory_of_loading(folder: str) -> tuple[int, int]:
    """Bytes of the full model, and the most that this rank ever held while it was built, sharded and loaded."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(param_init_fn=nothing))

    def build() -> nn.Module:
        with torch.device("meta"):
            model = Tall()
        model = accelerator.prepare(model)
        accelerator.load_model(model, folder)
        return model

    models: list[nn.Module] = []
    peak = peak_allocated(lambda: models.append(build()))
    value = accelerator.get_state_dict(models[0], sharded=True)["blocks.31.0.weight"].full_tensor()
    assert torch.equal(value, value.new_full((128, 128), 31.0))
    accelerator.end_training()
    return sum(parameter.numel() * 4 for parameter in models[0].parameters()), peak


def test_no_rank_ever_holds_the_full_model(rank_pool: RankPool, tmp_path: Path) -> None:
    """A quarter of it, the same again as read from the file, and a block on its way (32 make the whole)."""
    from safetensors.torch import save_file

    values = {name: torch.full(p.shape, float(name.split(".")[1])) for name, p in Tall().named_parameters()}
    save_file(values, tmp_path / "model.safetensors")
    measured = rank_pool.run(memory_of_loading, str(tmp_path), ranks=4)
    for whole, most in measured:
        assert whole / 4 < most <= whole / 2 + 3 * whole / 32


# ------------------------------------------------------------------------------------------------------- choosing


def choose(case: str) -> tuple[str, tuple[int, int], str]:
    options: dict[str, Any] = {
        "plugin": {"fsdp_plugin": FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP")},
        "mapping": {"fsdp_plugin": {"sharding_strategy": "NO_SHARD"}},
        "strategy": {"strategy": "fsdp"},
        "configuration": {"strategy": FullyShardedDataParallelPlugin()},
        "shards": {"parallelism_config": ParallelismConfig(dp_shard_size=4)},
        "hybrid": {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)},
        "hybrid plugin": {
            "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
            "fsdp_plugin": {"sharding_strategy": "HYBRID_SHARD"},
        },
        "two": {"fsdp_plugin": {}, "strategy": "ddp"},
        "ddp": {"strategy": "ddp", "parallelism_config": ParallelismConfig(dp_shard_size=4)},
        "sizes": {"fsdp_plugin": {"shard_size": 4}, "parallelism_config": ParallelismConfig(2, 2)},
    }[case]
    accelerator = Accelerator(cpu=True, **options)
    degrees = accelerator.parallelism_config
    chosen = accelerator.choice.name, (degrees.size("dp_replicate"), degrees.size("dp_shard"))
    kind = str(accelerator.distributed_type.value)
    assert accelerator.data_shard.count == 4
    accelerator.end_training()
    return *chosen, kind


@pytest.mark.parametrize(
    ("case", "degrees"),
    [
        ("plugin", (1, 4)),
        ("mapping", (4, 1)),
        ("strategy", (1, 4)),
        ("configuration", (1, 4)),
        ("shards", (1, 4)),
        ("hybrid", (2, 2)),
        ("hybrid plugin", (2, 2)),
    ],
)
def test_plugin_strategy_or_degrees_choose_sharding(rank_pool: RankPool, case: str, degrees: tuple[int, int]) -> None:
    assert rank_pool.run(choose, case, ranks=4) == [("fsdp", degrees, "FSDP")] * 4


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("two", "strategy='ddp' and fsdp_plugin, whose strategy is 'fsdp', were both given"),
        ("ddp", "dp_shard_size=4: backend 'ddp' cannot do that; nearest: strategy='fsdp'"),
        ("sizes", "dp_shard_size=2, and the sharding options shard_size=4"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(rank_pool: RankPool, case: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rank_pool.run(choose, case, ranks=4)


@pytest.mark.ranks(2)
def test_the_environment_asks_for_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "NO_SHARD")
    accelerator = Accelerator(cpu=True)
    assert accelerator.choice.name == "fsdp"
    assert accelerator.parallelism_config.size("dp_replicate") == 2


@pytest.mark.ranks(2)
def test_full_parameters_can_be_changed_through_the_accelerator() -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model = accelerator.prepare(make_model("mlp"))
    with accelerator.full_parameters(model), torch.no_grad():
        model.first.bias.fill_(2.0)
    state = accelerator.get_state_dict(model)
    assert bool(state) == accelerator.is_main_process
    assert all(bool((value == 2.0).all()) for name, value in state.items() if name == "first.bias")
    assert accelerator.unwrap_model(model) is model


@pytest.mark.ranks(2)
def test_what_needs_a_model_on_every_rank_is_refused() -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model = accelerator.prepare(make_model("mlp"))
    with pytest.raises(BackendError, match=r"local SGD.*nearest: strategy='ddp'"), LocalSGD(accelerator, model, 2):
        pass
    with (
        pytest.raises(BackendError, match="cannot have different numbers of batches"),
        accelerator.join_uneven_inputs([model], even_batches=False),
    ):
        pass
    with accelerator.join_uneven_inputs([model]):  # batches are even
        pass


@pytest.mark.ranks(2)
def test_a_name_of_a_strategy_wins_over_the_environments_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_VERSION", "1")
    assert Accelerator(cpu=True, strategy="fsdp").choice.name == "fsdp"
