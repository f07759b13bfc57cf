"""``accel tpu-config``: runs commands on all machines of a TPU pod."""

from dataclasses import replace

import rich_click as click

from accel_launch.cli.options import config_file, config_from
from accel_state.errors import ConfigError

_FOLDER = "/usr/share"
_LATEST, _DEVELOPED = "latest", "dev"
_ACCELERATE = "git+https://github.com/huggingface/accelerate.git"


@click.command()
@config_file
@click.option("--tpu_name", metavar="NAME", help="Name of the pod.")
@click.option("--tpu_zone", metavar="ZONE", help="Zone of the pod.")
@click.option("--use_alpha", is_flag=True, help="Use gcloud's alpha commands.")
@click.option("--command_file", metavar="PATH", help="A file of this machine with one command in each line.")
@click.option("--command", "words", multiple=True, metavar="TEXT", help="A command; may be given several times.")
@click.option("--install_accelerate", is_flag=True, help="Install Hugging Face Accelerate there first.")
@click.option("--accelerate_version", default=_LATEST, metavar="VERSION", help="Which one: latest, dev, or a version.")
@click.option("--debug", "--dry_run", "debug", is_flag=True, help="Print gcloud's command line, and do not run it.")
def tpu_config(
    config_file: str | None,
    tpu_name: str | None,
    tpu_zone: str | None,
    command_file: str | None,
    *,
    words: tuple[str, ...],
    debug: bool,
    **options: bool | str,
) -> int:
    """Runs commands on all machines of a TPU pod, through gcloud.

    Options that are not given come from the configuration: tpu_name, tpu_zone, command_file, commands.
    """
    from accel_launch.launch.remote.tpu import pod_commands, run_gcloud, ssh_argv

    config = config_from({"tpu_name": tpu_name, "tpu_zone": tpu_zone, "command_file": command_file}, config_file)
    if words:
        # Commands on the command line override those in the configuration file.
        config = replace(config, commands=None, command_file=command_file)
    elif command_file is not None:
        config = replace(config, commands=None)
    if not (config.tpu_name and config.tpu_zone):
        raise ConfigError("which pod? Give --tpu_name and --tpu_zone, or name a file that has them with --config_file")
    commands = [*pod_commands(config), *words]
    if not commands:
        raise ConfigError("nothing to run: give --command or --command_file, or a configuration that has commands")
    if options["install_accelerate"]:
        commands.insert(0, _installation(str(options["accelerate_version"])))
    argv = ssh_argv(config.tpu_name, config.tpu_zone, [f"cd {_FOLDER}", *commands], alpha=bool(options["use_alpha"]))
    if debug:
        print(f"Running {' '.join(argv)}")
        return 0
    return run_gcloud(argv)


def _installation(version: str) -> str:
    wanted = {_LATEST: "accelerate -U", _DEVELOPED: _ACCELERATE}.get(version, f"accelerate=={version}")
    return f"pip install {wanted}"
