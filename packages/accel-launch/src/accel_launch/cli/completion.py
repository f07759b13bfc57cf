"""``accel completion``, and the completions that its shell script requests."""

import os

import rich_click as click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

VARIABLE = "_ACCEL_COMPLETE"
"""Environment variable that a shell sets, for example to ``bash_complete``, to request completions."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "fish", "zsh"]))
def completion(shell: str) -> int:
    """Prints the script that makes SHELL complete commands, options, their values and files. To install it:

    accel completion bash > ~/.accel-complete.bash, and load that file in ~/.bashrc; for fish, write it to
    ~/.config/fish/completions/accel.fish.
    """
    made = _shell(shell)
    # Skips click's check of bash's version, which does not change the script.
    print(made.source_template % made.source_vars())
    return 0


def answer() -> int:
    """Prints the completions of the calling shell's command line."""
    print(_shell(os.environ[VARIABLE].partition("_")[0]).complete())
    return 0


def _shell(name: str) -> ShellComplete:
    from accel_launch.cli.app import command_line

    kind = get_completion_class(name)
    assert kind is not None

    class Spelled(kind):  # type: ignore[valid-type,misc]
        """Completes both spellings of options, and files where no other completion is known."""

        def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
            dashed = incomplete.startswith("--") and "-" in incomplete[2:] and "=" not in incomplete
            words = ["--" + word[2:].replace("-", "_") if word.startswith("--") else word for word in args]
            begun = "--" + incomplete[2:].replace("-", "_") if dashed else incomplete
            found: list[CompletionItem] = super().get_completions(words, begun)
            if dashed:
                return [CompletionItem("--" + item.value[2:].replace("_", "-"), help=item.help) for item in found]
            return found if found or incomplete.startswith("-") else [CompletionItem(incomplete, type="file")]

    made: ShellComplete = Spelled(command_line(), {}, "accel", VARIABLE)
    return made
