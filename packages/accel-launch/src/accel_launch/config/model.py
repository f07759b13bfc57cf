"""The table of settings: one resolved configuration that knows where every value came from."""

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
    """One resolved configuration. Made by ``resolve_config``; built directly, every value counts as a default.

    Each field is one row of the table from which resolving, flags, their help and ``accel config show`` derive; they
    stand in ``accel_launch.config.sections``, whose classes are shown in the order in which they are named here.
    Fields marked ``launch_only`` steer ``accel launch`` and mean nothing to the training script.
    """

    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False, compare=False)

    def origin(self, name: str) -> Origin:
        """Where the value of ``name`` came from.

        Raises:
            ConfigError: for a name that is no setting, with the nearest that is.
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
        """Whether somebody has given ``name`` a value."""
        return self.origin(name).source != "default"

    def is_on(self, needed: str) -> bool:
        """Whether ``needed``, a name or ``name=value`` as in ``Facts.needs``, holds, and all that it needs itself."""
        name, equals, value = needed.partition("=")
        row = known_setting(name, "needed by another setting")
        mine = getattr(self, name)
        holds = row.text(mine) == value if equals else row.is_on(mine)
        return holds and (not row.facts.needs or self.is_on(row.facts.needs))

    def variables(self) -> dict[str, str]:
        """The variables by which other code reads what was given: ``FSDP_VERSION``, ``ACCELERATE_MIXED_PRECISION``, ...

        Our own settings travel in one document; plugins of a script, and libraries that know Accelerate, read these.
        """
        given = (row for row in settings().values() if row.facts.env and self.is_given(row.name))
        made = {row.facts.env[0]: row.text(getattr(self, row.name)) for row in given if self._means_something(row)}
        return spread(made)

    def _means_something(self, row: Setting) -> bool:
        return getattr(self, row.name) is not None and (not row.facts.needs or self.is_on(row.facts.needs))

    def to_document(self) -> str:
        """The values that are not defaults, with their origins, as JSON: what travels in ``ACCEL_CONFIG``."""
        rows = settings()
        chosen = {name: origin for name, origin in self.origins.items() if origin.source != "default"}
        values = {name: rows[name].dump(getattr(self, name)) for name in chosen}
        origins = {name: [origin.source, origin.detail] for name, origin in chosen.items()}
        return json.dumps({"version": 1, "values": values, "origins": origins}, sort_keys=True, separators=(",", ":"))


_OVERRIDES = "ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION"


def spread(variables: dict[str, str]) -> dict[str, str]:
    """The same variables in the form that their readers expect: the three parts of one of them apart."""
    if _OVERRIDES not in variables:
        return variables
    values = variables[_OVERRIDES].split(",")
    parts = {f"ACCELERATE_FP8_OVERRIDE_{part}": v for part, v in zip(("FPROP", "DGRAD", "WGRAD"), values, strict=True)}
    return {name: value for name, value in variables.items() if name != _OVERRIDES} | parts


@cache
def settings() -> Mapping[str, Setting]:
    """The table itself: every setting by name."""
    return MappingProxyType(
        {name: row for section in AccelConfig.__bases__ for name, row in settings_of(section).items()}
    )


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
