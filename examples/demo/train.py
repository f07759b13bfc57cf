"""Trains the demo's GPT: an ordinary PyTorch loop with an Accelerator around it.

It is started by ``run.py`` through ``accel launch``, and can be started by hand the same way:

    accel launch --num_processes 2 examples/demo/train.py --folder runs/by-hand --steps 200
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

import torch
from gpt import GPT, GPTConfig
from text import Windows, bigram_loss, stdlib_bytes
from torch.utils.data import DataLoader

from accel import Accelerator, ProjectConfiguration
from accel.utils import set_seed, tqdm


class Progress:
    """Optimizer steps taken; saved and loaded with everything else."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def seconds_before(folder: Path, step: int) -> float:
    """Training time that earlier attempts spent up to ``step``, from what they logged."""
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if step else []
    return next((row["seconds"] for row in reversed(rows) if row["step"] == step), 0.0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints, metrics and results go")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=8, help="windows per process and step")
    parser.add_argument("--learning_rate", type=float, default=4e-3)
    parser.add_argument("--save_every", type=int, default=125, help="steps between checkpoints")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    return parser.parse_args()


def learning_rate(step: int, steps: int, warmup: int = 40) -> float:
    """Share of the peak rate: linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    """Mean held-out loss in nats per byte, over all processes."""
    model.eval()
    losses = []
    with torch.no_grad():
        for batch in loader:
            logits, _ = model(batch["tokens"])
            loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none")
            losses.append(accelerator.gather_for_metrics(loss.mean(1)))
    model.train()
    return torch.cat(losses).mean().item()


def main() -> None:
    args = parse()
    project = ProjectConfiguration(args.folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    set_seed(0)
    train_text, held_out_text = stdlib_bytes()
    train_data, held_out_data = Windows(train_text, args.context), Windows(held_out_text[:200_000], args.context)
    config = GPTConfig(context=args.context, width=args.width, layers=args.layers)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, args.steps))
    loader = DataLoader(train_data, batch_size=args.batch_size, shuffle=True)
    held_out = DataLoader(held_out_data, batch_size=64)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if any((args.folder / "checkpoints").glob("checkpoint_*")):
        accelerator.print(f"resuming from {accelerator.load_state('latest')}")
    (args.folder / f"pid_{accelerator.process_index}").write_text(str(os.getpid()))

    tokens_per_step = args.batch_size * args.context * accelerator.num_processes
    metrics = (args.folder / "metrics.jsonl").open("a") if accelerator.is_main_process else None
    bar = tqdm(total=args.steps, initial=progress.step, unit="step", dynamic_ncols=True)
    before, first, started = seconds_before(args.folder, progress.step), progress.step, time.perf_counter()
    while progress.step < args.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                _, loss = model(**batch)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.step += 1
            elapsed = time.perf_counter() - started
            mean = accelerator.reduce(loss.detach(), reduction="mean").item()
            if metrics is not None:
                row = {
                    "step": progress.step,
                    "loss": mean,
                    "lr": scheduler.get_last_lr()[0],
                    "seconds": before + elapsed,
                    "pid": os.getpid(),
                }
                print(json.dumps(row), file=metrics, flush=True)
                rate = (progress.step - first) * tokens_per_step / elapsed
                bar.set_postfix(loss=f"{mean:.3f}", tokens_per_s=f"{rate:,.0f}")
            bar.update(1)
            if progress.step % args.save_every == 0 and progress.step < args.steps:
                accelerator.save_state()
            if progress.step >= args.steps:
                break
    bar.close()
    loss = evaluate(accelerator, model, held_out)
    if accelerator.is_main_process:
        baseline = bigram_loss(train_text, held_out_text)
        plain = accelerator.unwrap_model(model).eval()
        result = {
            "held_out_loss": loss,
            "bigram_loss": baseline,
            "parameters": sum(p.numel() for p in plain.parameters()),
            "processes": accelerator.num_processes,
            "device": str(accelerator.device),
            "tokens": progress.step * tokens_per_step,
            "steps": progress.step,
            "seconds": before + elapsed,
            "sample": plain.sample(b"def ", 240).decode("utf-8", "replace"),
        }
        (args.folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
