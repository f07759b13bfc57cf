import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_backends import (
    Bundle,
    DDPConfig,
    FSDPConfig,
    ModelFacts,
    PipelineParallelConfig,
    SingleConfig,
    installed_backends,
    load_backend,
    select_backend,
)
from accel_backends.core.config import BackendConfig, Stated, StrategyFacts
from accel_backends.core.select import check_axes, find_backend
from accel_state import BackendError, ConfigError, Device, ParallelismConfig, Topology, TopologyError
from accel_state.parallelism.axis_options import DeepSpeedSequenceParallelConfig, ExpertParallelConfig

ONE, TWO = Topology(), Topology(rank=0, world_size=2, local_world_size=2)
CPU, XLA = Device("cpu"), Device("xla")


class Sharding(BackendConfig):
    backend = "fsdp"


@pytest.mark.parametrize(
    ("topology", "device", "config", "name", "reason"),
    [
        (ONE, CPU, None, "single", "one process"),
        (TWO, CPU, None, "ddp", "2 processes"),
        (TWO, CPU, DDPConfig(), "ddp", "DDPConfig was given"),
        (ONE, CPU, DDPConfig(), "single", "nothing to do"),
        (TWO, CPU, Sharding(), "fsdp", "Sharding was given"),
        (ONE, CPU, Sharding(), "fsdp", "Sharding was given"),
        (ONE, CPU, SingleConfig(), "single", "SingleConfig was given"),
        (TWO, CPU, "deepspeed", "deepspeed", "'deepspeed' was asked for"),
        (TWO, XLA, None, "xla", "xla"),
        (ONE, XLA, None, "xla", "xla"),
        (ONE, XLA, DDPConfig(), "xla", "nothing to do"),
    ],
)
def test_the_choice_and_its_reasons(topology, device, config, name, reason):
    choice = select_backend(topology, device, config)
    assert choice.name == name
    assert reason in str(choice)


def test_frozen_models_are_a_reason():
    assert "stay bare" in str(select_backend(TWO, CPU, None, ModelFacts(trainable=0)))


@settings(deadline=None)
@given(st.integers(1, 64))
def test_every_choice_has_a_reason_and_a_backend(world_size):
    choice = select_backend(Topology(rank=0, world_size=world_size, local_world_size=world_size), CPU)
    assert choice.reasons
    assert choice.name in installed_backends()


@pytest.mark.parametrize("name", ["single", "ddp"])
def test_backends_load_by_name(name):
    backend = load_backend(name)
    assert backend.name == name
    assert backend.Config.backend == name


def test_both_are_entry_points_too():
    from importlib.metadata import entry_points

    points = {point.name: point for point in entry_points(group="accel.backends")}
    assert all(points[name].load() is load_backend(name) for name in ("single", "ddp"))


def test_an_unknown_backend_lists_the_installed_and_the_nearest():
    with pytest.raises(BackendError, match=r"no backend 'dpp'; installed: .*ddp.*did you mean 'ddp'"):
        load_backend("dpp")


def test_a_bundle_says_which_models_are_placed():
    from accel_state import PrepareError

    assert Bundle([]).placed == ()
    with pytest.raises(PrepareError, match="place has 1 entries for 0 models"):
        Bundle([], place=(True,))


OWN_BACKEND = """
from typing import ClassVar
from accel_backends import Backend, BackendConfig

class Config(BackendConfig):
    backend: ClassVar[str] = "{name}"
    axes: ClassVar[frozenset[str]] = frozenset({axes})
    precedence: ClassVar[int | None] = {precedence}

class Own(Backend):
    name: ClassVar[str] = "{name}"
    Config: ClassVar[type[BackendConfig]] = Config
    def prepare_model(self, model):
        return model
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a distribution with one backend, for axes and with a precedence, beside pipelines of no other axis."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(PipelineParallelConfig, "axes", frozenset({"pp"}))

    def _install(name, axes, precedence=100):
        monkeypatch.delitem(sys.modules, f"module_of_{name}", raising=False)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[accel.backends]\n{name} = module_of_{name}:Own\n")
        (tmp_path / f"module_of_{name}.py").write_text(
            OWN_BACKEND.format(name=name, axes=sorted(axes), precedence=precedence)
        )

    return _install


def test_an_installed_backend_is_found_by_the_axes_that_it_serves(install):
    install("rows", {"sp", "pp"})
    choice = select_backend(TWO, CPU, axes=["pp", "sp"])
    assert (choice.name, choice.reasons) == ("rows", ("it serves the axes pp, sp",))
    assert find_backend(["pp", "sp"]) == "rows"
    assert find_backend(["pp", "sp", "dp_shard"]) is None
    assert select_backend(TWO, CPU, axes=["pp", "sp", "dp_shard"]).name == "ddp"


def test_a_backend_of_accel_comes_before_an_installed_one(install):
    install("rows", {"dp_shard"}, precedence=0)
    assert select_backend(TWO, CPU, axes=["dp_shard"]).name == "fsdp"


def test_installed_backends_have_a_declared_order(install):
    install("first", {"pp", "sp"}, precedence=10)
    install("later", {"pp", "sp"})
    install("named", {"pp", "sp"}, precedence=None)
    assert find_backend(["pp", "sp"]) == "first"


def test_a_tie_is_refused_with_a_name_that_decides(install):
    install("left", {"pp", "sp"})
    install("right", {"pp", "sp"})
    with pytest.raises(ConfigError, match=r"pp and sp: backends 'left', 'right' serve that alike; nearest: .*'left'"):
        find_backend(["pp", "sp"])


def test_a_backend_that_has_to_be_named_is_only_the_nearest(install):
    install("ring", {"pp", "sp"}, precedence=None)
    assert find_backend(["pp", "sp"]) is None
    with pytest.raises(ConfigError, match=r"pp_size=2, sp_size=2: .* cannot do that; nearest: strategy='ring'"):
        check_axes("single", SingleConfig(), ParallelismConfig(pp_size=2, sp_size=2))


@pytest.mark.parametrize("options", [BackendConfig(), FSDPConfig(fsdp_version=1)])
def test_a_capacity_that_a_backend_does_not_apply_to_undivided_experts_is_refused(options):
    bounded = ParallelismConfig(ep_handler=ExpertParallelConfig(1.25))
    with pytest.raises(ConfigError, match=r"capacity_factor=1\.25.* with ep_size=1: backend 'it' .*nearest"):
        check_axes("it", options, bounded)
    for able in (SingleConfig(), DDPConfig(), FSDPConfig()):
        check_axes("it", able, bounded)


def test_a_backend_that_cannot_be_imported_serves_nothing(install, tmp_path):
    install("torn", {"pp", "sp"})
    (tmp_path / "module_of_torn.py").write_text("import a_module_that_is_missing\n")
    assert find_backend(["pp", "sp"]) is None


def test_sharding_serves_tensor_context_and_sequence_parallelism():
    assert find_backend(["tp"]) == find_backend(["cp", "dp_shard", "tp"]) == "fsdp"
    assert find_backend(["ep", "tp"]) == find_backend(["dp_shard", "ep", "sp", "tp"]) == "fsdp"
    assert find_backend(["sp"]) == find_backend(["dp_replicate", "dp_shard", "sp", "tp"]) == "fsdp"
    assert find_backend(["cp", "pp"]) == find_backend(["dp_shard", "ep", "pp", "sp", "tp"]) == "pipeline"
    four = Topology.on_one_node(0, 4)
    found = FSDPConfig().resolve(StrategyFacts(four, CPU, ParallelismConfig(tp_size=2, dp_shard_size=2)))
    assert (found.config.shard_size, found.parallelism.size("tp"), found.parallelism.data_parallel_size) == (2, 2, 2)


@pytest.mark.parametrize(
    ("options", "degrees", "message"),
    [
        ({"fsdp_version": 1}, {"tp_size": 2}, "tp_size=2: fsdp_version=1 flattens parameters"),
        ({"fsdp_version": 1}, {"ep_size": 2, "tp_size": 2}, "ep_size=2, tp_size=2: fsdp_version=1 flattens parameters"),
        ({"cpu_ram_efficient_loading": True}, {"cp_size": 2}, "cp_size=2 with cpu_ram_efficient_loading=True"),
        ({"fsdp_version": 1}, {"sp_size": 2}, "sp_size=2: fsdp_version=1 flattens parameters"),
        (
            {},
            {"sp_size": 2, "sp_handler": DeepSpeedSequenceParallelConfig(sp_attn_implementation="flash_attention_2")},
            "sp_size=2 with sp_attn_implementation='flash_attention_2': .*nearest: 'sdpa', or strategy='deepspeed'",
        ),
    ],
)
def test_options_that_exclude_an_axis_are_refused(options, degrees, message):
    with pytest.raises(ConfigError, match=message):
        FSDPConfig(**options).resolve(StrategyFacts(TWO, CPU, ParallelismConfig(**degrees)))


def test_degrees_that_do_not_multiply_to_the_ranks_are_refused_with_those_that_do():
    with pytest.raises(TopologyError, match=r"tp=2.* must be 4, as with dp_shard_size=2"):
        FSDPConfig().resolve(StrategyFacts(Topology.on_one_node(0, 4), CPU, ParallelismConfig(tp_size=2)))
    with pytest.raises(TopologyError, match=r"sp=2.* must be 4, as with dp_shard_size=2"):
        FSDPConfig().resolve(StrategyFacts(Topology.on_one_node(0, 4), CPU, ParallelismConfig(sp_size=2)))


def test_options_of_sharding_have_the_degrees_of_the_run():
    facts = StrategyFacts(TWO, CPU, ParallelismConfig(dp_shard_size=2), frozenset())
    given = FSDPConfig(activation_checkpointing=True)
    found = given.resolve(facts)
    assert (found.config.shard_size, found.config.replicate_size) == (2, 1)
    assert found.config.activation_checkpointing
    assert (given.shard_size, found.parallelism) == (None, ParallelismConfig(dp_shard_size=2))


def test_on_xla_devices_options_of_sharding_become_those_of_its_backend():
    found = FSDPConfig(sharding_strategy="NO_SHARD").resolve(StrategyFacts(ONE, XLA))
    assert (found.config.backend, found.config.shard_parameters) == ("xla", False)
    assert found.reasons == ("FSDPConfig means XLAConfig on xla",)
    with pytest.raises(ConfigError, match="cpu_offload=True does not exist on XLA devices"):
        FSDPConfig(cpu_offload=True).resolve(StrategyFacts(ONE, XLA))


def test_options_without_an_open_value_leave_the_planner_nothing():
    with pytest.raises(ConfigError, match="DDPConfig leaves the planner nothing to choose"):
        DDPConfig().resolve(StrategyFacts(TWO, CPU, plan={}))


def test_a_loss_of_samples_is_refused_where_ranks_see_shards_of_them():
    config = PipelineParallelConfig(loss_fn=lambda outputs, batch: outputs.logits.mean())
    facts = StrategyFacts(Topology.on_one_node(0, 4), CPU, ParallelismConfig(pp_size=2, cp_size=2))
    with pytest.raises(ConfigError, match=r"loss_fn with cp_size=2: .* the tokens of one rank.*; nearest: pass labels"):
        config.resolve(facts)


def test_settings_that_differ_from_implied_ones_are_refused_with_both_origins():
    facts = StrategyFacts(TWO, CPU, given={"seed": Stated(1, "env SEED")})
    facts.agree({"seed": Stated(1, "elsewhere"), "other": Stated(2, "elsewhere")})
    with pytest.raises(ConfigError, match=r"seed is 1 \(env SEED\), and a plugin says 2; make them agree"):
        facts.agree({"seed": Stated(2, "a plugin")})


def test_a_run_has_one_set_of_options_of_most_backends():
    with pytest.raises(ConfigError, match="DDPConfig by name: a, b; a run of 'ddp' has one of them"):
        DDPConfig.several({"a": {}, "b": {}})
