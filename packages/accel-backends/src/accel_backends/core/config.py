"""Options of one backend; their class names the backend."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar, Self, final

from accel_precision.options import KwargsHandler
from accel_state.errors import ConfigError


@final
@dataclass(frozen=True, slots=True)
class Implied:
    """The value that options of a backend give a setting of the Accelerator, and where it is written."""

    value: object
    origin: str


@final
@dataclass(frozen=True, slots=True)
class WholeForm:
    """How a full state is handed out: on the host or where it was gathered, to rank 0 or to every rank."""

    offload_to_cpu: bool = True
    rank0_only: bool = True


@dataclass(slots=True)
class BackendConfig(KwargsHandler):
    """Base of the options of a backend.

    ``backend`` is the backend's entry-point name. ``needs_ranks`` says that one process has no use for the backend, so
    that a script which passes such options runs on a single one all the same.
    """

    backend: ClassVar[str] = ""
    needs_ranks: ClassVar[bool] = False

    @classmethod
    def build(cls, values: "Self | Mapping[str, Any] | None" = None) -> Self:
        """The options themselves, or made of a plain mapping, as a file or a command line gives them.

        Raises:
            ConfigError: options of another backend, or a name that is no field, with the nearest that is.
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
        """The options that mean the same for devices of this type. Default: these.

        Raises:
            ConfigError: something in them cannot be had there.
        """
        return self

    @property
    def state_form(self) -> WholeForm | None:
        """How full states of models are handed out. Default: they are whole everywhere, and every rank has them."""
        return None

    @property
    def optimizer_state_form(self) -> WholeForm | None:
        """How full states of optimizers are handed out. Default: as those of models."""
        return None

    def settled(self, options: Mapping[str, Any]) -> "Self | None":
        """These options with the planner's choice; None where they have another value. Default: nothing is open."""
        return None

    def implied(self) -> Mapping[str, Implied]:
        """The values that these options give the Accelerator's own settings, by their names. Default: none."""
        return {}


@dataclass(slots=True)
class SingleConfig(BackendConfig):
    """Training on one device has no options."""

    backend: ClassVar[str] = "single"
