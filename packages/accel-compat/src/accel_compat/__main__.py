"""``python -m accel_compat script.py ARGUMENTS`` runs a script whose ``import accelerate`` is accel."""

import runpy
import sys

from accel_compat.finder import install


def main() -> None:
    """Runs the script that the first argument names, with the others as its own.

    Raises:
        SystemExit: no script is named.
    """
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m accel.compat script.py [arguments]; the script is missing")
    install()
    del sys.argv[0]
    sys.path.insert(0, str(__import__("pathlib").Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
