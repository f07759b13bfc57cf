"""A session opens or adopts the process group, tells the truth about it, and closes only what it opened."""

import gc
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accel_state import Device, Session, SessionError, Topology, TopologyError
from accel_state.process_group.group import prepare_process

SHORT = timedelta(seconds=1)


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def refusing_port():
    """A port where nothing listens, and that no other connection gets meanwhile, not even one to itself."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture
def mute_listener():
    """A port where something listens and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_one_process_opens_no_group():
    with Session.open(cpu=True, env={}) as session:
        assert session.group is None
        assert session.timeout is None
        assert session.backend is None
        assert not session.use_distributed
        assert session.is_main_process
        assert session.is_local_main_process
        assert session.is_last_process
        assert not dist.is_initialized()
        session.wait_for_everyone()
        assert "no process group" in repr(session)
    assert "closed" in repr(session)


def test_current_is_the_newest_open_session_and_known_weakly():
    assert Session.current() is None
    with Session.open(cpu=True, env={}) as first:
        with Session.open(cpu=True, env={}) as second:
            assert Session.current() is second
        assert Session.current() is first
    assert Session.current() is None
    dropped = Session.open(cpu=True, env={})
    assert Session.current() is dropped
    del dropped
    gc.collect()
    assert Session.current() is None


def test_opening_reads_the_mapping_and_not_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Session.open(env={"ACCELERATE_USE_CPU": "yes"}) as session:
        assert session.world_size == 1
        assert session.device == Device("cpu")


def test_device_may_be_given_in_any_form():
    for device in ("cpu", torch.device("cpu"), Device("cpu")):
        with Session.open(device=device, env={}) as session:
            assert session.device == Device("cpu")


@pytest.mark.parametrize(
    ("rank", "missing", "where"),
    [(0, "ranks 1, 2 of 3", "port"), (1, "found no rank 0 at", "refusing_port")],
    ids=["server", "client"],
)
def test_missing_peers_are_named_within_the_timeout(rank, missing, where, request):
    port = request.getfixturevalue(where)
    begin = time.monotonic()
    with pytest.raises(SessionError, match=missing) as caught:
        Session.open(
            cpu=True,
            topology=Topology.on_one_node(rank, 3),
            timeout=SHORT,
            init_method=f"tcp://127.0.0.1:{port}",
        )
    assert time.monotonic() - begin < 60
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert not dist.is_initialized()
    assert Session.current() is None


def test_a_busy_port_is_named_at_once(mute_listener):
    begin = time.monotonic()
    with pytest.raises(SessionError, match=f"cannot listen on port {mute_listener}"):
        Session.open(
            cpu=True, topology=Topology.on_one_node(0, 2), env={}, init_method=f"tcp://127.0.0.1:{mute_listener}"
        )
    assert time.monotonic() - begin < 60


def test_a_listener_that_is_not_rank_0_is_named_within_the_timeout():
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]
    try:
        with pytest.raises(SessionError, match=f"something listens at 127.0.0.1:{port} but does not answer"):
            Session.open(
                cpu=True, topology=Topology.on_one_node(1, 2), timeout=SHORT, init_method=f"tcp://127.0.0.1:{port}"
            )
    finally:
        listener.close()
    for thread in threading.enumerate():
        if thread.name == "accel-store":
            thread.join(10)


def test_an_unknown_host_is_named():
    with pytest.raises(SessionError, match=r"no-such-host\.invalid:29500"):
        Session.open(
            cpu=True, topology=Topology.on_one_node(1, 2), timeout=SHORT, init_method="tcp://no-such-host.invalid:29500"
        )


def test_missing_peers_are_named_for_a_file_too(tmp_path):
    with pytest.raises(SessionError, match=r"meet.* for rank 1 of 2"):
        Session.open(
            cpu=True, topology=Topology.on_one_node(0, 2), timeout=SHORT, init_method=f"file://{tmp_path / 'meet'}"
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init_method": "tcp://somewhere"}, "lacks host or port"),
        ({"init_method": "tcp://somewhere:0"}, "port of the rendezvous at somewhere is 0"),
        ({"init_method": "zoo://x"}, "is unknown; expected tcp"),
        ({"init_method": "file:///no/such/folder/x"}, "'/no/such/folder' does not exist"),
        ({"backend": "nccl"}, "backend='nccl' does not serve cpu; use 'gloo'"),
        ({"backend": "carrier-pigeon"}, "backend='carrier-pigeon' is unknown to torch"),
        ({"timeout": timedelta(0)}, "is not positive"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_opened(arguments, message):
    with pytest.raises(SessionError, match=message):
        Session.open(cpu=True, topology=Topology.on_one_node(0, 2), **arguments)
    assert not dist.is_initialized()


def test_several_nodes_without_an_address_are_refused():
    with pytest.raises(SessionError, match="set MASTER_ADDR and MASTER_PORT"):
        Session.open(cpu=True, topology=Topology(0, 2, num_nodes=2), env={})


def test_a_wrong_backend_is_refused_for_one_process_too():
    with pytest.raises(SessionError, match="does not serve cpu"):
        Session.open(cpu=True, backend="nccl", env={})


def test_contradicting_variables_reach_the_caller():
    with pytest.raises(TopologyError, match="WORLD_SIZE"):
        Session.open(env={"RANK": "0"})


@pytest.mark.ranks(2, group=False)
def test_the_timeout_asked_for_is_the_one_that_applies(rank, tmp_path):
    with Session.open(cpu=True, timeout=timedelta(seconds=2.5)) as session:
        assert session.owns_group
        assert session.timeout == timedelta(seconds=2.5)
        assert "timeout 0:00:02.5" in repr(session)
        if rank == 0:
            begin = time.monotonic()
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(1), group=session.group)
            assert 2 < time.monotonic() - begin < 30
            (tmp_path / "over").touch()
        while not (tmp_path / "over").exists():
            time.sleep(0.01)
    assert not dist.is_initialized()


@pytest.mark.ranks(2, group=False)
def test_a_group_can_be_opened_again_at_the_same_address(rank, world_size):
    for turn in range(3):
        with Session.open(cpu=True, timeout=timedelta(seconds=20)) as session:
            total = torch.tensor([rank + turn])
            dist.all_reduce(total, group=session.group)
            assert total.item() == 1 + 2 * turn
        assert not dist.is_initialized()


@pytest.mark.ranks(2, group=False)
def test_an_adopted_group_survives_close():
    dist.init_process_group("gloo")
    before = dist.group.WORLD
    with Session.open(cpu=True) as session:
        assert session.group is before
        assert not session.owns_group
        assert "adopted" in repr(session)
    assert dist.group.WORLD is before
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_an_adopted_group_refuses_another_backend_and_another_place(rank, world_size):
    with pytest.raises(SessionError, match=r"backend='nccl' asked for, but .*'gloo'"):
        Session.open(cpu=True, backend="nccl")
    with pytest.raises(SessionError, match=f"already open as rank {rank} of {world_size}"):
        Session.open(cpu=True, topology=Topology.on_one_node(0, 3))


@pytest.mark.ranks(2, group=False)
def test_two_sessions_share_the_group_and_the_last_one_closes_it():
    first = Session.open(cpu=True)
    second = Session.open(cpu=True)
    assert first.group is second.group
    first.close()
    first.close()
    second.wait_for_everyone()
    with pytest.raises(SessionError, match="closed"):
        first.wait_for_everyone()
    second.close()
    assert not dist.is_initialized()


@pytest.mark.ranks(2, group=False)
def test_a_second_session_with_another_timeout_has_a_group_of_its_own():
    with Session.open(cpu=True, timeout=timedelta(seconds=20)) as first:
        with Session.open(cpu=True, timeout=timedelta(seconds=33)) as second:
            assert second.timeout == timedelta(seconds=33)
            assert first.timeout == timedelta(seconds=20)
            second.wait_for_everyone()
        first.wait_for_everyone()
        assert dist.is_initialized()


@pytest.mark.ranks(2, group=False)
def test_a_store_may_be_given(tmp_path, rank, world_size):
    store = dist.FileStore(str(tmp_path / "store"), world_size)
    with Session.open(cpu=True, init_method=store) as session:
        assert session.gather_object([rank]) == [0, 1]


@pytest.mark.ranks(2, group=False)
def test_collectives_are_methods(rank):
    with Session.open(cpu=True, debug=True) as session:
        assert session.debug
        assert session.gather({"x": torch.tensor([rank])})["x"].tolist() == [0, 1]
        assert session.gather_object([rank]) == [0, 1]
        assert session.reduce(torch.tensor([2.0 * rank]), "sum").tolist() == [2.0]
        assert session.broadcast(torch.tensor([rank]), 1).tolist() == [1]
        assert session.broadcast_object_list([rank], 1) == [1]
        assert session.pad_across_processes(torch.ones(rank + 1)).shape == (2,)


SCRIPT = """
import sys
import torch
from accel_state import Session

session = Session.open()
total = torch.tensor([session.rank + 1])
torch.distributed.all_reduce(total, group=session.group)
# One write for each line: torchrun unbuffers Python, whose print writes the end of a line by itself.
sys.stdout.write(f"{session.world_size} {session.device} {total.item()} {session.topology.launcher}\\n")
sys.stdout.flush()
if len(sys.argv) > 1 and session.rank == 1:
    raise SystemExit(7)
"""


def run(command, **variables):
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **variables})


def launch(tmp_path, *arguments):
    """torchrun on two processes of a script that never closes its session."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # Without a folder for logs torchrun makes one, and leaves it.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return run([*torchrun, f"--log-dir={tmp_path}", script, *arguments])


@pytest.mark.slow
def test_torchrun_without_a_flag_makes_ranks_and_exits_cleanly(tmp_path):
    done = launch(tmp_path)
    assert done.returncode == 0, done.stderr
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    printed = [line.split() for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # torch 2.9's own
    assert [words[0] for words in printed] == ["2", "2"]
    assert [words[2:] for words in printed] == [["3", "torchrun"]] * 2
    assert count or "cpu" in done.stdout


def test_a_rank_that_leaves_early_does_not_hang_the_others(tmp_path):
    begin = time.monotonic()
    assert launch(tmp_path, "leave").returncode != 0
    assert time.monotonic() - begin < 60


ELASTIC = """
import os
import sys
import torch
from datetime import timedelta
from accel_state import Session

with Session.open(timeout=timedelta(seconds=30)) as session:
    session.reduce(torch.tensor(1.0), "sum")
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and session.rank == 1:
        os._exit(3)
    session.wait_for_everyone()
    sys.stdout.write(f"done {session.rank}\\n")
"""


@pytest.mark.slow
def test_restarted_workers_do_not_meet_dead_ones_in_the_agents_store(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ELASTIC)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--log-dir={tmp_path}"]
    done = run([*torchrun, *rendezvous, script])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["0", "1", "done", "done"]


MPI = {
    "openmpi": ("mpirun.openmpi", ["--allow-run-as-root", "--oversubscribe", "-np", "2"]),
    "pmi": ("mpiexec.hydra", ["-n", "2"]),
}


@pytest.mark.parametrize("launcher", MPI)
def test_a_real_mpi_launcher_makes_ranks(launcher, tmp_path):
    name, arguments = MPI[launcher]
    tool = shutil.which(name)
    if tool is None:
        pytest.skip(f"{name} is not installed")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    done = run([tool, *arguments, sys.executable, script], MASTER_PORT=port, ACCELERATE_USE_CPU="1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"2 cpu 3 {launcher}"] * 2


@pytest.mark.parametrize(("env", "shared"), [({}, True), ({"OMP_NUM_THREADS": "7"}, False)])
def test_processes_of_a_node_share_its_cores(env, shared):
    before = torch.get_num_threads()
    try:
        prepare_process(Topology.on_one_node(0, 10_000), Device("cpu"), env)
        assert torch.get_num_threads() == (1 if shared else before)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["ACCEL_DEBUG_MODE", "ACCELERATE_DEBUG_MODE"])
def test_debugging_can_be_asked_for_by_variable(name):
    with Session.open(cpu=True, env={name: "1"}) as session:
        assert session.debug
    with Session.open(cpu=True, env={name: "1"}, debug=False) as session:
        assert not session.debug


def test_the_device_of_a_single_process_is_made_current(monkeypatch):
    current = []
    monkeypatch.setattr(Device, "set_current", lambda self: current.append(str(self)))
    with Session.open(cpu=True, env={}) as session:
        assert current == [str(session.device)]
