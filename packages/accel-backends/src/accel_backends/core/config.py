"""Options of a backend, whose class selects the backend, and the settings that they imply."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar, Self, final

from accel_precision.options import KwargsHandler
from accel_state.errors import ConfigError


@final
@dataclass(frozen=True, slots=True)
class Implied:
    """Value that a backend's options imply for a setting of the Accelerator, and where the value is written."""

    value: object
    origin: str


@final
@dataclass(frozen=True, slots=True)
class WholeForm:
    """Form of a full state dict: on the host or on the device, on rank 0 or on every rank."""

    offload_to_cpu: bool = True
    rank0_only: bool = True


@dataclass(slots=True)
class BackendConfig(KwargsHandler):
    """Base of the options of a backend.

    ``backend`` is the backend's entry-point name. ``needs_ranks``: the backend is of no use with one process, so that a
    script that passes these options runs in a single process without the backend.
    """

    backend: ClassVar[str] = ""
    needs_ranks: ClassVar[bool] = False

    @classmethod
    def build(cls, values: "Self | Mapping[str, Any] | None" = None) -> Self:
        """Returns ``values`` if they are such options already; otherwise builds the options from a mapping.

        Raises:
            ConfigError: options of another backend, or an unknown field, with the nearest known one.
        """
        if values is None:
            return cls()
        if isinstance(values, cls):
            return values
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"options of type {type(values).__name__}; expected {cls.__name__} or a mapping of its fields"
            )
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                near = get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"{cls.__name__} has no field {name!r}; fields: {', '.join(known) or 'none'}{hint}")
        return cls(**values)

    def on(self, device_type: str) -> "BackendConfig":
        """Returns the equivalent options for devices of this type. Default: these options.

        Raises:
            ConfigError: an option has no equivalent there.
        """
        return self

    @property
    def state_form(self) -> WholeForm | None:
        """Form of full model state dicts. Default: None, every rank has full tensors already."""
        return None

    @property
    def optimizer_state_form(self) -> WholeForm | None:
        """Form of full optimizer state dicts. Default: None, every rank has full tensors already."""
        return None

    def settled(self, options: Mapping[str, Any]) -> "Self | None":
        """Returns these options with the planner's choice; None if the user set another value.

        Default: nothing to plan.
        """
        return None

    def implied(self) -> Mapping[str, Implied]:
        """Returns the values that these options imply for the Accelerator's own settings, by name. Default: none."""
        return {}


@dataclass(slots=True)
class SingleConfig(BackendConfig):
    """Options of training on one device: none."""

    backend: ClassVar[str] = "single"
