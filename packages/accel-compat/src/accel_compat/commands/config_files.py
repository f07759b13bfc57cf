"""Files of ``accelerate config`` as objects: settings of a machine or cluster, and of SageMaker."""

import dataclasses
import json
import os
from enum import Enum
from pathlib import Path
from typing import Any, Self

from accel.utils import constants
from accel.utils.enums import ComputeEnvironment, SageMakerDistributedType
from accel_compat.commands.command_line import default_file
from accel_compat.state.accelerator_state import PRECISIONS
from accel_state.enums import DistributedType


def __getattr__(name: str) -> Any:
    """Default files, at the places that the environment names at this moment."""
    path = default_file(os.environ)
    places = {
        "cache_dir": path.parent,
        "default_config_file": path,
        "default_yaml_config_file": path.with_suffix(".yaml"),
        "default_json_config_file": path.with_suffix(".yaml"),  # Accelerate writes JSON, which is YAML, there
    }
    if name not in places:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return str(places[name])


@dataclasses.dataclass
class BaseConfig:
    """Settings of every kind of file; texts become members of their enumerations."""

    compute_environment: Any
    distributed_type: Any
    mixed_precision: Any
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        if isinstance(self.compute_environment, str):
            self.compute_environment = ComputeEnvironment(self.compute_environment)
        cloud = self.compute_environment == ComputeEnvironment.AMAZON_SAGEMAKER
        if isinstance(self.distributed_type, str):
            self.distributed_type = (SageMakerDistributedType if cloud else DistributedType)(self.distributed_type)
        for field in dataclasses.fields(self):
            if field.name.endswith("_config") and getattr(self, field.name) is None:
                setattr(self, field.name, {})

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values; those that are None or empty mappings are left out."""
        return {name: _plain(value) for name, value in vars(self).items() if value is not None and value != {}}

    @staticmethod
    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the entries of a file of any version with today's names, completed by defaults.

        Raises:
            ValueError: there is no ``distributed_type``.
        """
        entries = {
            "compute_environment": ComputeEnvironment.LOCAL_MACHINE,
            "mixed_precision": "fp16" if config_dict.get("fp16") else None,
            "use_cpu": False,
            "debug": False,
            "enable_cpu_affinity": False,
        } | {name: value for name, value in config_dict.items() if name != "fp16"}
        if "distributed_type" not in entries:
            raise ValueError("A `distributed_type` must be specified in the config file.")
        if entries["distributed_type"] is False:  # YAML reads a bare NO as false
            entries["distributed_type"] = "NO"
        if entries["distributed_type"] == DistributedType.NO:
            entries.setdefault("num_processes", 1)
        if "dynamo_backend" in entries:
            backend = entries.pop("dynamo_backend")
            entries["dynamo_config"] = {} if backend == "NO" else {"dynamo_backend": backend}
        return entries

    @classmethod
    def _from_file(cls, path: Any) -> Self:
        entries = cls.process_config(_entries(path))
        known = {field.name for field in dataclasses.fields(cls)}
        if not issubclass(cls, ClusterConfig):
            entries.pop("num_processes", None)
        unknown = sorted(set(entries) - known)
        if unknown:
            raise ValueError(f"The config file at {path} had unknown keys ({unknown}); correct or remove them.")
        return cls(**entries)

    @classmethod
    def from_json_file(cls, json_file: Any = None) -> Self:
        """Reads a JSON file; the default file if none is named."""
        return cls._from_file(default_file(os.environ) if json_file is None else json_file)

    @classmethod
    def from_yaml_file(cls, yaml_file: Any = None) -> Self:
        """Reads a YAML file; the default file if none is named."""
        return cls._from_file(default_file(os.environ) if yaml_file is None else yaml_file)

    def to_json_file(self, json_file: Any) -> None:
        """Writes a JSON file."""
        Path(json_file).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def to_yaml_file(self, yaml_file: Any) -> None:
        """Writes a YAML file."""
        import yaml

        Path(yaml_file).write_text(yaml.safe_dump(self.to_dict()), encoding="utf-8")


@dataclasses.dataclass
class ClusterConfig(BaseConfig):
    """Settings of this machine, or of several."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: Any = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: Any = None
    deepspeed_config: Any = None
    fsdp_config: Any = None
    parallelism_config: Any = None
    megatron_lm_config: Any = None
    mpirun_config: Any = None
    downcast_bf16: Any = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: Any = None
    tpu_vm: Any = None
    tpu_env: Any = None
    dynamo_config: Any = None


@dataclasses.dataclass
class SageMakerConfig(BaseConfig):
    """Settings of a job on SageMaker; files of this kind can be read and written, and accel starts no such job."""

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str = constants.SAGEMAKER_PYTORCH_VERSION
    transformers_version: str = constants.SAGEMAKER_TRANSFORMERS_VERSION
    py_version: str = constants.SAGEMAKER_PYTHON_VERSION
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: Any = None
    dynamo_config: Any = None
    enable_cpu_affinity: bool = False


def load_config_from_file(config_file: Any) -> ClusterConfig | SageMakerConfig:
    """Reads a file, or the default one if None is given.

    Raises:
        FileNotFoundError: the named file does not exist.
    """
    path = Path(default_file(os.environ) if config_file is None else config_file)
    if not path.is_file():
        raise FileNotFoundError(
            f"The passed configuration file `{path}` does not exist. Name an existing file, or write one with "
            "`accelerate config`."
        )
    place = _entries(path).get("compute_environment", ComputeEnvironment.LOCAL_MACHINE.value)
    kind = ClusterConfig if place == ComputeEnvironment.LOCAL_MACHINE else SageMakerConfig
    return kind.from_yaml_file(path)


def write_basic_config(mixed_precision: str = "no", save_location: Any = None) -> Path | bool:
    """Writes settings for all accelerators of this machine, and returns the path; False if the file exists.

    The file is YAML if its name ends so, otherwise JSON.

    Raises:
        ValueError: an unknown precision.
    """
    import torch

    path = Path(default_file(os.environ) if save_location is None else save_location)
    if path.exists():
        print(f"{path} exists and stays as it is; name another `save_location`.")
        return False
    if mixed_precision.lower() not in PRECISIONS:
        raise ValueError(f"`mixed_precision` is {mixed_precision!r}; expected one of {', '.join(PRECISIONS)}")
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if kind is not None else 1
    name = "NO" if kind is None or count == 1 else "MULTI_GPU" if kind.type == "cuda" else f"MULTI_{kind.type.upper()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    config = ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type=name,
        mixed_precision=mixed_precision.lower(),
        use_cpu=kind is None,
        debug=False,
        num_processes=count,
    )
    (config.to_yaml_file if path.suffix in (".yaml", ".yml") else config.to_json_file)(path)
    return path


def _entries(path: Any) -> dict[str, Any]:
    import yaml

    entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))  # JSON is YAML
    if not isinstance(entries, dict):
        raise ValueError(f"{path} is no mapping of settings; expected lines of the form 'name: value'")
    return entries


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value.value if isinstance(value, Enum) else value
