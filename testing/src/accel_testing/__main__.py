"""``python -m accel_testing script.py:function``: checks a program under layouts, and ends with 1 if one differs."""

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0 where all layouts train as one process does, 1 where one does not, 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="python -m accel_testing", description=__doc__)
    parser.add_argument("target", help="SCRIPT.py:FUNCTION, a function that returns an accel_testing.Program")
    parser.add_argument("--layouts", default="ddp:2", help="with commas, as in ddp:2,ddp:4/bf16/acc=3 (default: ddp:2)")
    parser.add_argument("--precisions", default="fp64,fp32", help="of layouts that name none (default: fp64,fp32)")
    parser.add_argument("--gpu", action="store_true", help="run layouts on this machine's accelerators")
    options = parser.parse_args(arguments)
    from accel_testing.equivalence import run_check
    from accel_testing.errors import RankError

    try:
        report = run_check(
            options.target, options.layouts, precisions=options.precisions.split(","), cpu=not options.gpu
        )
    except (ValueError, RankError) as error:
        print(f"accel_testing: error: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
