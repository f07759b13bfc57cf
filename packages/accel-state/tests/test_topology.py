"""Where a process sits is read from plain mappings, and contradictions are named."""

import importlib.metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state import Topology, TopologyError
from accel_state.clusters import BUILT_IN, ENTRY_POINT_GROUP, built_in_readers, installed_readers
from accel_state.clusters.hosts import expand_hosts, lsf_hosts
from accel_state.clusters.variables import master_port


def variables(text):
    return dict(pair.split("=", 1) for pair in text.split())


KNOWN = {
    "nothing": ("", Topology()),
    "old spelling of not distributed": ("LOCAL_RANK=-1", Topology()),
    "torchrun": (
        "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=h "
        "MASTER_PORT=7",
        Topology(5, 8, 1, 4, 1, 2, "torchrun", "h", 7),
    ),
    "torchrun, unequal nodes": (
        "RANK=4 WORLD_SIZE=5 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=h "
        "MASTER_PORT=7",
        Topology(4, 5, 0, 1, 1, 2, "torchrun", "h", 7),
    ),
    "by hand on one machine": ("RANK=1 WORLD_SIZE=2", Topology(1, 2, 1, 2, 0, 1, "torchrun")),
    "DeepSpeed's launcher": (
        "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_SIZE=2 MASTER_ADDR=h MASTER_PORT=7",
        Topology(3, 4, 1, 2, 1, 2, "torchrun", "h", 7),
    ),
    "torchrun wins over Slurm": (
        "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_STEP_ID=0",
        Topology(0, 2, 0, 2, 0, 1, "torchrun"),
    ),
    "srun on two nodes": (
        "SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NNODES=2 SLURM_TASKS_PER_NODE=2(x2) "
        "SLURM_JOB_NODELIST=node[007-008] SLURM_JOB_ID=123 SLURM_STEP_ID=0",
        Topology(3, 4, 1, 2, 1, 2, "slurm", "node007", 12123),
    ),
    "srun, step smaller than the job": (
        "SLURM_PROCID=1 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_NNODES=2 SLURM_LOCALID=1 "
        "SLURM_STEP_NODELIST=b SLURM_JOB_NODELIST=a,b SLURM_STEP_TASKS_PER_NODE=2 SLURM_JOB_ID=5",
        Topology(1, 2, 1, 2, 0, 1, "slurm", "127.0.0.1", 12005),
    ),
    "srun, unequal nodes": (
        "SLURM_PROCID=8 SLURM_NTASKS=9 SLURM_LOCALID=0 SLURM_NODEID=2 SLURM_NNODES=3 SLURM_TASKS_PER_NODE=4(x2),1 "
        "SLURM_JOB_NODELIST=n[1-3] SLURM_JOB_ID=5",
        Topology(8, 9, 0, 1, 2, 3, "slurm", "n1", 12005),
    ),
    "srun, address given": (
        "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NNODES=2 MASTER_ADDR=10.0.0.9 MASTER_PORT=4000 "
        "WORLD_SIZE=2",
        Topology(0, 2, 0, 1, 0, 2, "slurm", "10.0.0.9", 4000),
    ),
    "salloc's shell": ("SLURM_NTASKS=4 SLURM_JOB_ID=1 SLURM_NNODES=2", Topology()),
    "body of an sbatch script": (
        "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_JOB_ID=1 SLURM_TASK_PID=33 SLURM_SUBMIT_DIR=/home",
        Topology(),
    ),
    "body of an sbatch script, Slurm 26.05": (
        "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_JOB_ID=1 SLURM_TASK_PID=33 SLURM_SUBMIT_DIR=/home "
        "SLURM_STEP_ID=-5 SLURM_STEPID=-5",
        Topology(),
    ),
    "salloc's shell on a compute node": (
        "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_JOB_ID=1 SLURM_STEP_ID=4294967290 SLURM_PTY_PORT=3",
        Topology(),
    ),
    "srun from salloc's shell on a compute node": (
        "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_STEP_ID=0 SLURM_PTY_PORT=3 SLURM_NNODES=1 SLURM_JOB_ID=1",
        Topology(1, 2, 1, 2, 0, 1, "slurm", "127.0.0.1", 12001),
    ),
    "shell by srun --pty": (
        "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_STEP_ID=0 SLURM_PTY_PORT=3 SLURM_NNODES=1",
        Topology(),
    ),
    "srun from a shell by srun --pty": (
        "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_STEP_ID=1 SLURM_PTY_PORT=3 SLURM_NNODES=1 SLURM_JOB_ID=1",
        Topology(1, 2, 1, 2, 0, 1, "slurm", "127.0.0.1", 16100),
    ),
    "srun from salloc's shell": (
        "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_NNODES=1 "
        "SLURM_JOB_NAME=interactive SLURM_SUBMIT_DIR=/ SLURM_TASK_PID=1 SLURM_JOB_ID=1",
        Topology(1, 2, 1, 2, 0, 1, "slurm", "127.0.0.1", 12001),
    ),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
        Topology(1, 2, 1, 2, 0, 1, "openmpi", "127.0.0.1", 29500),
    ),
    "Open MPI inside Slurm": (
        "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
        "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_JOB_NODELIST=x[1-2] SLURM_JOB_ID=7",
        Topology(3, 4, 1, 2, 1, 2, "openmpi", "x1", 12007),
    ),
    "MPICH and Intel MPI": (
        "PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2 MASTER_ADDR=h MASTER_PORT=99",
        Topology(2, 4, 0, 2, 1, 2, "pmi", "h", 99),
    ),
    "MPICH by PALS": (
        "PMI_RANK=5 PMI_SIZE=8 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=4 PALS_RANKID=5 MASTER_ADDR=h MASTER_PORT=99",
        Topology(5, 8, 1, 4, 1, 2, "pmi", "h", 99),
    ),
    "PMI without local variables": ("PMI_RANK=1 PMI_SIZE=2", Topology(1, 2, 1, 2, 0, 1, "pmi", "127.0.0.1", 29500)),
    "srun --mpi=pmi2": (
        "PMI_RANK=1 PMI_SIZE=2 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_STEP_ID=0 SLURM_JOB_ID=1",
        Topology(1, 2, 1, 2, 0, 1, "slurm", "127.0.0.1", 12001),
    ),
    "MVAPICH": (
        "MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=0 MV2_COMM_WORLD_LOCAL_SIZE=2",
        Topology(0, 2, 0, 2, 0, 1, "mvapich", "127.0.0.1", 29500),
    ),
    "jsrun, which sets Open MPI's too": (
        "JSM_NAMESPACE_RANK=6 JSM_NAMESPACE_SIZE=12 JSM_NAMESPACE_LOCAL_RANK=0 JSM_NAMESPACE_LOCAL_SIZE=6 "
        "OMPI_COMM_WORLD_RANK=6 OMPI_COMM_WORLD_SIZE=12 LSB_JOBID=44",
        None,
    ),
    "PyTorchJob": (
        "KUBERNETES_SERVICE_HOST=10.0.0.1 RANK=1 WORLD_SIZE=3 MASTER_ADDR=job-master-0 MASTER_PORT=23456",
        Topology(1, 3, 0, 1, 1, 3, "kubernetes", "job-master-0", 23456),
    ),
    "master of a PyTorchJob": (
        "KUBERNETES_SERVICE_HOST=10.0.0.1 RANK=0 WORLD_SIZE=3 MASTER_ADDR=localhost MASTER_PORT=23456",
        Topology(0, 3, 0, 1, 0, 3, "kubernetes", "localhost", 23456),
    ),
    "indexed Job": (
        "KUBERNETES_SERVICE_HOST=10.0.0.1 JOB_COMPLETION_INDEX=2 WORLD_SIZE=4 MASTER_ADDR=job-0.svc",
        Topology(2, 4, 0, 1, 2, 4, "kubernetes", "job-0.svc", 29500),
    ),
    "indexed Job of independent pods": ("JOB_COMPLETION_INDEX=2 WORLD_SIZE=1", Topology()),
    "indexed Job of a TPU that is one machine": (
        "JOB_COMPLETION_INDEX=0 PJRT_DEVICE=TPU TPU_WORKER_ID=0 TPU_WORKER_HOSTNAMES=localhost",
        Topology(),
    ),
    "mpirun in an indexed Job": (
        "JOB_COMPLETION_INDEX=0 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
        "OMPI_COMM_WORLD_LOCAL_SIZE=2",
        Topology(1, 2, 1, 2, 0, 1, "openmpi", "127.0.0.1", 29500),
    ),
    "torchrun in a pod": (
        "KUBERNETES_SERVICE_HOST=1.2.3.4 RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h "
        "MASTER_PORT=1",
        Topology(1, 2, 1, 2, 0, 1, "torchrun", "h", 1),
    ),
    "machine of a TPU pod": (
        "PJRT_DEVICE=TPU TPU_WORKER_ID=2 TPU_WORKER_HOSTNAMES=t-0.svc,t-1.svc,t-2.svc,t-3.svc",
        Topology(2, 4, 0, 1, 2, 4, "tpu", "t-0.svc", 29500),
    ),
    "a TPU that is one machine": ("PJRT_DEVICE=TPU TPU_WORKER_ID=0 TPU_WORKER_HOSTNAMES=localhost", Topology()),
    "a pod's machine whose TPU is not used": ("TPU_WORKER_ID=1 TPU_WORKER_HOSTNAMES=a,b", Topology()),
}


@pytest.mark.parametrize("name", KNOWN)
def test_each_launcher_is_read(name):
    text, expected = KNOWN[name]
    env = variables(text)
    if expected is None:  # jsrun: the hosts are a list with blanks, which the short notation cannot hold
        env["LSB_MCPU_HOSTS"] = "batch 1 a 42 b 42"
        expected = Topology(6, 12, 0, 6, 1, 2, "lsf", "a", 12044)
    assert Topology.from_env(env) == expected


WRONG = {
    "RANK=0": ["RANK='0'", "WORLD_SIZE"],
    "WORLD_SIZE=4": ["WORLD_SIZE=4", "RANK"],
    "LOCAL_RANK=3": ["LOCAL_RANK='3'", "RANK"],
    "RANK=2 WORLD_SIZE=2": ["RANK=2", "WORLD_SIZE=2"],
    "RANK=x WORLD_SIZE=2": ["RANK='x'", "whole number"],
    "RANK=-1 WORLD_SIZE=2": ["RANK='-1'"],
    "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2": ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"],
    "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=3": ["LOCAL_WORLD_SIZE=3", "WORLD_SIZE=2"],
    "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2": ["LOCAL_RANK"],
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.1.1.1": ["LOCAL_WORLD_SIZE", "10.1.1.1"],
    "RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 GROUP_WORLD_SIZE=1": ["LOCAL_WORLD_SIZE=2", "WORLD_SIZE=4"],
    "RANK=0 WORLD_SIZE=0": ["WORLD_SIZE=0"],
    "RANK=0 WORLD_SIZE=2 MASTER_PORT=http": ["MASTER_PORT='http'"],
    "RANK=0 WORLD_SIZE=2 MASTER_PORT=70000": ["70000"],
    "SLURM_PROCID=0": ["SLURM_NTASKS"],
    "SLURM_PROCID=4 SLURM_NTASKS=4 SLURM_STEP_ID=1": ["SLURM_PROCID=4", "SLURM_NTASKS=4"],
    "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_ID=1 WORLD_SIZE=8": ["WORLD_SIZE=8", "SLURM_NTASKS=4"],
    "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_ID=1 SLURM_NNODES=2": ["SLURM_LOCALID"],
    "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_NNODES=2 SLURM_TASKS_PER_NODE=?": ["SLURM_TASKS_PER_NODE='?'"],
    "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_NNODES=2": ["MASTER_ADDR"],
    "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_NODELIST=a[1-": ["'a[1-'"],
    "OMPI_COMM_WORLD_RANK=0": ["OMPI_COMM_WORLD_SIZE"],
    "OMPI_COMM_WORLD_SIZE=2": ["OMPI_COMM_WORLD_RANK"],
    "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0": ["OMPI_COMM_WORLD_LOCAL_SIZE"],
    "PMI_RANK=3 PMI_SIZE=2": ["PMI_RANK=3", "PMI_SIZE=2"],
    "PMI_RANK=1 PMI_SIZE=2 PMI_LOCAL_RANK=0 PMI_LOCAL_SIZE=1": ["MASTER_ADDR"],
    "MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=two": ["MV2_COMM_WORLD_SIZE='two'"],
    "JSM_NAMESPACE_SIZE=2": ["JSM_NAMESPACE_RANK"],
    "KUBERNETES_SERVICE_HOST=1 JOB_COMPLETION_INDEX=4 WORLD_SIZE=4": ["JOB_COMPLETION_INDEX=4", "WORLD_SIZE=4"],
    "KUBERNETES_SERVICE_HOST=1 JOB_COMPLETION_INDEX=1 WORLD_SIZE=4": ["MASTER_ADDR"],
    "KUBERNETES_SERVICE_HOST=1 JOB_COMPLETION_INDEX=0": ["JOB_COMPLETION_INDEX='0'", "WORLD_SIZE", "MASTER_ADDR"],
    "PJRT_DEVICE=TPU TPU_WORKER_HOSTNAMES=a,b": ["TPU_WORKER_HOSTNAMES='a,b'", "TPU_WORKER_ID"],
    "PJRT_DEVICE=TPU TPU_WORKER_ID=2 TPU_WORKER_HOSTNAMES=a,b": ["machine 2", "TPU_WORKER_ID", "a, b"],
}


@pytest.mark.parametrize("text", WRONG)
def test_contradictions_name_variable_and_value(text):
    with pytest.raises(TopologyError) as caught:
        Topology.from_env(variables(text))
    for part in WRONG[text]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"rank": 1}, "rank=1"),
        ({"rank": -1}, "rank=-1"),
        ({"world_size": 0}, "world_size=0"),
        ({"world_size": 2, "local_rank": 1}, "local_rank=1"),
        ({"world_size": 2, "local_world_size": 3}, "local_world_size=3"),
        ({"world_size": 2, "num_nodes": 3}, "num_nodes=3"),
        ({"node_rank": 1}, "node_rank=1"),
        ({"master_port": 65536}, "65536"),
    ],
)
def test_impossible_places_are_refused(values, part):
    with pytest.raises(TopologyError, match=part):
        Topology(**values)


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_torchrun_variables_survive_the_way_there_and_back(nodes, per_node, data):
    node, local = data.draw(st.integers(0, nodes - 1)), data.draw(st.integers(0, per_node - 1))
    env = {
        "RANK": node * per_node + local,
        "WORLD_SIZE": nodes * per_node,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": nodes,
        "MASTER_ADDR": "h",
    }
    found = Topology.from_env({name: str(value) for name, value in env.items()})
    assert (found.rank, found.local_rank, found.node_rank, found.num_nodes) == (env["RANK"], local, node, nodes)
    assert found.is_main == (found.rank == 0)
    assert found.is_last == (found.rank == found.world_size - 1)


@given(st.dictionaries(st.sampled_from(["RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "PMI_RANK"]), st.text()))
def test_any_text_gives_a_topology_or_its_own_error(env):
    try:
        found = Topology.from_env(env)
    except TopologyError:
        return
    assert 0 <= found.rank < found.world_size


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("node[001-003,7],gpu2", ["node001", "node002", "node003", "node7", "gpu2"]),
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("r[1-2]n[08-09]-ib", ["r1n08-ib", "r1n09-ib", "r2n08-ib", "r2n09-ib"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
    ],
)
def test_node_lists_expand(nodelist, hosts):
    assert expand_hosts(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["", "a[", "a]", "a[3-1]", "a[x]", "a[1-]", "][", "a[[1]]"])
def test_broken_node_lists_are_refused(nodelist):
    with pytest.raises(TopologyError):
        expand_hosts(nodelist)


@given(st.integers(0, 10**6), st.integers(0, 30), st.integers(1, 8))
def test_ranges_keep_their_width(first, extra, width):
    begin, end = f"{first:0{width}d}", f"{first + extra:0{width}d}"
    hosts = expand_hosts(f"n[{begin}-{end}]")
    assert [int(host[1:]) for host in hosts] == list(range(first, first + extra + 1))
    assert all(len(host) >= width + 1 for host in hosts)


def test_lsf_hosts_come_from_either_variable():
    assert lsf_hosts({"LSB_HOSTS": "a a b b"}) == ["a", "b"]
    assert lsf_hosts({"LSB_MCPU_HOSTS": "a 4 b 4"}) == ["a", "b"]
    assert lsf_hosts({}) == []


@given(st.integers(0, 10**9))
def test_port_of_a_job_is_the_same_on_all_its_nodes_and_not_ephemeral(job):
    port = master_port({"SLURM_JOB_ID": str(job)})
    assert port == master_port({"SLURM_JOB_ID": str(job), "SLURM_PROCID": "3"})
    assert 1024 < port < 32768


@given(st.integers(0, 10**9), st.integers(0, 100))
def test_steps_of_a_job_have_ports_of_their_own(job, step):
    env = {"SLURM_JOB_ID": str(job), "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    one, other = (Topology.from_env({**env, "SLURM_STEP_ID": str(number)}) for number in (step, step + 1))
    assert one.master_port != other.master_port
    assert 1024 < other.master_port < 32768


def test_built_in_readers_are_the_entry_points_of_the_package():
    installed = {e.name: e.value for e in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    ours = {name: value for name, value in installed.items() if value.startswith("accel_state.")}
    named = {name: f"accel_state.clusters.{name}:{reader}" for name, reader in BUILT_IN.items()}
    assert set(ours.items()) <= set(named.items())
    assert [type(reader).__name__ for reader in built_in_readers()] == list(BUILT_IN.values())


def test_an_installed_reader_is_asked_when_no_built_in_one_answers(tmp_path, monkeypatch):
    (tmp_path / "mycluster.py").write_text(
        "from accel_state import Topology\n"
        "class Reader:\n"
        "    def read(self, env):\n"
        "        return Topology.on_one_node(1, 2, launcher='mine') if 'MY_CLUSTER' in env else None\n"
    )
    info = tmp_path / "mycluster-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mycluster\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nmine = mycluster:Reader\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [type(reader).__name__ for reader in installed_readers()] == ["Reader"]
    assert Topology.from_env({"MY_CLUSTER": "1"}).launcher == "mine"
    assert Topology.from_env({"MY_CLUSTER": "1", "RANK": "0", "WORLD_SIZE": "2"}).launcher == "torchrun"
    assert Topology.from_env({}).launcher == "single"
    ours = {"RANK": "0", "WORLD_SIZE": "2", "ACCEL_LAUNCHER_PID": "7"}
    assert Topology.from_env(ours).launcher == "accel launch"
