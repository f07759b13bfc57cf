"""The settings table: one resolved configuration with the origin of every value."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Literal, final

from accel_launch.config.sections.deepspeed import DeepSpeedSettings
from accel_launch.config.sections.fsdp import FSDPSettings
from accel_launch.config.sections.launching import MachineSettings, OutputSettings, ProcessSettings
from accel_launch.config.sections.megatron import MegatronSettings
from accel_launch.config.sections.parallelism import ParallelismSettings
from accel_launch.config.sections.tpu import TPUSettings
from accel_launch.config.sections.training import CompilationSettings, Fp8Settings, TrainingSettings
from accel_launch.config.setting import Setting, nearest, settings_of
from accel_state.errors import ConfigError

Source = Literal["call", "flag", "env", "file", "default"]

PRECEDENCE: tuple[Source, ...] = ("call", "flag", "env", "file", "default")
"""Sources in order of precedence, strongest first."""

DOCUMENT_VARIABLE = "ACCEL_CONFIG"
"""Variable in which the launcher passes the configuration, with its origins, to the processes that it starts."""

FILE_VARIABLE = "ACCEL_CONFIG_FILE"
"""Variable that names a configuration file if ``--config_file`` does not. No other file is ever read."""


@final
@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a value: kind of source, and detail (a flag, a variable, ``path:line``)."""

    source: Source
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.source} {self.detail}".rstrip()


@final
@dataclass(frozen=True, slots=True)
class SettingExplanation:
    """One line of ``accel config show``."""

    name: str
    value: object
    origin: Origin
    help: str


@final
@dataclass(frozen=True, kw_only=True)
class AccelConfig(
    TrainingSettings,
    CompilationSettings,
    Fp8Settings,
    ProcessSettings,
    MachineSettings,
    OutputSettings,
    ParallelismSettings,
    FSDPSettings,
    DeepSpeedSettings,
    MegatronSettings,
    TPUSettings,
):
    """Resolved configuration, made by ``resolve_config``. If constructed directly, every value counts as a default.

    Each field is one row of the table from which resolution, flags, their help and ``accel config show`` derive. The
    rows are in ``accel_launch.config.sections``, whose classes are shown in the order of the bases below. Fields marked
    ``launch_only`` affect ``accel launch`` and have no meaning for the training script.
    """

    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False, compare=False)

    def origin(self, name: str) -> Origin:
        """Origin of the value of ``name``.

        Raises:
            ConfigError: ``name`` is not a setting; the message names the nearest one.
        """
        known_setting(name, "asked for its origin")
        return self.origins.get(name, Origin("default"))

    def explain(self) -> tuple[SettingExplanation, ...]:
        """Every setting with its value and origin, in the order of the table."""
        return tuple(
            SettingExplanation(row.name, getattr(self, row.name), self.origin(row.name), row.facts.help)
            for row in settings().values()
        )

    def is_given(self, name: str) -> bool:
        """Whether ``name`` was given a value by any source but the default."""
        return self.origin(name).source != "default"

    def is_on(self, needed: str) -> bool:
        """Whether ``needed``, a name or ``name=value`` as in ``Facts.needs``, holds, and all settings that it needs."""
        name, equals, value = needed.partition("=")
        row = known_setting(name, "needed by another setting")
        mine = getattr(self, name)
        holds = row.text(mine) == value if equals else row.is_on(mine)
        return holds and (not row.facts.needs or self.is_on(row.facts.needs))

    def variables(self) -> dict[str, str]:
        """Variables from which other code reads given settings: ``FSDP_VERSION``, ``ACCELERATE_MIXED_PRECISION``, ...

        Our own settings are passed in one document; a script's plugins, and libraries that support Accelerate,
        read these.
        """
        given = (row for row in settings().values() if row.facts.env and self.is_given(row.name))
        made = {row.facts.env[0]: row.text(getattr(self, row.name)) for row in given if self._means_something(row)}
        return spread(made)

    def _means_something(self, row: Setting) -> bool:
        return getattr(self, row.name) is not None and (not row.facts.needs or self.is_on(row.facts.needs))

    def to_document(self) -> str:
        """Formats the values that are not defaults, with their origins, as JSON: the contents of ``ACCEL_CONFIG``."""
        rows = settings()
        chosen = {name: origin for name, origin in self.origins.items() if origin.source != "default"}
        values = {name: rows[name].dump(getattr(self, name)) for name in chosen}
        origins = {name: [origin.source, origin.detail] for name, origin in chosen.items()}
        return json.dumps({"version": 1, "values": values, "origins": origins}, sort_keys=True, separators=(",", ":"))


_OVERRIDES = "ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION"


def spread(variables: dict[str, str]) -> dict[str, str]:
    """Returns the variables in the form that their readers expect: one of them is split into its three parts."""
    if _OVERRIDES not in variables:
        return variables
    values = variables[_OVERRIDES].split(",")
    parts = {f"ACCELERATE_FP8_OVERRIDE_{part}": v for part, v in zip(("FPROP", "DGRAD", "WGRAD"), values, strict=True)}
    return {name: value for name, value in variables.items() if name != _OVERRIDES} | parts


@cache
def settings() -> Mapping[str, Setting]:
    """The settings table: every setting by name."""
    return MappingProxyType(
        {name: row for section in AccelConfig.__bases__ for name, row in settings_of(section).items()}
    )


def known_setting(name: str, where: str) -> Setting:
    """Returns the setting called ``name``.

    Raises:
        ConfigError: there is none; names what was given, ``where`` it stands and the nearest known name.
    """
    if name in settings():
        return settings()[name]
    close = nearest(name, settings())
    hint = f"did you mean {close}?" if close else f"known: {', '.join(settings())}"
    raise ConfigError(f"unknown setting {name!r} ({where}); {hint}")
