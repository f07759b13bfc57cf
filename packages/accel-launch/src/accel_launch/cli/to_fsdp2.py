"""``accel to-fsdp2``."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import rich_click as click

from accel_state.errors import ConfigError

_RESHARD: Mapping[str, bool] = MappingProxyType(
    {
        "FULL_SHARD": True,
        "SHARD_GRAD_OP": False,
        "HYBRID_SHARD": True,
        "HYBRID_SHARD_ZERO2": False,
        "NO_SHARD": False,
        **{str(number): number in (1, 4) for number in range(1, 6)},
    }
)
_GONE = MappingProxyType(
    {
        "fsdp_backward_prefetch": "FSDP2 always gathers the next unit in backward",
        "fsdp_sync_module_states": "FSDP2 starts from rank 0's values by itself",
        "fsdp_use_orig_params": "parameters always keep their names in FSDP2",
        "fsdp_forward_prefetch": "FSDP2 overlaps gathering by itself",
    }
)
_SECTION, _VERSION, _STRATEGY, _RESHARDING = (
    "fsdp_config",
    "fsdp_version",
    "fsdp_sharding_strategy",
    "fsdp_reshard_after_forward",
)


@click.command("to-fsdp2")
@click.option("--config_file", required=True, metavar="PATH", help="The file to convert.")
@click.option("--overwrite", is_flag=True, help="Write the result over the file (or over --output_file).")
@click.option("--output_file", metavar="PATH", help="Where to write the result.")
def to_fsdp2(config_file: str, *, overwrite: bool, output_file: str | None) -> int:
    """Converts the fsdp_config of one of Accelerate's files, or accel's own FSDP settings, from version 1 to version 2.
    Options that version 2 does not have are left out and reported.
    """
    if not overwrite and output_file is None:
        raise ConfigError("nowhere to write: give --output_file PATH, or --overwrite to convert the file itself")
    source, target = Path(config_file), Path(output_file or config_file)
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} exists; name another file, or give --overwrite")
    converted, notes = convert(read_settings(source))
    for note in notes:
        click.echo(f"note: {note}", err=True)
    write_settings(target, converted)
    print(f"wrote {target}")
    return 0


def read_settings(source: Path) -> dict[str, object]:
    """Reads the entries of a file of settings, YAML or JSON.

    Raises:
        ConfigError: the file cannot be read, or is no mapping.
    """
    import yaml

    try:
        data = yaml.safe_load(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} is no YAML or JSON: {error}") from error
    if not isinstance(data, dict):
        found = "empty" if data is None else "a list" if isinstance(data, list) else f"the single value {data!r}"
        raise ConfigError(f"{source} is {found}; expected lines of the form 'name: value'")
    return data


def write_settings(target: Path, data: Mapping[str, object]) -> None:
    """Replaces a file of settings atomically, as YAML in the order of ``data``.

    Raises:
        ConfigError: the file cannot be written.
    """
    import yaml

    from accel_launch.cli.config import replace_file

    replace_file(target, yaml.safe_dump(dict(data), sort_keys=False))


def convert(data: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Converts settings to FSDP2; returns them with remarks on the changes, or unchanged data if none is needed.

    Raises:
        ConfigError: a sharding strategy that does not exist.
    """
    section = data.get(_SECTION)
    if isinstance(section, Mapping) and section:
        converted, notes = _convert({_prefixed(str(key)): value for key, value in section.items()})
        return {**data, _SECTION: converted}, notes
    if any(key.startswith("fsdp_") and key != _SECTION for key in data):
        return _convert(data)
    return dict(data), ["there is no fsdp_config; nothing was changed"]


def _prefixed(key: str) -> str:
    """Name of a setting, of which old files omit the prefix; other keys stay as they are."""
    from accel_launch.config.model import settings

    return f"fsdp_{key}" if f"fsdp_{key}" in settings() else key


def _convert(options: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    if str(options.get(_VERSION, 1)) == "2":
        return dict(options), ["this is FSDP2 already; nothing was changed"]
    made: dict[str, object] = {}
    notes = []
    for key, value in options.items():
        if key in _GONE:
            notes.append(f"{key} is left out: {_GONE[key]}")
        elif key in (_STRATEGY, _RESHARDING):
            made[_RESHARDING] = _reshard(key, value)
            notes += [f"{key}: {value} is now {_RESHARDING}: {made[_RESHARDING]}"] * (key == _STRATEGY)
        elif key != _VERSION:
            made[key] = value
    return {_VERSION: 2, **made}, notes


def _reshard(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    known: dict[str, bool] = {**_RESHARD, "TRUE": True, "FALSE": False}
    if str(value).upper() not in known:
        raise ConfigError(f"{key} is {value!r}; expected one of {', '.join(list(_RESHARD)[:5])}")
    return known[str(value).upper()]
