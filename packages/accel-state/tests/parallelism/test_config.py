"""Degrees of parallelism, the mesh they make, and who reads which samples."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state import (
    ConfigError,
    DataShard,
    DeepSpeedSequenceParallelConfig,
    ExpertParallelConfig,
    ParallelismConfig,
    Topology,
    TopologyError,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)

sizes = st.sampled_from([1, 1, 2, 3])


@st.composite
def configs(draw):
    chosen = {f"{axis}_size": draw(sizes) for axis in ("pp", "dp_replicate", "dp_shard", "ep", "cp", "sp", "tp")}
    if chosen["cp_size"] > 1:
        chosen["sp_size"] = 1
    if chosen["tp_size"] > 1 or chosen["cp_size"] > 1:
        chosen["dp_shard_size"] = max(chosen["dp_shard_size"], 2)
    return ParallelismConfig(**chosen)


@pytest.mark.parametrize(
    ("replicate", "shard", "tp", "cp", "names", "shape"),
    [
        (8, 1, 1, 1, ("dp_replicate",), (8,)),
        (1, 8, 1, 1, ("dp_shard",), (8,)),
        (2, 4, 1, 1, ("dp_replicate", "dp_shard"), (2, 4)),
        (1, 4, 2, 1, ("dp_shard", "tp"), (4, 2)),
        (2, 2, 2, 1, ("dp_replicate", "dp_shard", "tp"), (2, 2, 2)),
        (1, 1, 8, 1, ("tp",), (8,)),
        (1, 1, 1, 4, ("cp",), (4,)),
        (1, 4, 1, 2, ("dp_shard", "cp"), (4, 2)),
        (1, 2, 2, 2, ("dp_shard", "cp", "tp"), (2, 2, 2)),
        (2, 2, 2, 2, ("dp_replicate", "dp_shard", "cp", "tp"), (2, 2, 2, 2)),
    ],
)
def test_mesh_has_one_axis_per_degree_above_one(replicate, shard, tp, cp, names, shape):
    config = ParallelismConfig(dp_replicate_size=replicate, dp_shard_size=shard, tp_size=tp, cp_size=cp)
    assert config._get_mesh() == (names, shape)
    assert config.active_mesh_dims == list(names)


@given(configs())
def test_peers_of_one_sample_share_a_shard_and_all_shards_are_read(config):
    shards = [config.data_shard(Topology.on_one_node(rank, config.total_size)) for rank in range(config.total_size)]
    assert {shard.index for shard in shards} == set(range(config.data_parallel_size))
    groups = {}
    for rank, shard in enumerate(shards):
        place = config.coordinates(rank)
        groups.setdefault((place["dp_replicate"], place["dp_shard"], place["ep"]), []).append(shard)
    assert all(len(peers) == config.non_data_parallel_size and len(set(peers)) == 1 for peers in groups.values())


@given(configs())
def test_coordinates_count_like_the_mesh(config):
    names, shape = config._get_mesh()
    for rank in range(config.total_size):
        place, flat = config.coordinates(rank), 0
        for name, size in zip(names, shape, strict=True):
            flat = flat * size + place[name]
        assert flat == rank


@given(configs())
def test_json_comes_back_as_the_same_config(config):
    assert ParallelismConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_no_degrees_means_that_all_processes_replicate():
    config = ParallelismConfig().fitted(4)
    assert config.dp_replicate_size == 4
    assert ParallelismConfig().data_shard(Topology.on_one_node(3, 4)) == DataShard(3, 4)


def test_deepspeed_sequence_parallelism_leaves_the_rest_to_replicate():
    config = ParallelismConfig(sp_size=2)
    assert [config.data_shard(Topology.on_one_node(rank, 4)).index for rank in range(4)] == [0, 0, 1, 1]
    assert config.build_device_mesh("cpu") is None


def test_expert_parallel_ranks_read_different_samples():
    config = ParallelismConfig(ep_size=2, dp_shard_size=2, dp_replicate_size=2)
    assert [config.data_shard(Topology.on_one_node(rank, 8)).index for rank in range(8)] == list(range(8))
    assert config.dp_dim_names == ["dp_replicate", "dp_shard", "ep"]
    assert config._get_mesh() == (("dp_replicate", "dp_shard", "ep"), (2, 2, 2))
    assert (config.ep_enabled, config.non_dp_dim_names) == (True, [])


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "ep", "tp", "cp", "sp", "pp"])
def test_a_product_that_does_not_match_is_refused_with_one_that_does(axis):
    config = ParallelismConfig(**{f"{axis}_size": 2})
    words = f"{axis}=2.* needs 2 processes, which does not match num_processes=3; .* be 3, as with {axis}_size=3$"
    with pytest.raises(TopologyError, match=words):
        config.data_shard(Topology.on_one_node(0, 3))


@pytest.mark.parametrize(
    ("degrees", "processes", "nearest"),
    [
        ({"tp_size": 2, "cp_size": 2}, 8, "dp_shard_size=2"),
        ({"tp_size": 2, "dp_shard_size": 2}, 8, "dp_shard_size=4"),
        ({"tp_size": 4}, 2, "tp_size=2"),
        ({"pp_size": 2, "dp_shard_size": 3}, 4, "dp_shard_size=2"),
        ({"tp_size": 2, "pp_size": 3}, 8, "pp_size=4"),
        ({"tp_size": 2, "pp_size": 2}, 5, "num_processes=4 or num_processes=8"),
        ({"tp_size": 4, "pp_size": 2}, 3, "num_processes=8"),
    ],
)
def test_the_nearest_degrees_are_named(degrees, processes, nearest):
    with pytest.raises(TopologyError, match=f"must be {processes}, as with {nearest}$"):
        ParallelismConfig(**degrees).fitted(processes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp_size": 0}, "tp_size=0"),
        ({"pp_size": -1}, "pp_size=-1"),
        ({"cp_size": 1.5}, "cp_size=1.5"),
        ({"dp_shard_size": True}, "dp_shard_size=True"),
        ({"cp_size": 2, "sp_size": 2}, "mutually exclusive"),
        ({"tp_handler": TorchContextParallelConfig()}, "tp_handler must be a TorchTensorParallelConfig"),
    ],
)
def test_impossible_degrees_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        ParallelismConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"enable_async_tp": True}, "expected False"), ({"plan": "auto"}, "plan='auto'; expected 'derive', 'model'")],
)
def test_options_of_tensor_parallelism_without_effect_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        TorchTensorParallelConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "tp_size=1 of TorchTensorParallelPlugin; expected a whole number above 1"),
        ({"tp_size": 2.0}, "tp_size=2.0 of"),
        ({"tp_size": True}, "tp_size=True of"),
        ({"tp_size": 2, "torch_device_mesh": "mesh"}, r"torch_device_mesh='mesh': .*nearest: .*\(tp_size=2\) without"),
    ],
)
def test_a_plugin_without_a_degree_or_with_a_mesh_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        TorchTensorParallelPlugin(**values)


@pytest.mark.parametrize("factor", [0, -1.0, float("inf"), float("nan"), True, "1.25"])
def test_a_capacity_that_is_no_positive_number_is_refused(factor):
    with pytest.raises(ConfigError, match=r"capacity_factor=.*expected a number above 0 such as 1.25"):
        ExpertParallelConfig(capacity_factor=factor)


def test_a_capacity_is_written_and_read():
    assert ParallelismConfig(ep_size=2).ep_handler == ExpertParallelConfig()
    config = ParallelismConfig(ep_size=2, ep_handler=ExpertParallelConfig(1.25))
    assert ParallelismConfig.from_json(config.to_json()) == config
    alone = ParallelismConfig(ep_handler=ExpertParallelConfig(1.25))
    assert ParallelismConfig.from_json(alone.to_json()) == alone.served_by("fsdp") == alone


def test_the_backend_that_serves_an_axis_is_noted_unless_another_was_given():
    assert ParallelismConfig(sp_size=2).served_by("ring").sp_backend == "ring"
    assert ParallelismConfig(cp_size=2, cp_backend="ring").served_by("ring").cp_backend == "ring"
    plain = ParallelismConfig(tp_size=2, sp_backend="nope")
    assert plain.served_by("ring") is plain
    with pytest.raises(ConfigError, match=r"sp_backend='nope', and .* serves sp_size=2 is 'ring'.*strategy='nope'"):
        ParallelismConfig(sp_size=2, sp_backend="nope").served_by("ring")


def test_only_deepspeeds_sequence_parallelism_builds_its_own_groups():
    assert ParallelismConfig(sp_size=2).fitted(4).dp_replicate_size == 2
    with pytest.raises(TopologyError, match="sp=2"):
        ParallelismConfig(sp_size=2).served_by("ring").fitted(4)
    config = ParallelismConfig(sp_size=2, dp_shard_size=2)
    assert config.dp_shard_cp_dim_names == config.dp_cp_dim_names == ["dp_shard"]
    served = config.served_by("ring")
    assert served.dp_shard_cp_dim_names == served.dp_cp_dim_names == ["dp_shard", "sp"]


def test_sizes_come_from_the_environment_when_not_given(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    assert ParallelismConfig().tp_size == 4
    assert ParallelismConfig(tp_size=2).tp_size == 2
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "many")
    with pytest.raises(ConfigError, match="PARALLELISM_CONFIG_TP_SIZE='many'"):
        ParallelismConfig()


def test_used_axes_get_their_default_options():
    config = ParallelismConfig(tp_size=2, dp_shard_size=2)
    assert config.tp_handler == TorchTensorParallelConfig()
    assert config.cp_handler is None


def test_names_of_groups_of_axes():
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2, tp_size=2, pp_size=2)
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == ["pp", "cp", "tp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (32, 4, 8)
    assert ParallelismConfig(dp_shard_size=2).fsdp_dim_names == ["dp_shard_cp"]


def test_the_mesh_is_asked_for_by_type_and_kept():
    config = ParallelismConfig()
    with pytest.raises(ConfigError, match="name a device_type"):
        config.get_device_mesh()
    assert config.get_device_mesh("cpu") is None
    assert config.get_device_mesh() is None
    with pytest.raises(ConfigError, match="built for 'cpu'"):
        config.get_device_mesh("cuda")


@pytest.mark.parametrize("document", [{"tp_sise": 2}, {"whatever": 1}])
def test_unknown_json_keys_are_named(document):
    with pytest.raises(ConfigError, match=next(iter(document))):
        ParallelismConfig.from_json(document)


def test_options_read_their_variables(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    assert TorchContextParallelConfig().cp_comm_strategy == "alltoall"
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "128")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", "false")
    options = DeepSpeedSequenceParallelConfig()
    assert (options.sp_seq_length, options.sp_seq_length_is_variable) == (128, False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TorchContextParallelConfig("ring"), "^Invalid cp_comm_strategy: ring"),
        (lambda: DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager"), "Invalid sp_attn_implementation"),
        (lambda: DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False), "sp_seq_length is needed"),
        (lambda: DataShard(2, 2), "index=2"),
    ],
)
def test_wrong_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "kernels-community/flash-attn3"])
def test_flash_attention_by_any_of_its_names_is_taken(name):
    assert DeepSpeedSequenceParallelConfig(sp_attn_implementation=name).sp_attn_implementation == name


@pytest.mark.ranks(4)
def test_the_mesh_of_four_processes_has_its_flattened_parts(rank):
    config = ParallelismConfig(dp_shard_size=2, tp_size=2)
    mesh = config.get_device_mesh("cpu")
    assert mesh is config.get_device_mesh()
    assert mesh.mesh_dim_names == ("dp_shard", "tp")
    place = config.coordinates(rank)
    assert list(mesh.get_coordinate()) == [place["dp_shard"], place["tp"]]
    shard = config.data_shard(Topology.on_one_node(rank, 4))
    assert mesh["dp"].get_local_rank() == shard.index
    assert mesh["dp_shard_cp"].size() == 2
    assert mesh["dp_cp"].size() == 2
    assert mesh["tp"].get_local_rank() == place["tp"]
