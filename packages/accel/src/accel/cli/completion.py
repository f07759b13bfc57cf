"""``accel completion``."""

import rich_click as click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "fish", "zsh"]))
def completion(shell: str) -> int:
    """Prints the script that makes SHELL complete commands, options and their values. To keep it:

    accel completion bash > ~/.accel-complete.bash, and load that file in ~/.bashrc; for fish, write it to
    ~/.config/fish/completions/accel.fish.
    """
    from accel.cli.app import command_line

    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(command_line(), {}, "accel", "_ACCEL_COMPLETE")
    # Asking an old bash for its version is left out: the script itself is the same.
    print(made.source_template % made.source_vars())
    return 0
