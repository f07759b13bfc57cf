"""The table of settings: one resolved configuration that knows where every value came from."""

# ruff: noqa: RUF009  - setting() returns a dataclass field, as dataclasses.field() does.

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from types import MappingProxyType
from typing import Literal, final

from accel.config.setting import Facts, Setting, nearest, setting, settings_of
from accel_state.errors import ConfigError

Source = Literal["call", "flag", "env", "file", "default"]

PRECEDENCE: tuple[Source, ...] = ("call", "flag", "env", "file", "default")
"""Who wins, strongest first."""

DOCUMENT_VARIABLE = "ACCEL_CONFIG"
"""The one variable in which the launcher hands a configuration, with its origins, to the processes it starts."""

FILE_VARIABLE = "ACCEL_CONFIG_FILE"
"""Names a configuration file where no ``--config_file`` does. A file that nobody named is never read."""


@final
@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: the kind of source, and which one (a flag, a variable, ``path:line``)."""

    source: Source
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.source} {self.detail}".rstrip()


@final
@dataclass(frozen=True, slots=True)
class Explanation:
    """One line of ``accel config show``."""

    name: str
    value: object
    origin: Origin
    help: str


# Other names of precisions, and roles. accel_precision reads them, and cannot be asked here: it needs torch.
_PRECISIONS = r"none|half|double|fp32|fp64|(fp|bf)?16-mixed|(16|32|64)-true|32|64|.*=.*"
_TRAIN, _PLACE, _PROCESSES, _MACHINES, _PROGRAM, _OUTPUT = (
    "Training",
    "Devices",
    "Processes",
    "Several machines",
    "Program",
    "Output and endings",
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AccelConfig:
    """One resolved configuration. Made by ``resolve_config``; built directly, every value counts as a default.

    Each field is one row of the table from which resolving, flags, their help and ``accel config show`` derive.
    Fields marked ``launch_only`` steer ``accel launch`` and mean nothing to the training script.
    """

    mixed_precision: str = setting(
        "no",
        Facts(
            "Precision of the computation; also roles, like compute=bf16,reduce=fp32.",
            _TRAIN,
            choices=("no", "fp16", "bf16", "fp8", "fp16-true", "bf16-true", "fp32-true", "fp64-true"),
            pattern=_PRECISIONS,
            env=("ACCELERATE_MIXED_PRECISION",),
        ),
    )
    gradient_accumulation_steps: int = setting(
        1,
        Facts(
            "Micro-batches per optimizer step.",
            _TRAIN,
            minimum=1,
            env=("ACCELERATE_GRADIENT_ACCUMULATION_STEPS",),
        ),
    )
    seed: int | None = setting(None, Facts("Seeds Python, NumPy and torch.", _TRAIN, minimum=0, maximum=2**63 - 1))
    project_dir: str | None = setting(None, Facts("Folder for checkpoints and logs of trackers.", _TRAIN))
    backend: str | None = setting(
        None, Facts("Training backend by name (single, ddp, ...); chosen from what there is if not given.", _TRAIN)
    )
    debug: bool = setting(
        False,
        Facts(
            "Check operation, structure, shape and dtype on all ranks before each collective.",
            _TRAIN,
            env=("ACCELERATE_DEBUG_MODE",),
        ),
    )
    log_level: str | None = setting(
        None,
        Facts(
            "Level of accel's own loggers.",
            _TRAIN,
            choices=("debug", "info", "warning", "error", "critical"),
            env=("ACCELERATE_LOG_LEVEL",),
        ),
    )
    timeout: timedelta | None = setting(
        None, Facts("How long a collective waits for the other ranks.", _TRAIN, minimum=0.001)
    )
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
        None, Facts("Accelerators to use: all, or indices like 0,1.", _PLACE, launch_only=True)
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
    num_machines: int = setting(1, Facts("Machines of this job.", _MACHINES, minimum=1, launch_only=True))
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
    join_timeout: timedelta = setting(
        timedelta(minutes=15),
        Facts("How long to wait for the other machines, at the start and at a restart.", _MACHINES, launch_only=True),
    )
    module: bool = setting(
        False, Facts("The program is a module, as in python -m.", _PROGRAM, short="-m", launch_only=True)
    )
    no_python: bool = setting(
        False, Facts("The program is not Python: run it as a command.", _PROGRAM, launch_only=True)
    )
    prefix_output: bool = setting(
        False, Facts("Write the rank before each line that a process prints.", _OUTPUT, launch_only=True)
    )
    log_dir: str | None = setting(
        None, Facts("Folder that also receives what each process prints, a file per rank.", _OUTPUT, launch_only=True)
    )
    grace_period: timedelta = setting(
        timedelta(seconds=10),
        Facts("How long the processes may take to end before they are killed.", _OUTPUT, minimum=0, launch_only=True),
    )
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False, compare=False)

    def origin(self, name: str) -> Origin:
        """Where the value of ``name`` came from.

        Raises:
            ConfigError: for a name that is no setting, with the nearest that is.
        """
        known_setting(name, "asked for its origin")
        return self.origins.get(name, Origin("default"))

    def explain(self) -> tuple[Explanation, ...]:
        """Every setting with its value and origin, in the order of the table."""
        return tuple(
            Explanation(row.name, getattr(self, row.name), self.origin(row.name), row.facts.help)
            for row in settings().values()
        )

    def to_document(self) -> str:
        """The values that are not defaults, with their origins, as JSON: what travels in ``ACCEL_CONFIG``."""
        rows = settings()
        chosen = {name: origin for name, origin in self.origins.items() if origin.source != "default"}
        values = {name: rows[name].dump(getattr(self, name)) for name in chosen}
        origins = {name: [origin.source, origin.detail] for name, origin in chosen.items()}
        return json.dumps({"version": 1, "values": values, "origins": origins}, sort_keys=True, separators=(",", ":"))


@cache
def settings() -> Mapping[str, Setting]:
    """The table itself: every setting by name."""
    return MappingProxyType(settings_of(AccelConfig))


def known_setting(name: str, where: str) -> Setting:
    """The setting called ``name``.

    Raises:
        ConfigError: naming what was given, ``where`` it stands and the nearest known name.
    """
    if name in settings():
        return settings()[name]
    close = nearest(name, settings())
    hint = f"did you mean {close}?" if close else f"known: {', '.join(settings())}"
    raise ConfigError(f"unknown setting {name!r} ({where}); {hint}")
