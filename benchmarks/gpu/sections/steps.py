"""A training step by raw PyTorch, accel and the peers: time on the wall, of the device and of the host; memory."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu import models
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.loops import BF16, CASES, PEERS, PLAIN, StepCase, accel_step, raw_step
from benchmarks.gpu.models import Workload
from benchmarks.gpu.timing import Step, measure


def run(bench: Bench) -> None:
    # First what has a goal.
    bench.attempt("llama bf16", partial(compared, bench, models.llama(bench), BF16, peers=False))
    host_bound = models.mlp(bench)
    for case in CASES:
        bench.attempt(f"mlp {case.name}", partial(compared, bench, host_bound, case, peers=True))
    for case in (BF16, PLAIN):
        bench.attempt(f"gpt {case.name}", partial(compared, bench, models.gpt(bench), case, peers=case is BF16))
    bench.attempt("memory", partial(memory, bench, models.gpt(bench)), cuda="an allocator that counts its peak")


def compared(bench: Bench, workload: Workload, case: StepCase, *, peers: bool) -> None:
    """Raw PyTorch twice, which shows the noise, accel, and the peers that are installed."""
    raw = raw_step(bench, workload, case)
    variants: dict[str, Step] = {"raw": raw, "accel": accel_step(bench, workload, case), "raw again": raw}
    if peers:
        for name, make in PEERS.items():
            try:
                variants[name] = make(bench, workload, case)
            except ImportError:
                continue
    small = workload.name == "mlp"
    steps = bench.pick(200 if small else 4, 2) * case.accumulate
    times = measure(bench, variants, steps=steps, rounds=bench.pick(31 if small else 15, 2), seconds=5 if small else 14)
    label = f"{workload.name} {case.name}"
    bench.row(label, "raw step", times.median("raw") * 1e3, "ms")
    # The loss scale of fp16 is read once a step, in accel as in torch without a fused optimizer, so it has no goal.
    goal = "step_us" if small and case.precision != "fp16" else None
    bench.row(label, "accel adds", times.added("accel", "raw"), "us", goal=goal)
    bench.row(label, "accel adds on the host", times.added("accel", "raw", "host"), "us")
    for name in variants:
        if name != "raw":
            held = "step_ratio" if (workload.name, name) == ("llama", "accel") else None
            bench.row(label, f"{name} / raw", times.ratio(name, "raw"), "x", goal=held)
            bench.row(label, f"{name} / raw, device", times.ratio(name, "raw", "device"), "x")


def memory(bench: Bench, workload: Workload) -> None:
    """Peak of allocated memory over the making and five steps."""
    peaks: dict[str, float] = {}
    makers: dict[str, Callable[..., Step]] = {"raw": raw_step, "accel": accel_step}
    for name, make in makers.items():
        bench.clear()
        torch.cuda.reset_peak_memory_stats(bench.device)
        before = torch.cuda.memory_allocated(bench.device)
        step = make(bench, workload, BF16)
        for _ in range(5):
            step()
        bench.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated(bench.device) - before
        del step
    bench.row("gpt bf16", "peak memory, accel / raw", peaks["accel"] / peaks["raw"], "x")
