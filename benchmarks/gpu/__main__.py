"""``python -m benchmarks.gpu --out DIR [--tiny] [--only SECTION...]``."""

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.gpu.driver import RunPlan, run
from benchmarks.gpu.sections import BY_NAME, SECTIONS
from benchmarks.gpu.table import plot, report


def main() -> int:
    listed = "\n".join(f"  {section.name:12} {section.seconds:3} s  {section.text}" for section in SECTIONS)
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Measures accel on one GPU against raw PyTorch, and tests it there.",
        epilog=f"sections, in order, with their limits:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--out", type=Path, required=True, help="folder for logs, results.json, table.md, plots")
    options.add_argument("--tiny", action="store_true", help="small sizes, on the CPU: a test of the driver itself")
    options.add_argument("--device", choices=["cuda", "cpu"], help="cuda, or cpu with --tiny; both may be tiny")
    options.add_argument(
        "--only", nargs="+", choices=BY_NAME, metavar="SECTION", help="run these alone, with all the time"
    )
    options.add_argument("--seconds", type=float, default=600.0, help="for everything; 600")
    args = options.parse_args()
    device = args.device or ("cpu" if args.tiny else "cuda")
    if device == "cpu" and not args.tiny:
        options.error("--device cpu measures nothing of use at full size; give --tiny with it")
    if device == "cuda" and (missing := without_cuda()):
        options.error(f"{missing}; --tiny runs small sizes on the CPU instead")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # sections are ended on the way out
    chosen = [section for section in SECTIONS if not args.only or section.name in args.only]
    summary = run(RunPlan(chosen, args.out, device, args.tiny, args.seconds))
    text = report(summary)
    (args.out / "table.md").write_text(text, encoding="utf-8")
    print("\n" + text)
    for path in plot(summary, args.out):
        print(path)
    good = ("ok", "needs cuda: ")
    return int(any(not facts["status"].startswith(good) for facts in summary["sections"].values()))


def without_cuda() -> str | None:
    """Why the device cannot be used; asked without opening it, because the sections' processes do."""
    import torch

    count = torch.cuda.device_count()
    return None if count else f"torch {torch.__version__} sees no CUDA device"


if __name__ == "__main__":
    sys.exit(main())
