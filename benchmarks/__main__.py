"""``python -m benchmarks NAME [options]`` runs one benchmark, ``python -m benchmarks`` lists them."""

import pkgutil
import runpy
import sys

import benchmarks

HELPERS = {"__main__", "by_hand", "harness", "loaders", "loops"}

if __name__ == "__main__":
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name not in HELPERS]
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        print("benchmarks:", ", ".join(names))
        sys.exit(len(sys.argv) > 1)
    name = sys.argv.pop(1)
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
