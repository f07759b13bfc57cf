"""Facts of device types, and which device a process gets."""

import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from accel_state import DEVICE_KINDS, ConfigError, Device, SessionError, Topology, TopologyError, count_devices
from accel_state.device.device import _index_for

HERE = Topology()


@pytest.mark.parametrize(
    "env",
    [{"ACCELERATE_USE_CPU": "true"}, {"ACCEL_USE_CPU": "1"}, {"ACCEL_TORCH_DEVICE": "cpu"}],
    ids=lambda env: next(iter(env)),
)
def test_the_cpu_can_be_asked_for_by_variable(env):
    assert Device.choose(HERE, env=env) == Device("cpu")


def test_the_cpu_can_be_asked_for_by_argument():
    assert Device.choose(Topology.on_one_node(3, 4), cpu=True, env={}) == Device("cpu")


@pytest.mark.parametrize(
    ("name", "value", "device"),
    [
        ("ACCELERATE_TORCH_DEVICE", "cuda:64", Device("cuda", 64)),
        ("ACCEL_TORCH_DEVICE", "cuda", Device("cuda", 1)),
        ("ACCEL_TORCH_DEVICE", "mps", Device("mps")),
    ],
)
def test_a_device_named_by_variable_is_taken_literally(name, value, device):
    assert Device.choose(Topology.on_one_node(1, 2), env={name: value}) == device


@pytest.mark.parametrize(
    ("asked", "index"), [("cuda", 1), ("cuda:0", 0), (torch.device("cuda"), 1), (Device("cuda", 5), 5)]
)
def test_a_device_asked_for_without_index_is_the_one_of_this_process(asked, index):
    chosen = Device.choose(Topology.on_one_node(1, 2), asked=asked, env={"ACCEL_TORCH_DEVICE": "cpu"})
    assert chosen == Device("cuda", index)


@pytest.mark.parametrize("type_", [kind.type for kind in DEVICE_KINDS.values() if kind.plugin])
def test_a_missing_plugin_is_named(type_):
    plugin = str(DEVICE_KINDS[type_].plugin)
    if find_spec(plugin.partition(".")[0]) or count_devices(type_):
        pytest.skip(f"this machine has {type_} or its plugin")
    with pytest.raises(ConfigError, match=plugin):
        Device(type_).load_collectives()


def test_our_own_variable_comes_before_accelerates():
    assert Device.choose(HERE, env={"ACCELERATE_TORCH_DEVICE": "mps", "ACCEL_TORCH_DEVICE": "cpu"}) == Device("cpu")


@pytest.mark.parametrize("text", ["gpu", "cuda:x", "", "cuda:-1"])
def test_devices_that_do_not_exist_are_refused(text):
    with pytest.raises(ConfigError):
        Device.parse(text)


@pytest.mark.parametrize("given", ["cuda:2", torch.device("cuda", 2), Device("cuda", 2)])
def test_any_form_of_a_device_is_read(given):
    assert Device.parse(given) == Device("cuda", 2)


@pytest.mark.parametrize("type_", DEVICE_KINDS)
def test_every_type_can_be_counted_without_its_plugin(type_):
    if type_ == "xla" and find_spec("torch_xla"):
        pytest.skip("torch_xla is here, and changes the environment when it is imported")
    assert count_devices(type_) >= 0


@pytest.mark.parametrize(
    ("type_", "backend"),
    [
        ("cpu", "gloo"),
        ("cuda", "cpu:gloo,cuda:nccl"),
        ("xpu", "cpu:gloo,xpu:xccl"),
        ("npu", "cpu:gloo,npu:hccl"),
        ("hpu", "cpu:gloo,hpu:hccl"),
        ("mlu", "cpu:gloo,mlu:cncl"),
        ("musa", "cpu:gloo,musa:mccl"),
        ("mps", "gloo"),
        ("xla", "gloo"),
    ],
)
def test_host_tensors_have_a_backend_beside_device_tensors(type_, backend):
    assert Device(type_).collective_backend == backend


@pytest.mark.parametrize("local_rank", range(4))
def test_process_i_gets_device_i(local_rank):
    topology = Topology.on_one_node(local_rank, 4, launcher="torchrun")
    assert _index_for(topology, DEVICE_KINDS["cuda"], count=4, env={}) == local_rank


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_more_processes_than_devices_are_refused(launcher):
    topology = Topology.on_one_node(0, 4, launcher=launcher)
    with pytest.raises(TopologyError, match=r"4 processes on this node but 2 cuda device.*cpu=True"):
        _index_for(topology, DEVICE_KINDS["cuda"], count=2, env={})


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_a_scheduler_that_shows_each_task_its_own_device_is_understood(name, monkeypatch):
    topology = Topology.on_one_node(3, 4, launcher="slurm")
    assert _index_for(topology, DEVICE_KINDS["cuda"], count=1, env={name: "3"}) == 0
    monkeypatch.setattr("accel_state.device.device.count_devices", lambda type_: 1)
    assert Device.choose(topology, asked="cuda", env={name: "3"}) == Device("cuda", 0)
    assert Device.choose(topology, asked="cuda", env={}) == Device("cuda", 3)


@pytest.mark.skipif(find_spec("torch_xla") is not None or torch.accelerator.is_available(), reason="needs a bare CPU")
@pytest.mark.parametrize(("asked", "refused"), [("TPU", True), ("tpu", True), ("CPU", False), ("", False)])
def test_a_tpu_without_its_library_is_not_replaced_by_the_cpu(asked, refused):
    with pytest.raises(ConfigError, match="torch_xla is not installed") if refused else nullcontext():
        assert Device.choose(Topology(), env={"PJRT_DEVICE": asked}) == Device("cpu")
    assert Device.choose(Topology(), cpu=True, env={"PJRT_DEVICE": asked}) == Device("cpu")


def test_facts_of_the_cpu():
    cpu = Device("cpu")
    assert cpu.torch == torch.device("cpu")
    assert str(cpu) == "cpu"
    assert cpu.supports(torch.bfloat16)
    assert not cpu.supports(torch.float8_e4m3fn)
    free, total = cpu.memory()
    assert 0 < free <= total
    cpu.synchronize()
    cpu.empty_cache()
    cpu.set_current()


def test_mps_has_no_double_precision():
    assert not Device("mps").supports(torch.float64)


def test_random_state_comes_back():
    cpu = Device("cpu")
    state = cpu.rng_state()
    first = torch.rand(3)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_choosing_the_cpu_loads_no_device():
    code = (
        "import torch, accel_state\n"
        "with accel_state.Session.open(cpu=True, env={}): pass\n"
        "accel_state.Session.open(env={}).close()\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not torch.xpu.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.gpu
def test_facts_of_a_gpu():
    gpu = Device("cuda", 0)
    free, total = gpu.memory()
    assert 0 < free <= total
    state = gpu.rng_state()
    first = torch.rand(3, device=gpu.torch)
    gpu.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=gpu.torch), first)
    assert gpu.supports(torch.float16)
    capability = torch.cuda.get_device_capability(0)
    assert gpu.supports(torch.bfloat16) == (capability >= (8, 0))
    assert gpu.supports(torch.float8_e4m3fn) == (capability >= (8, 9))
    gpu.synchronize()
    gpu.empty_cache()


def test_a_barrier_of_a_gpu_runs_on_its_own_index():
    assert Device("cuda", 3).barrier_devices == [3]
    assert Device("cuda").barrier_devices is None
    assert [Device(kind).barrier_devices for kind in ("cpu", "mps", "xla", "hpu")] == [None] * 4


@pytest.mark.parametrize(
    ("name", "env", "refused"),
    [
        ("NVIDIA GeForce RTX 4090", {}, True),
        ("NVIDIA GeForce RTX 4090", {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}, False),
        ("NVIDIA H100 80GB HBM3", {}, False),
    ],
)
def test_gpus_that_cannot_reach_each_other_are_refused(name, env, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr("accel_state.device.gpus.check_cuda_p2p_ib_support", lambda: False)
    with pytest.raises(SessionError, match="NCCL_P2P_DISABLE=1") if refused else nullcontext():
        Device("cuda", 0).check_connections(env)


def test_the_nearer_cores_are_those_of_the_device_and_not_of_the_local_rank(monkeypatch):
    bound = []
    monkeypatch.setattr("accel_state.device.gpus.set_numa_affinity", bound.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    assert Device("cuda", 2).keep_to_near_cores()
    assert Device("cuda").keep_to_near_cores()
    assert bound == [2, 5]


@pytest.mark.parametrize(
    ("arch", "fnuz", "ocp"), [("gfx90a", 0, 0), ("gfx942", 1, 0), ("gfx950", 0, 1), ("gfx1201", 0, 1)]
)
def test_generations_of_amd_have_one_of_two_kinds_of_fp8_or_none(arch, fnuz, ocp, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=arch))
    gpu = Device("cuda", 0)
    assert (gpu.supports(torch.float8_e4m3fnuz), gpu.supports(torch.float8_e4m3fn)) == (bool(fnuz), bool(ocp))
    assert gpu.supports(torch.bfloat16)


def test_a_cpu_has_no_connections_to_check_and_no_nearer_cores():
    Device("cpu").check_connections({})
    assert Device("cpu").keep_to_near_cores() is False
