"""Commands of the pages: the files that a page shows are written, and its command lines are run in their order."""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from accel_testing.programs.runs import run_command
from docs.tests.pages import ON_CPU, PAGES, Block, blocks_of

PROGRAMS = ("accel", "python", "pytest")


def commands_of(page: str) -> list[Block]:
    """Blocks to carry out in their order: files to write, and commands of ours."""
    return [
        block
        for block in blocks_of(page)
        if block.file or (block.language == "bash" and block.text.split()[0] in PROGRAMS)
    ]


def environment(extra: Mapping[str, str] = ON_CPU) -> dict[str, str]:
    """Our commands are those beside this Python."""
    return {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]), **extra}


def run_commands(page: str, folder: Path) -> None:
    """Writes the page's files to a folder and runs its commands there; what they print is what the page says."""
    said = ""
    for block in commands_of(page):
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        else:
            said += run_command(_words(block.text), cwd=folder, env=environment(), timeout=240).check().output
    rest = said
    for line in SAID.get(page, ()):
        _, found, rest = rest.partition(line)
        assert found, f"{line!r} is not in its place of\n{said}"


def _words(text: str) -> list[str]:
    """A command line as a command; by a shell where it needs one."""
    if set(text.strip()) & set("\n\\|&;<>()$`*?#~="):
        return ["bash", "-euc", text]
    name, *arguments = shlex.split(text)
    return [sys.executable if name == "python" else str(Path(sys.executable).parent / name), *arguments]


# What a page says that its commands print, in this order.
SAID = {
    "docs/get-started/first-script.md": (
        "resumed in epoch 1 after 0 samples",
        "SIGKILL",
        "resumed in epoch 1 after 128 samples",
        "done on 2 ranks",
    ),
    "docs/get-started/scaling.md": (
        "8 optimizer steps of 32 samples on 1 ranks",
        "8 optimizer steps of 32 samples on 2 ranks",
    ),
    "docs/tutorials/elastic.md": (
        "3 ranks start at sample 0",
        "4 steps of 24 samples",
        "2 ranks start at sample 96",
        "6 steps of 24 samples",
    ),
    "docs/tutorials/fsdp-planner.md": (
        "->  fsdp:shard_grad_op",
        "fsdp:shard_grad_op: it needs",
        "2102272 of 4204544 parameters",
    ),
    "docs/tutorials/hang-report.md": (
        "Collective",
        "rank 0",
        "hang.py:9",
        "rank 1",
        "hang.py:10",
        "if accelerator.is_main_process:",
    ),
    "docs/tutorials/own-loop.md": ("rank 0 of 1 starts at sample 0", "of 2 starts at sample 48"),
    "docs/tutorials/transformers.md": ("of 50", "resumed on 1 ranks in epoch 1", "of 50"),
}

WITH_COMMANDS = [page for page in PAGES if any(block.language == "bash" for block in commands_of(page))]
# Other tests run the same commands.
RUN_BY_OTHERS = ("docs/guides/planner.md", "docs/guides/testing.md")
# Several launches each, which the launched lane runs, on the installed wheels.
ON_WHEELS = (
    "docs/get-started/scaling.md",
    "docs/guides/launching.md",
    "docs/guides/notebooks.md",
    "docs/guides/preemption.md",
    "docs/tutorials/elastic.md",
    "docs/tutorials/fsdp-planner.md",
    "docs/tutorials/own-loop.md",
    "docs/tutorials/transformers.md",
)
HERE = [page for page in WITH_COMMANDS if page not in ON_WHEELS]
