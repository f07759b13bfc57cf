"""Cost of starting: importing accel beyond torch, ``accel --help``, launching an empty script against torchrun."""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import Report, interleave, parser


def command(*arguments: str) -> Callable[[], None]:
    """Runs a Python command quietly and fails with it."""

    def run() -> None:
        # Modules are compiled in the round that does not count, and never again, as for users.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)

    return run


def main() -> None:
    args = parser(__doc__).parse_args()
    rounds, warmup = (1, 0) if args.quick else (args.rounds, 1)
    report = Report("Start-up, whole processes", ["what", "seconds", "base", "base_seconds", "added_ms", "goal_ms"])

    def compare(base: str, goals: dict[str, float | None], runs: dict[str, Callable[[], None]]) -> None:
        times = interleave(runs, rounds, warmup=warmup)
        for name, goal in goals.items():
            more = statistics.median(a - b for a, b in zip(times[name], times[base], strict=True))
            report.add(
                what=name,
                seconds=statistics.median(times[name]),
                base=base,
                base_seconds=statistics.median(times[base]),
                added_ms=more * 1e3,
                goal_ms=goal,
            )

    ours = "from accel import Accelerator"
    # Fabric opens no device before it is launched, so its second row is the least that it can be.
    theirs = ("from accelerate import Accelerator", "from lightning_fabric import Fabric")
    goals: dict[str, float | None] = {ours: 60.0, **({name: None for name in theirs} if args.peers else {})}
    imports = {name: command("-c", f"import torch; {name}") for name in goals}
    first = {f"{name}; {name.split()[-1]}()": None for name in goals}
    goals |= first
    imports |= {name: command("-c", f"import torch; {name}") for name in first}
    imports["import torch"] = command("-c", "import torch")
    compare("import torch", goals, imports)

    helps = {"python": command("-c", "pass"), "accel --help": command("-m", "accel", "--help")}
    goals = {"accel --help": 250.0}
    if args.peers:
        helps["accelerate --help"] = command("-m", "accelerate.commands.accelerate_cli", "--help")
        goals["accelerate --help"] = None
    compare("python", goals, helps)

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "empty.py"
        script.write_text("")
        launches = {
            "torchrun": command(
                *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
                *("--log_dir", folder, str(script)),  # else it leaves one of its own
            ),
            "accel launch": command("-m", "accel", "launch", "--cpu", "--num_processes", "2", str(script)),
        }
        goals = {"accel launch": 200.0}
        if args.peers:
            launches["accelerate launch"] = command(
                *("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"),
                *("--mixed_precision", "no", "--dynamo_backend", "no", str(script)),
            )
            goals["accelerate launch"] = None
        compare("torchrun", goals, launches)
    report.show(args.json)


if __name__ == "__main__":
    main()
