"""Runs one section in a process of its own: ``python -m benchmarks.gpu.child NAME --out DIR --seconds N``."""

import argparse
import importlib
import resource
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.sections import BY_NAME


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("name", choices=BY_NAME)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--seconds", type=float, required=True)
    options.add_argument("--device", default="cuda")
    options.add_argument("--tiny", action="store_true")
    args = options.parse_args()
    deadline = time.monotonic() + 0.9 * args.seconds  # a case that began just before it still ends within the limit
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix=f"accel-gpu-{args.name}-") as folder:
        bench = Bench(args.name, args.out / f"{args.name}.jsonl", device, args.tiny, deadline, Path(folder))
        importlib.import_module(f"benchmarks.gpu.sections.{args.name}").run(bench)
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        bench.note("end", processor_seconds=round(sum(one.ru_utime + one.ru_stime for one in used), 1))


if __name__ == "__main__":
    main()
