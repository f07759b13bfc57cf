"""Degrees of parallelism of a configuration."""

from accel_launch.config.model import AccelConfig, settings
from accel_state.errors import ConfigError

_PREFIX = "parallelism_config_"


def degrees(config: AccelConfig) -> dict[str, object]:
    """Given degrees, and options of their axes, without their common prefix.

    Returns no degrees if ``use_parallelism_config`` is off; if it is on, a degree above 1 is required.

    Raises:
        ConfigError: it is on, and no degree is above 1.
    """
    if config.use_parallelism_config is False:
        return {}
    names = [name for name in settings() if name.startswith(_PREFIX)]
    given = {name.removeprefix(_PREFIX): getattr(config, name) for name in names if config.is_given(name)}
    sizes = [name for name in names if name.endswith("_size")]
    if config.use_parallelism_config and all(getattr(config, name) == 1 for name in sizes):
        raise ConfigError(
            f"use_parallelism_config ({config.origin('use_parallelism_config')}) means nothing where all degrees are 1;"
            f" give one of {', '.join(sizes)}, or drop it"
        )
    return given
