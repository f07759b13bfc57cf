"""Offload to host memory against the link's bandwidth, and the search for a micro-batch with a real shortage."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu import models
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.loops import BF16, accel_step
from benchmarks.gpu.sections.machine import pinned_h2d
from benchmarks.gpu.timing import measure


def run(bench: Bench) -> None:
    bench.attempt("parameters", partial(parameters, bench))
    bench.attempt("activations", partial(activations, bench))
    for name in ("single", "FSDP2"):
        label = f"micro-batch, {name}"
        bench.attempt(label, partial(micro_batch, bench, label, sharded=name == "FSDP2"), cuda="memory that runs out")


def sharded(**options: Any) -> dict[str, Any]:
    from accel import FullyShardedDataParallelPlugin

    return {"fsdp_plugin": FullyShardedDataParallelPlugin(**options)}


def parameters(bench: Bench) -> None:
    """A step with parameters, gradients and optimizer states on the host: what it adds, over its bytes at the link."""
    workload = models.gpt(bench)
    variants = {
        "resident": accel_step(bench, workload, BF16, **sharded()),
        "offloaded": accel_step(bench, workload, BF16, **sharded(cpu_offload=True)),
    }
    times = measure(bench, variants, steps=2, rounds=bench.pick(5, 1), seconds=8)
    size = sum(parameter.nbytes for parameter in workload.built(bench.device).parameters())
    link = 2 * size / pinned_h2d(bench, bench.pick(2**28, 2**18))  # parameters there, gradients back
    bench.row("parameters", "step, resident", times.median("resident") * 1e3, "ms")
    bench.row("parameters", "step, offloaded", times.median("offloaded") * 1e3, "ms")
    bench.row("parameters", "parameters and gradients over the link", link * 1e3, "ms")


def activations(bench: Bench) -> None:
    """Checkpointed units whose inputs are kept on the host: same losses, time and memory."""
    workload = models.gpt(bench)
    found: dict[str, tuple[float, float]] = {}
    losses: dict[str, list[torch.Tensor]] = {"on the device": [], "offloaded": []}

    def noted(kept: list[torch.Tensor], model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        loss = workload.loss(model, batch)
        kept.append(loss.detach())
        return loss

    for name, options in {
        "on the device": {"activation_checkpointing": True},
        "offloaded": {"activation_checkpointing": True, "activation_checkpointing_offload": True},
    }.items():
        bench.clear()
        followed = replace(workload, loss=partial(noted, losses[name]))
        step = accel_step(bench, followed, BF16, **sharded(**options))
        step()
        if bench.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        bench.synchronize()
        began = time.perf_counter()
        for _ in range(bench.pick(5, 1)):
            step()
        bench.synchronize()
        peak = torch.cuda.max_memory_allocated() if bench.on_cuda else 0
        found[name] = ((time.perf_counter() - began) / bench.pick(5, 1), peak)
        del step
    bench.row("activations", "step, offloaded / on the device", found["offloaded"][0] / found["on the device"][0], "x")
    pairs = zip(losses["offloaded"], losses["on the device"], strict=True)
    off = max(abs(float(ours / other) - 1) for ours, other in pairs)
    bench.row("activations", "losses, relative to those on the device", off)
    if not off < 1e-3:
        raise AssertionError(f"losses with offloaded activations are {off:.2g} away: {losses['offloaded']}")
    bench.row("activations", "memory saved", (found["on the device"][1] - found["offloaded"][1]) / 1e9, "GB")


def micro_batch(bench: Bench, label: str, *, sharded: bool) -> None:
    """The size found under a cap on memory, and the gradient of the next step, which must be that without a search."""
    from accel import FullyShardedDataParallelPlugin
    from accel_state.errors import AccelError

    total = torch.cuda.get_device_properties(bench.device).total_memory
    options: dict[str, Any] = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if sharded else {}
    norms = []
    for search in (False, True):
        torch.manual_seed(0)
        accelerator = bench.accelerator(mixed_precision="bf16", **options)
        model = models.ManualGpt(4096, 1024, 4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        batch = tuple(t.to(bench.device) for t in models.tokens(64, 1024, 4096)())
        if search:
            torch.cuda.set_per_process_memory_fraction(6e9 / total)
            try:
                size = accelerator.find_micro_batch_size(
                    lambda part, model=model: models.token_loss(model, part), batch
                )
                bench.row(label, "rows that fit into 6 GB", size)
            except AccelError as error:
                bench.row(label, "refused by accel", str(error)[:300])
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
        accelerator.backward(models.token_loss(model, tuple(tensor[:2] for tensor in batch)))
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e9)))
        del accelerator, model, optimizer, batch
        bench.clear()
    bench.row(label, "gradient norm of the next step, with and without the search", norms[1] / norms[0], "x")
    if abs(norms[1] / norms[0] - 1) > 1e-3:
        raise AssertionError(
            f"the next step's gradient norm is {norms[1]:.6g} after a search and {norms[0]:.6g} without"
        )
