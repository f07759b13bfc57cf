"""Options of the backend for XLA devices."""

from dataclasses import dataclass
from typing import ClassVar

from accel_backends.core.config import BackendConfig
from accel_state.errors import ConfigError


@dataclass(slots=True)
class XLAConfig(BackendConfig):
    """Options of sharding over XLA devices.

    Attributes:
        shard_parameters: shard every parameter, gradient and optimizer state over the devices; the compiler all-gathers
            the parameters of a layer (torch_xla's FSDPv2). False: each device holds all of them.
        min_shard_size: parameters of fewer elements are replicated.
        quiet_steps: optimizer steps in which compilations are expected; each later one is reported with its step.

    Values may be texts, as given on a command line.

    Raises:
        ConfigError: a text that is no truth value, or a negative number.
    """

    backend: ClassVar[str] = "xla"

    shard_parameters: bool = False
    min_shard_size: int = 0
    quiet_steps: int = 2

    def __post_init__(self) -> None:
        from accel_backends.core.option_parsing import as_flag, as_number

        self.shard_parameters = as_flag("shard_parameters", self.shard_parameters)
        for name in ("min_shard_size", "quiet_steps"):
            value = as_number(name, getattr(self, name))
            if value < 0:
                raise ConfigError(f"{name} is {value}; it must be a whole number of at least 0")
            setattr(self, name, value)
