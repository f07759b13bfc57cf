"""Settings of the processes to start: number, devices, machines and output."""

# ruff: noqa: RUF009

from dataclasses import dataclass
from datetime import timedelta

from accel_launch.config.setting import Facts, setting

_PLACE, _PROCESSES, _MACHINES, _CLUSTER, _PROGRAM, _OUTPUT = (
    "Devices",
    "Processes",
    "Several machines",
    "Clusters",
    "Program",
    "Output and endings",
)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ProcessSettings:
    """Processes of one machine, and their devices."""

    cpu: bool = setting(
        False,
        Facts(
            "Train on the CPU even where there is an accelerator.",
            _PLACE,
            env=("ACCELERATE_USE_CPU",),
            aliases=("use_cpu",),
        ),
    )
    device: str | None = setting(
        None, Facts("Device of each process, like cuda or cuda:1.", _PLACE, env=("ACCELERATE_TORCH_DEVICE",))
    )
    multi_gpu: bool = setting(
        False, Facts("Insist on two or more processes on accelerators.", _PLACE, launch_only=True)
    )
    gpu_ids: str | None = setting(
        None, Facts("Accelerators to use: all, or indices like 0,1.", _PLACE, launch_only=True, listed=True)
    )
    enable_cpu_affinity: bool = setting(
        False,
        Facts(
            "Each process keeps to the cores next to its GPU, or to its share of them where there is none.",
            _PLACE,
            env=("ACCELERATE_CPU_AFFINITY",),
        ),
    )
    num_processes: int | None = setting(
        None,
        Facts(
            "Processes on all machines together; if not given, one per accelerator, or one on a CPU.",
            _PROCESSES,
            minimum=1,
            launch_only=True,
        ),
    )
    num_cpu_threads_per_process: int | None = setting(
        None,
        Facts(
            "OMP_NUM_THREADS of each process; if not given and not set, the cores are shared out.",
            _PROCESSES,
            minimum=1,
            launch_only=True,
        ),
    )
    max_restarts: int = setting(
        0,
        Facts(
            "How often all processes are started again after one has failed.", _PROCESSES, minimum=0, launch_only=True
        ),
    )
    monitor_interval: float = setting(
        0.1, Facts("Seconds between two looks at the processes.", _PROCESSES, minimum=0.01, launch_only=True)
    )
    module: bool = setting(
        False, Facts("The program is a module, as in python -m.", _PROGRAM, short="-m", launch_only=True)
    )
    no_python: bool = setting(
        False, Facts("The program is not Python: run it as a command.", _PROGRAM, launch_only=True)
    )
    compat: bool = setting(
        False,
        Facts("The program's import accelerate is accel (needs accel-compat).", _PROGRAM, launch_only=True),
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class MachineSettings:
    """Machines of one job, each with a launcher of its own."""

    num_machines: int = setting(1, Facts("Machines of this job.", _MACHINES, minimum=1, launch_only=True))
    nnodes: str | None = setting(
        None,
        Facts(
            "Machines of this job, or how few and how many, like 1:4: then they may come and go.",
            _MACHINES,
            choices=("1:2", "1:4"),
            pattern=r"[1-9]\d*(:[1-9]\d*)?",
            launch_only=True,
        ),
    )
    machine_rank: int = setting(0, Facts("Which machine this is, from 0.", _MACHINES, minimum=0, launch_only=True))
    main_process_ip: str | None = setting(
        None, Facts("Address of machine 0, as the others reach it.", _MACHINES, launch_only=True)
    )
    main_process_port: int | None = setting(
        None,
        Facts(
            "Port of machine 0 on which the processes find each other; 0 or not given takes a free one.",
            _MACHINES,
            minimum=0,
            maximum=65535,
            launch_only=True,
        ),
    )
    same_network: bool = setting(
        True,
        Facts(
            "The machines are in one network: gloo takes the interface by which main_process_ip is reached, else the "
            "one that the host's name stands for.",
            _MACHINES,
            launch_only=True,
        ),
    )
    rdzv_backend: str = setting(
        "static",
        Facts(
            "How machines meet: static has the ranks given, c10d gives ranks to those that come.",
            _MACHINES,
            choices=("static", "c10d"),
            launch_only=True,
        ),
    )
    rdzv_conf: str | None = setting(
        None,
        Facts(
            "Options of c10d: last_call_timeout=5,keep_alive_interval=5,keep_alive_max_attempt=3,join_timeout=900.",
            _MACHINES,
            listed=True,
            launch_only=True,
        ),
    )
    join_timeout: timedelta = setting(
        timedelta(minutes=15),
        Facts("How long to wait for the other machines, at the start and at a restart.", _MACHINES, launch_only=True),
    )
    hostfile: str | None = setting(
        None,
        Facts(
            "Machines, one 'name slots=N' a line; a launcher is started on each from here over SSH.",
            _CLUSTER,
            launch_only=True,
        ),
    )
    ssh_args: str | None = setting(
        None, Facts("More arguments for ssh, like '-p 2222 -i key'.", _CLUSTER, needs="hostfile", launch_only=True)
    )
    mpirun_hostfile: str | None = setting(
        None,
        Facts(
            "Machines for mpirun, which then starts the processes.",
            _CLUSTER,
            section="mpirun_config",
            launch_only=True,
        ),
    )
    mpirun_args: str | None = setting(
        None,
        Facts("More arguments for mpirun, like --oversubscribe.", _CLUSTER, needs="mpirun_hostfile", launch_only=True),
    )
    slurm: bool = setting(
        False, Facts("Write an sbatch script for this launch and submit it.", _CLUSTER, launch_only=True)
    )
    slurm_script: str | None = setting(
        None,
        Facts("Where the script is kept; accel_<job>.sbatch if not given.", _CLUSTER, needs="slurm", launch_only=True),
    )
    slurm_args: str | None = setting(
        None,
        Facts(
            "More options of sbatch, like '--partition=gpu --time=8:00:00 --gpus-per-node=8'.",
            _CLUSTER,
            needs="slurm",
            launch_only=True,
        ),
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class OutputSettings:
    """Output of the processes, and handling of their exits."""

    prefix_output: bool = setting(
        False, Facts("Write the rank before each line that a process prints.", _OUTPUT, launch_only=True)
    )
    tee: str = setting(
        "0",
        Facts(
            "Streams that get the rank before each line and go to log_dir: 1 stdout, 2 stderr, 3 both, 0 none; or by "
            "local rank, like 0:3,1:2.",
            _OUTPUT,
            short="-t",
            choices=("0", "1", "2", "3"),
            pattern=r"\d+:[0-3](,\d+:[0-3])*",
            launch_only=True,
        ),
    )
    role: str = setting(
        "default",
        Facts("Name of this job's processes, written before their lines and in ROLE_NAME.", _OUTPUT, launch_only=True),
    )
    log_dir: str | None = setting(
        None, Facts("Folder that also receives what each process prints, a file per rank.", _OUTPUT, launch_only=True)
    )
    quiet: bool = setting(
        False,
        Facts(
            "Of a failure, print the first traceback only; no notes about restarts.",
            _OUTPUT,
            short="-q",
            launch_only=True,
        ),
    )
    grace_period: timedelta = setting(
        timedelta(seconds=10),
        Facts("How long the processes may take to end before they are killed.", _OUTPUT, minimum=0, launch_only=True),
    )
    end_with_stdin: bool = setting(
        False,
        Facts(
            "End the job when the launcher's input ends, as it does with an SSH connection.", _OUTPUT, launch_only=True
        ),
    )
