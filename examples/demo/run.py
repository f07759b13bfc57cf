"""The demo: trains a small GPT with ``accel launch``, kills it in the middle, and lets it resume by itself.

Everything it makes lies in ``runs/demo``: checkpoints, metrics, the loss curve as a PNG.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The rows logged so far; a last line that is still being written is left out."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kill_when_due(process: subprocess.Popen[bytes], folder: Path, step: int) -> int | None:
    """Sends SIGKILL to the main rank once it has logged ``step``; returns the step at which it died."""
    while process.poll() is None:
        rows = read_metrics(folder)
        if rows and rows[-1]["step"] >= step:
            os.kill(int((folder / "pid_0").read_text()), signal.SIGKILL)
            return int(rows[-1]["step"])
        time.sleep(0.01)
    return None


def attempts_of(rows: list[dict[str, float]]) -> list[list[dict[str, float]]]:
    """Rows by the process that wrote them, in the order of time."""
    attempts: dict[float, list[dict[str, float]]] = {}
    for row in rows:
        attempts.setdefault(row["pid"], []).append(row)
    return list(attempts.values())


def draw(folder: Path, rows: list[dict[str, float]], result: dict[str, float], killed_at: int) -> Path:
    """The loss curve over steps, every attempt in its own colour, the kill and the resume marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=120)
    attempts = attempts_of(rows)
    for number, attempt in enumerate(attempts):
        label = "before the kill" if number == 0 else "after the resume"
        width = 3.0 if number == 0 else 1.2
        axes.plot([r["step"] for r in attempt], [r["loss"] for r in attempt], linewidth=width, label=label, alpha=0.9)
    axes.axvline(killed_at, color="tab:red", linestyle="--", linewidth=1, label=f"SIGKILL after step {killed_at}")
    if len(attempts) > 1:
        first = int(attempts[1][0]["step"]) - 1
        axes.axvline(first, color="tab:green", linestyle="--", linewidth=1, label=f"resumed from step {first}")
    axes.axhline(
        result["bigram_loss"], color="gray", linestyle=":", label=f"byte bigrams, held out: {result['bigram_loss']:.3f}"
    )
    axes.axhline(
        result["held_out_loss"],
        color="black",
        linestyle=":",
        label=f"this model, held out: {result['held_out_loss']:.3f}",
    )
    axes.set(xlabel="optimizer step", ylabel="loss (nats per byte)", title="One training run, killed once")
    axes.legend()
    figure.tight_layout()
    path = folder / "loss.png"
    figure.savefig(path)
    pyplot.close(figure)
    return path


def repeated_difference(rows: list[dict[str, float]]) -> tuple[int, float]:
    """Steps that were trained twice, and the largest difference between their two losses."""
    first: dict[float, float] = {}
    differences = []
    for row in rows:
        if row["step"] in first:
            differences.append(abs(row["loss"] - first[row["step"]]))
        first.setdefault(row["step"], row["loss"])
    return len(differences), max(differences, default=0.0)


def summarise(folder: Path, rows: list[dict[str, float]], result: dict[str, float], killed_at: int) -> None:
    from rich.console import Console
    from rich.table import Table

    picture = draw(folder, rows, result, killed_at)
    repeated, difference = repeated_difference(rows)
    table = Table(title="accel demo", show_header=False)
    for name, value in (
        ("model", f"byte-level GPT, {result['parameters']:,} parameters"),
        ("ran on", f"{result['processes']} processes, {result['device']}"),
        ("trained", f"{result['steps']} steps, {result['tokens']:,} bytes, {result['seconds']:.0f} s"),
        ("killed", f"SIGKILL after step {killed_at}; {repeated} steps trained again"),
        ("losses of those steps differ by at most", f"{difference:.1e}"),
        ("held-out loss", f"{result['held_out_loss']:.3f} nats per byte"),
        ("held-out loss of byte bigrams", f"{result['bigram_loss']:.3f} nats per byte"),
        ("loss curve", os.path.relpath(picture)),
    ):
        table.add_row(name, value)
    console = Console()
    console.rule("sampled text")
    console.print(result["sample"], markup=False, highlight=False)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--num_processes", type=int, default=None, help="default: one per accelerator, or 2 on a CPU")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="more options of train.py, after --")
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    processes = args.num_processes
    if processes is None:
        import torch

        processes = torch.accelerator.device_count() if torch.accelerator.is_available() else 2
    save_every = max(1, args.steps // 4)
    command = [
        *(sys.executable, "-m", "accel", "launch", "--num_processes", str(processes), "--max_restarts", "1"),
        *(str(HERE / "train.py"), "--folder", str(args.folder), "--steps", str(args.steps)),
        *("--save_every", str(save_every), *[option for option in args.rest if option != "--"]),
    ]
    print("$", " ".join(command), flush=True)
    process = subprocess.Popen(command)
    try:
        killed_at = kill_when_due(process, args.folder, save_every * 2 + max(1, save_every // 5))
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if status or killed_at is None:
        print(f"the training run ended with status {status}", file=sys.stderr)
        return status or 1
    rows = read_metrics(args.folder)
    result = json.loads((args.folder / "result.json").read_text())
    summarise(args.folder, rows, result, killed_at)
    return 0


if __name__ == "__main__":
    sys.exit(main())
