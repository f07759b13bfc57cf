"""The degrees of parallelism that a configuration asks for."""

from accel_launch.config.model import AccelConfig, settings
from accel_state.errors import ConfigError

_PREFIX = "parallelism_config_"


def degrees(config: AccelConfig) -> dict[str, object]:
    """The degrees that somebody gave, and the options of their axes, without their common prefix.

    ``use_parallelism_config`` turned off leaves none of them; turned on, it insists on one.

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
