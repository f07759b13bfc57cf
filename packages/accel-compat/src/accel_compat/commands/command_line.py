"""The ``accelerate`` command over ``accel``: subcommands under Accelerate's names, with its defaults."""

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accel_compat.finder import VERSION
from accel_launch.cli.app import run
from accel_state.environment import str_to_bool

_HELP = ("-h", "--help")
_SELF_TEST = "accel_compat.commands.self_test"


def main() -> int:
    """Runs ``accelerate ARGUMENTS`` and returns its exit status."""
    return run_command(sys.argv[1:])


def run_command(argv: Sequence[str]) -> int:
    """Runs a command of ``accelerate``, given without the program's name, and returns its exit status."""
    name, *rest = argv or ["--help"]
    own = _COMMANDS.get(name)
    if own is None or any(word in _HELP for word in rest[:1]):
        return run([name, *rest])
    return own(rest)


def default_file(env: Mapping[str, str]) -> Path:
    """File of settings that ``accelerate config`` writes and ``accelerate launch`` reads if no file is named."""
    cache = Path(env.get("XDG_CACHE_HOME", "~/.cache"))
    folder = Path(env.get("HF_HOME", cache / "huggingface")).expanduser() / "accelerate"
    as_json = folder / "default_config.json"
    return as_json if as_json.is_file() else folder / "default_config.yaml"


def existing_default(env: Mapping[str, str]) -> str | None:
    """Path of ``default_file``, or None if there is no such file."""
    path = default_file(env)
    return str(path) if path.is_file() else None


def launch_words(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Returns the arguments of ``accel launch`` for those of ``accelerate launch``.

    The file of ``default_file`` is read if none is named. ``--multi_gpu`` is dropped if ``ACCELERATE_USE_CPU`` is on,
    because Accelerate then starts the processes on the CPU.
    """
    flags = [word.partition("=")[0].replace("-", "_") for word in before_script(words)]
    made = ["launch", "--compat"]
    if "__config_file" not in flags and (file := existing_default(env)) is not None:
        made += ["--config_file", file]
    on_cpu = str_to_bool(env.get("ACCELERATE_USE_CPU") or "no")
    if on_cpu and "__multi_gpu" in flags:
        place = flags.index("__multi_gpu")
        return [*made, *words[:place], *words[place + 1 :]]
    return [*made, *words]


def before_script(words: Sequence[str]) -> Sequence[str]:
    """The launcher's own words; options behind the script are the script's, also under the same names."""
    from accel_launch.cli.launch import launch as command

    read = command.make_context(
        "launch", list(words), resilient_parsing=True, token_normalize_func=lambda name: name.replace("-", "_")
    )
    return words[: len(words) - len(read.params["program"])]


def _launch(words: Sequence[str]) -> int:
    return run(launch_words(words, os.environ))


def _test(words: Sequence[str]) -> int:
    """Runs a check of the settings in the processes that they ask for."""
    return run(launch_words([*words, "-m", _SELF_TEST], os.environ))


def _config(words: Sequence[str]) -> int:
    """Writes a file: asks, or with the word ``default``, takes the defaults; another subcommand is accel's own."""
    subcommands = [word for word in words if not word.startswith("-")][:1]
    if subcommands not in ([], ["default"]) and words[0] in subcommands:
        return run(["config", *words])
    path = Path(_option(words, "--config_file") or default_file(os.environ))
    if words[:1] != ["default"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        return run(["config", "--config_file", str(path)])
    if path.exists():
        print(f"Configuration already exists at {path}, will not override. Run `accelerate config` manually.")
        return 0
    from accel_compat.commands.config_files import write_basic_config

    try:
        write_basic_config(_option(words, "--mixed_precision") or "no", path)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"accelerate configuration saved at {path}")
    return 0


def _env(words: Sequence[str]) -> int:
    print(f"- `Accelerate` version: {VERSION}, offered by accel-compat\n- Python version: {platform.python_version()}")
    return run(["env", *words])


def _estimate(words: Sequence[str]) -> int:
    from accel_compat.commands.hub_models import local_model

    with local_model(words) as arguments:
        return run(["estimate-memory", *arguments])


def _merge(words: Sequence[str]) -> int:
    """Merges shards of torch's distributed checkpoints; other folders are those of accel, which its own command exports."""
    from accel_compat.commands.other_commands import merge_command, merge_command_parser

    source = next((word for word in words if not word.startswith("-")), "")
    if not (Path(source) / ".metadata").is_file():
        return run(["merge-weights", *words])
    merge_command(merge_command_parser().parse_args(words))
    return 0


def _option(words: Sequence[str], name: str) -> str | None:
    """Value of an option, given as ``--name value`` or ``--name=value``, also with hyphens."""
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and f"--{flag[2:].replace('-', '_')}" == name:
            return value if equals else next(iter(words[place + 1 :]), None)
    return None


_COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "launch": _launch,
    "test": _test,
    "config": _config,
    "env": _env,
    "estimate-memory": _estimate,
    "merge-weights": _merge,
}


def _single(name: str) -> Any:
    """Returns the function behind ``accelerate-NAME`` and ``python -m accelerate.commands.NAME``."""
    return partial(_run_named, name)


def _run_named(name: str) -> int:
    return run_command([name, *sys.argv[1:]])


launch = _single("launch")
config = _single("config")
env = _single("env")
test = _single("test")
estimate = _single("estimate-memory")
merge = _single("merge-weights")
tpu = _single("tpu-config")
to_fsdp2 = _single("to-fsdp2")
