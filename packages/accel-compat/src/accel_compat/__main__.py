"""``python -m accel_compat [-m] PROGRAM ARGUMENTS`` runs a program whose ``import accelerate`` is accel."""

import sys

from accel_compat.finder import install
from accel_launch.launch.child_main import run_module, run_script


def main() -> None:
    """Runs the script, or with ``-m`` the module, that the first argument names, with the others as its own.

    Raises:
        SystemExit: no program is named.
    """
    is_module = sys.argv[1:2] == ["-m"]
    program = sys.argv[2 if is_module else 1 :]
    if not program:
        raise SystemExit("usage: python -m accel.compat [-m] PROGRAM [arguments]; the program is missing")
    install()
    sys.argv = program
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder in which python -m was started
    (run_module if is_module else run_script)(program[0])


if __name__ == "__main__":
    main()
