"""Launches on clusters: what is written and planned, and real runs over Slurm, mpirun, SSH and network namespaces."""

import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from accel_launch.config import resolve_config
from accel_launch.launch.checks import check_settings
from accel_launch.launch.dispatch import prepare
from accel_launch.launch.remote.hostfile import Machine, filtered, parse_hostfile, read_hostfile
from accel_launch.launch.remote.mpi import plan_mpi
from accel_launch.launch.remote.slurm import plan_slurm
from accel_launch.launch.remote.ssh import SshPlan, plan_ssh, run_ssh
from accel_state.errors import LaunchError
from accel_testing.ranks.launchers import free_port

LAUNCH = [sys.executable, "-m", "accel", "launch", "--cpu"]
MEET = """
import os, sys, time
import torch
from accel import Accelerator
accelerator = Accelerator()
total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0])).item()
place = f"rank {accelerator.process_index} of {accelerator.num_processes}"
sys.stdout.write(f"{place}: {total} {accelerator.mixed_precision}\\n")
sys.stdout.flush()
accelerator.end_training()
"""
ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def clean_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith(("ACCEL", "TORCHELASTIC", "SLURM", "OMPI"))}
    return own | {"OMP_NUM_THREADS": "1"} | dict(extra or {})


def run(
    folder: Path, *argv: str, env: Mapping[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCH, *argv], cwd=folder, env=clean_env(env), capture_output=True, text=True, timeout=timeout
    )


def wait_until(done: object, what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def met(text: str, precision: str = "no") -> bool:
    lines = {line for line in text.splitlines() if line.startswith("rank ")}
    return {f"rank {rank} of 2: 3.0 {precision}" for rank in range(2)} <= lines


# ------------------------------------------------------------------------------------------------------- hostfiles


@pytest.mark.parametrize(
    ("text", "machines"),
    [
        ("a slots=4\nb slots=2 # the old one\n\n# none\n", [Machine("a", 4), Machine("b", 2)]),
        ("a:8\nb:8\n", [Machine("a", 8), Machine("b", 8)]),
        ("a\nb slots=3 max_slots=9", [Machine("a"), Machine("b", 3)]),
    ],
)
def test_hostfiles_of_deepspeed_open_mpi_and_mpich_are_read(text: str, machines: list[Machine]) -> None:
    assert list(parse_hostfile(text)) == machines


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a slots=4\na slots=2", "f:2: a is listed twice"),
        ("a slots=many", r"f:1: cannot read 'slots=many'"),
        ("a slots=0", "f:1: a has 0 slots"),
        ("# nothing\n", "lists no machine"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(text: str, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        parse_hostfile(text, "f")


def test_a_missing_hostfile_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"absent.*No such file"):
        read_hostfile("absent")


MACHINES = (Machine("a", 4), Machine("b", 2))


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        (None, None, list(MACHINES)),
        ("a", None, [Machine("a", 4)]),
        ("a:0,2@b", None, [Machine("a", 2, (0, 2)), Machine("b", 2)]),
        (None, "b", [Machine("a", 4)]),
        (None, "a:1", [Machine("a", 3, (0, 2, 3)), Machine("b", 2)]),
    ],
)
def test_filters_choose_machines_and_slots(include: str | None, exclude: str | None, left: list[Machine]) -> None:
    assert list(filtered(MACHINES, include, exclude)) == left


@pytest.mark.parametrize(
    ("include", "exclude", "words"),
    [
        ("c", None, "names 'c'"),
        ("a:9", None, "of a, which has 4"),
        (None, "a@b", "leaves no machine"),
        ("a", "b", "exclude each"),
    ],
)
def test_filters_that_fit_nothing_are_refused(include: str | None, exclude: str | None, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        filtered(MACHINES, include, exclude)


# ----------------------------------------------------------------------------------------------------------- plans


def test_mpirun_gets_hosts_counts_and_variables_in_its_own_words() -> None:
    config = resolve_config({"mixed_precision": "bf16", "mpirun_args": "--bind-to socket", "main_process_port": 9}, {})
    env = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "secret"}
    plans = {
        flavour: plan_mpi(config, ["a.py", "x"], MACHINES, hostfile="hosts", flavour=flavour, env=env)  # type: ignore[arg-type]
        for flavour in ("openmpi", "hydra")
    }
    argv = plans["openmpi"].argv
    assert argv[:9] == ("mpirun", "--hostfile", "hosts", "-n", "6", "--npernode", "3", "--bind-to", "socket")
    assert argv[-3:] == (sys.executable, "a.py", "x")
    handed = [argv[place + 1] for place, word in enumerate(argv) if word == "-x"]
    assert set(handed) == {"NCCL_DEBUG", "ACCEL_CONFIG", "ACCELERATE_MIXED_PRECISION", "MASTER_PORT"}
    assert plans["hydra"].argv[:7] == ("mpirun", "-f", "hosts", "-n", "6", "-ppn", "3")
    assert "-genv" in plans["hydra"].argv
    assert "secret" not in str(plans["hydra"])


def test_ssh_starts_this_launch_again_on_every_machine() -> None:
    config = resolve_config({"mixed_precision": "bf16", "hostfile": "h", "ssh_args": "-p 2222", "max_restarts": 3}, {})
    plan = plan_ssh(config, ["a.py", "--lr", "1 2"], (Machine("a", 2), Machine("b", 2)), folder="/x y", env={})
    assert [name for name, _ in plan.machines] == ["a", "b"]
    argv = plan.machines[1][1]
    assert argv[:7] == ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-p", "2222")
    remote = argv[-1]
    assert remote.startswith("cd '/x y' && exec env ")
    for words in (
        "--mixed_precision bf16",
        "--max_restarts 3",
        "--num_machines 2 --machine_rank 1",
        "--main_process_ip a --main_process_port 29500",
        "--num_processes 4",
        "--end_with_stdin a.py --lr '1 2'",
    ):
        assert words in remote
    assert "hostfile" not in remote


def test_what_means_nothing_in_a_file_or_a_variable_is_no_flag_of_the_other_machines(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_version: 1\n")
    config = resolve_config({"hostfile": "h"}, {"FSDP_OFFLOAD_PARAMS": "true"}, path)
    check_settings(config)
    plan = plan_ssh(config, ["a.py"], (Machine("a", 2), Machine("b", 2)), folder="/", env={})
    flags = plan.machines[0][1][-1].partition(" launch ")[2].removesuffix(" a.py")
    assert "--multi_gpu" in flags
    assert "fsdp" not in flags


def test_machines_do_not_wait_for_one_whose_launcher_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("accel_launch.launch.remote.ssh._MORE_GRACE", 1.0)
    waiting = ("/bin/sh", "-c", f"timeout 6 cat && touch {tmp_path}/asked_to_end")  # its input ends before it gives up
    plan = SshPlan((("a", waiting), ("b", ("/bin/sh", "-c", "exit 3"))), 2, grace=0.0)
    assert run_ssh(plan) == 3
    assert (tmp_path / "asked_to_end").exists()
    assert "b ended with status 3; ending the other machines" in capsys.readouterr().err


def test_a_machine_that_was_preempted_leaves_the_others_the_time_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_launch.launch.remote.ssh._MORE_GRACE", 0.1)
    saving = ("/bin/sh", "-c", f"timeout 1 cat; [ $? = 124 ] && touch {tmp_path}/saved; exit 75")
    plan = SshPlan((("a", saving), ("b", ("/bin/sh", "-c", "exit 75"))), 2, grace=0.0)
    assert run_ssh(plan) == 75
    assert (tmp_path / "saved").exists()


def test_machines_with_different_numbers_of_slots_are_refused() -> None:
    with pytest.raises(LaunchError, match="a 4, b 2"):
        plan_ssh(resolve_config({}, {}), ["a.py"], MACHINES, folder="/", env={})


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
def test_deepspeeds_hostfile_starts_machines_or_tells_this_one_its_place(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    script = tmp_path / "train.py"
    script.write_text("")
    given = {"use_deepspeed": True, "deepspeed_hostfile": str(tmp_path / "hosts"), "cpu": True}
    over_ssh = prepare(resolve_config(given, {}), [str(script)], {}).plan.to_json()
    assert [machine["name"] for machine in over_ssh["machines"]] == ["a", "b"]  # type: ignore[attr-defined]
    by_hand = given | {"deepspeed_multinode_launcher": "standard", "machine_rank": 1}
    here = prepare(resolve_config(by_hand, {}), [str(script)], {}).plan.to_json()
    assert here["machine"] == {"rank": 1, "of": 2, "at_least": 2}
    assert [process["rank"] for process in here["processes"]] == [2, 3]  # type: ignore[attr-defined]


def test_an_sbatch_script_has_the_options_and_one_launcher_per_machine() -> None:
    flags = {"nnodes": "2", "num_processes": 16, "slurm_args": "--partition=gpu --time 1:00", "mixed_precision": "bf16"}
    script = plan_slurm(resolve_config({}, {}, flags=flags), ["train.py", "--name", "it's"]).script
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    for option in ("--job-name=train", "--nodes=2", "--ntasks-per-node=1", "--partition=gpu", "--time 1:00"):
        assert f"#SBATCH {option}" in lines
    (step,) = [line for line in lines if line.startswith("srun ")]
    assert "--num_processes 16" in step
    assert "--nnodes" not in step
    assert "#SBATCH --requeue" in lines[: lines.index("#SBATCH --partition=gpu")]  # so that --no-requeue wins
    syntax = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (syntax.returncode, syntax.stderr) == (0, "")


def test_values_of_several_words_reach_sbatch_as_one() -> None:
    given = "--comment='my run #3' --constraint 'a100|h100' --output=%x-%j.out"
    lines = plan_slurm(resolve_config({"slurm_args": given}, {}), ["a.py"]).script.splitlines()
    words = ["'--comment=my run #3'", "--constraint 'a100|h100'", "--output=%x-%j.out"]
    assert [line for line in lines if line.startswith("#SBATCH")][-3:] == [f"#SBATCH {word}" for word in words]


@pytest.mark.parametrize("cores", ["8", None])
def test_the_launchers_have_the_cores_that_sbatch_was_asked_for(cores: str | None, tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/bin/bash\necho "cores ${SRUN_CPUS_PER_TASK-none}"\n')
    (tmp_path / "scontrol").write_text("#!/bin/bash\n")
    for tool in tmp_path.iterdir():
        tool.chmod(0o755)
    script = plan_slurm(resolve_config({}, {}), ["a.py"]).script
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    env |= {} if cores is None else {"SLURM_CPUS_PER_TASK": cores}
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, env=env)
    assert (done.stdout, done.stderr) == (f"cores {cores or 'none'}\n", "")


def test_a_range_of_machines_becomes_one_of_slurm() -> None:
    assert "#SBATCH --nodes=1-4" in plan_slurm(resolve_config({"nnodes": "1:4"}, {}), ["a.py"]).script


def test_what_is_no_option_of_sbatch_is_refused() -> None:
    with pytest.raises(LaunchError, match="begin with 'gpu'"):
        plan_slurm(resolve_config({"slurm_args": "gpu --time=1"}, {}), ["a.py"])


def test_a_dry_run_submits_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = run(tmp_path, "--slurm", "--nnodes", "2", "--dry_run", "train.py", env={"PATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=2" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"train.py"}


def test_without_slurm_the_script_is_not_left_behind(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = run(tmp_path, "--slurm", "train.py", env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "cannot run sbatch" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"train.py"}


@pytest.mark.parametrize(("name", "value"), [("max_restarts", 3), ("log_dir", "logs"), ("gpu_ids", "0,1")])
def test_what_mpirun_does_itself_is_refused(name: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    config = resolve_config({"mpirun_hostfile": str(tmp_path / "hosts"), name: value}, {})
    with pytest.raises(LaunchError, match=f"{name}: mpirun starts and watches the processes; drop {name}"):
        prepare(config, [str(tmp_path / "hosts")], {})


# ------------------------------------------------------------------------------------------------------- real runs


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun")
def test_processes_meet_under_mpirun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MEET)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    more = "--oversubscribe" + (" --allow-run-as-root" if ROOT else "")
    argv = ["--mpirun_hostfile", "hosts", "--mpirun_args", more, "--mixed_precision", "bf16", "train.py"]
    done = run(tmp_path, *argv)
    assert done.returncode == 0, done.stderr
    assert met(done.stdout, "bf16"), done.stdout


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[str]:
    """Arguments of ssh that reach a server of our own on this machine."""
    server = shutil.which("sshd") or "/usr/sbin/sshd"
    if not Path(server).exists() or shutil.which("ssh-keygen") is None:
        pytest.skip("needs sshd")
    if not ROOT:
        pytest.skip("needs root: an sshd of one's own cannot log others in")
    folder = tmp_path / "sshd"
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = free_port()
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        f"PidFile {folder}/pid\nStrictModes no\nUsePAM no\nPermitRootLogin yes\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen([server, "-D", "-f", str(folder / "config"), "-E", str(folder / "log")])
    try:
        wait_until(lambda: (folder / "pid").exists(), "sshd did not start")
        yield (
            f"-p {port} -i {folder}/user -l {getpass.getuser()} -o StrictHostKeyChecking=no "
            "-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        )
    finally:
        process.terminate()
        process.wait(timeout=20)


@pytest.mark.slow
def test_machines_of_a_hostfile_form_one_job_over_ssh(sshd: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MEET)
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    argv = ["--hostfile", "hosts", "--ssh_args", sshd, "--main_process_port", str(free_port())]
    done = run(tmp_path, *argv, "--mixed_precision", "bf16", "train.py")
    assert done.returncode == 0, done.stderr
    assert met(done.stdout, "bf16"), done.stdout


@pytest.mark.parametrize("how", ["signal", "kill"])
def test_the_end_of_the_starting_machine_ends_the_others(how: str, sshd: str, tmp_path: Path) -> None:
    script = "import os, time\nopen(f'pid_{os.getpid()}', 'w').close()\ntime.sleep(120)\n"
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    argv = ["--hostfile", "hosts", "--ssh_args", sshd, "--grace_period", "1", "train.py"]
    process = subprocess.Popen(
        [*LAUNCH, *argv],
        cwd=tmp_path,
        env=clean_env(),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL) and None,
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("pid_*"))) == 2, "the processes did not start")
        process.send_signal(signal.SIGTERM if how == "signal" else signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    pids = [int(path.name.removeprefix("pid_")) for path in tmp_path.glob("pid_*")]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "processes stayed behind")
    if how == "signal":
        assert process.returncode == 143
        assert "SIGTERM" in said


SLURM = """\
ClusterName=t
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SlurmctldPort={control}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/control.pid
SlurmdPidFile={folder}/daemon_%n.pid
SlurmctldLogFile={folder}/control.log
SlurmdLogFile={folder}/daemon_%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs={cores} RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores} RealMemory=1000 State=UNKNOWN
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables under which sbatch reaches a Slurm of our own, of two nodes on this machine, without systemd."""
    tools = {name: shutil.which(name) or f"/usr/sbin/{name}" for name in ("munged", "slurmctld", "slurmd")}
    missing = [name for name, path in tools.items() if not Path(path).exists()]
    if missing or shutil.which("sbatch") is None or not ROOT:
        pytest.skip("needs Slurm and munge, as root")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool_n1", "spool_n2"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    config = folder / "slurm.conf"
    config.write_text(
        SLURM.format(
            host=socket.gethostname().partition(".")[0],
            folder=folder,
            control=free_port(),
            ports=(free_port(), free_port()),
            cores=os.cpu_count(),
        )
    )
    env = {"SLURM_CONF": str(config)}
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *argv: str) -> None:
        log = (folder / f"{name}.out").open("wb")
        started.append(subprocess.Popen([tools[name], *argv], env=clean_env(env), stdout=log, stderr=log))

    try:
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log"}
        files["seed-file"] = "munge.seed"
        start("munged", "--foreground", "--force", *(f"--{key}={folder / file}" for key, file in files.items()))
        wait_until((folder / "munge.sock").exists, "munged did not start")
        start("slurmctld", "-D", "-f", str(config))
        for name in ("n1", "n2"):
            start("slurmd", "-D", "-N", name, "-f", str(config))

        def idle() -> bool:
            asked = ["sinfo", "--noheader", "--Node", "--format=%T"]
            found = subprocess.run(asked, env=clean_env(env), capture_output=True, text=True).stdout
            return found.split() == ["idle", "idle"]

        wait_until(idle, f"Slurm has no two idle nodes; its logs are in {folder}")
        yield env
    finally:
        end_jobs(env)
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(timeout=60)


def end_jobs(env: Mapping[str, str]) -> None:
    """Cancels what a test has left in the queue, and waits until nothing of it runs."""

    def none_left() -> bool:
        asked = subprocess.run(["squeue", "--noheader"], env=clean_env(env), capture_output=True, text=True)
        return asked.returncode != 0 or not asked.stdout.strip()

    subprocess.run(["scancel", "--user", getpass.getuser()], env=clean_env(env), capture_output=True)
    wait_until(none_left, "jobs stayed in the queue")


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_job_of_slurm_runs_to_its_end(nodes: int, slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MEET)
    argv = ["--slurm", "--nnodes", str(nodes), "--num_processes", "2", "--mixed_precision", "bf16"]
    done = run(tmp_path, *argv, "--slurm_args", "--output=job.log --wait", "train.py", env=slurm)
    log = (tmp_path / "job.log").read_text() if (tmp_path / "job.log").exists() else ""
    assert done.returncode == 0, done.stderr + log
    assert "Submitted batch job" in done.stdout
    assert met(log, "bf16"), log
    assert (tmp_path / "accel_train.sbatch").exists()


@pytest.mark.slow
def test_processes_that_srun_started_without_any_launcher_meet(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MEET)
    argv = ["srun", "--nodes=2", "--ntasks=2", "--time=5", sys.executable, "train.py"]
    # The nodes of this Slurm are names that no resolver knows.
    env = clean_env(slurm | {"ACCEL_CPU": "1", "ACCEL_MIXED_PRECISION": "bf16", "MASTER_ADDR": "127.0.0.1"})
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert met(done.stdout, "bf16"), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["told", "cancelled"])
def test_a_job_of_slurm_whose_time_is_over_saves_itself_and_only_then_runs_again(
    how: str, slurm: dict[str, str], tmp_path: Path
) -> None:
    """Told by the signal of ``sbatch --signal=USR1``, it goes on when Slurm starts it again; cancelled, it does not."""
    program = Path(__file__).parents[3] / "accel" / "tests" / "resilience" / "preempted_training.py"
    argv = ["--slurm", "--num_processes", "2", "--grace_period", "60", "--slurm_args", "--output=job.log"]
    done = run(tmp_path, *argv, str(program), ".", env=slurm | {"SLOW": "0.3"})
    job = done.stdout.split()[-1]

    def slurms(*words: str) -> str:
        return subprocess.run(words, env=clean_env(slurm), capture_output=True, text=True).stdout.strip()

    def log() -> str:
        return (tmp_path / "job.log").read_text() if (tmp_path / "job.log").exists() else ""

    wait_until((tmp_path / "done").exists, "the run did not begin", 240)
    slurms("scancel", *(["--signal=USR1"] if how == "told" else []), job)
    wait_until(lambda: "ending with status 75" in log(), f"the run did not save itself: {log()}", 120)
    if how == "told":
        wait_until((tmp_path / "result.json").exists, f"the job did not run again: {log()}", 300)
        begun = [json.loads(line)["resumed"] for line in log().splitlines() if line.startswith('{"rank"')]
        assert begun[:2] == [0, 0]
        assert begun[2] == begun[3] > 0
    wait_until(lambda: not slurms("squeue", "--noheader"), "the job is still in the queue", 120)
    assert (tmp_path / "result.json").exists() is (how == "told")


@pytest.fixture
def two_networks() -> Iterator[list[tuple[str, str, str]]]:
    """Two network namespaces that reach each other: name, address and interface of each."""
    if shutil.which("ip") is None or shutil.which("unshare") is None or not ROOT:
        pytest.skip("needs iproute2 and unshare, as root")
    mark = f"{os.getpid() % 100000}"
    sides = [
        (f"accel{mark}{side}", f"10.{int(mark) % 200 + 20}.7.{n}", f"ve{mark}{side}")
        for n, side in ((1, "a"), (2, "b"))
    ]

    def ip(*argv: str) -> None:
        subprocess.run(["ip", *argv], check=True, capture_output=True, text=True)

    try:
        try:
            for name, _, _ in sides:
                ip("netns", "add", name)
            ip("link", "add", sides[0][2], "type", "veth", "peer", "name", sides[1][2])
            for name, address, interface in sides:
                ip("link", "set", interface, "netns", name)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
                ip("-n", name, "link", "set", interface, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield sides
    finally:
        for name, _, interface in sides:
            subprocess.run(["ip", "-n", name, "link", "del", interface], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def launched_on(
    networks: list[tuple[str, str, str]], folder: Path, *argv: str, env: Mapping[str, str] | None = None
) -> list[tuple[int, str, str]]:
    """Starts a launcher in each network, all as machines of one job; gives the status, output and errors of each.

    Each has a host name of its own, which nobody knows, so that neither takes the other for itself.
    """
    shared = [*argv[:-1], "--main_process_ip", networks[0][1], "--main_process_port", "29500"]
    made = [
        subprocess.Popen(
            [*_inside(name), *LAUNCH, *shared, "--machine_rank", str(rank), argv[-1]],
            cwd=folder,
            env=clean_env(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, (name, _, _) in enumerate(networks)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in made]
    finally:
        for process in made:
            process.kill()
    return [(process.returncode, *said) for process, said in zip(made, outputs, strict=True)]


def _inside(network: str) -> list[str]:
    """The beginning of a command that is to run on the machine with this network."""
    return ["ip", "netns", "exec", network, "unshare", "--uts", "sh", "-c", f'hostname {network}; exec "$@"', "sh"]


@pytest.mark.parametrize("elastic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_machines_in_networks_of_their_own_form_one_job(
    elastic: bool, two_networks: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(MEET)
    many = ["--rdzv_backend", "c10d", "--nnodes", "2"] if elastic else ["--num_machines", "2"]
    ended = launched_on(two_networks, tmp_path, *many, "--num_processes", "2", "train.py")
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert met("".join(out for _, out, _ in ended)), ended


ALONE = """
import sys
import torch
from accel import Accelerator
accelerator = Accelerator(strategy=sys.argv[1])
model, _ = accelerator.prepare(torch.nn.Linear(4, 4), None)
if accelerator.is_main_process:
    accelerator.save_state("saved")
accelerator.wait_for_everyone()
accelerator.load_state("saved")
accelerator.end_training()
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_main_process_of_two_machines_saves_by_itself_or_is_refused_everywhere(
    strategy: str, two_networks: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    (tmp_path / "run.py").write_text(f"import runpy, sys; sys.argv[1:] = [{strategy!r}]; runpy.run_path('train.py')")
    began = time.monotonic()
    ended = launched_on(two_networks, tmp_path, "--num_machines", "2", "--num_processes", "2", "run.py")
    if strategy == "ddp":
        assert [status for status, _, _ in ended] == [0, 0], ended
        assert "".join(out for _, out, _ in ended).count("done") == 2, ended
        assert not any("frame #" in err for _, _, err in ended), ended
        return
    assert all(status for status, _, _ in ended), ended
    assert "rank 1 did not come to save_state" in ended[0][2], ended
    assert re.search("rank 0 failed on machine 0|rank 1 did not come to save_state", ended[1][2]), ended
    assert time.monotonic() - began < 50, "the main process sees that rank 1 is elsewhere, and does not wait for it"


PART = """
import os, signal, sys, time
import torch
from accel import Accelerator
accelerator = Accelerator()
accelerator.gather(torch.ones(2))
accelerator.wait_for_everyone()
began = time.monotonic()
if accelerator.process_index == 1:
    if sys.argv[1] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    accelerator.wait_for_everyone()  # waits here
try:
    accelerator.reduce(torch.ones(3))
except Exception as error:
    print(f"told after {time.monotonic() - began:.1f} s: {error}", flush=True)
    raise
"""


@pytest.mark.parametrize("how", ["stop", pytest.param("other", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_rank_is_told_of_one_on_another_machine_that_will_not_come(
    how: str, two_networks: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    """The doctors of different machines know each other's records by the store, not by memory."""
    (tmp_path / "train.py").write_text(PART)
    (tmp_path / "run.py").write_text(f"import runpy, sys; sys.argv[1:] = [{how!r}]; runpy.run_path('train.py')")
    argv = ["--num_machines", "2", "--num_processes", "2", "--grace_period", "1", "run.py"]
    ended = launched_on(two_networks, tmp_path, *argv)
    assert all(status for status, _, _ in ended), ended
    told = re.search(r"told after ([\d.]+) s: (.*)", ended[0][1], re.DOTALL)
    assert told is not None, ended
    print(f"told after {told[1]} s")
    assert float(told[1]) < 30
    lines = (tmp_path / "train.py").read_text().splitlines()
    waits = next(number for number, line in enumerate(lines, 1) if line.endswith("# waits here"))
    first, *others = told[2].splitlines()
    assert "rank 1 will not come" in first
    seen = {"stop": "rank 1 has not been heard of for", "other": f"train.py:{waits}"}[how]
    assert any(seen in line for line in others if line.strip().startswith("rank 1")), told[2]
