"""The profiler's times against torch's own table, counted communication, and facts of the device."""

from functools import partial

import torch

from benchmarks.gpu import models
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.loops import moved


def run(bench: Bench) -> None:
    bench.attempt("profile", partial(profile, bench))
    bench.attempt("device facts", partial(device_facts, bench))
    bench.attempt("explain", partial(explain, bench))


def profile(bench: Bench) -> None:
    """Device times of operators, over those of the device's own kernels: 1 if nothing is counted twice."""
    from torch._C._autograd import DeviceType

    from accel import ProfileKwargs
    from accel_observe.profiling.profiler import top_operators

    accelerator = bench.accelerator()
    workload = models.gpt(bench)
    model = accelerator.prepare(workload.built(bench.device))
    batch = moved(bench, workload)
    with accelerator.profile(ProfileKwargs(output_trace_dir=bench.folder / "traces")) as profiler:
        for _ in range(2):
            accelerator.backward(workload.loss(model, batch))
        bench.synchronize()
    rows = top_operators(profiler, 10**6)
    bench.row("profile", "operators", len(rows))
    bench.row("profile", "host time", sum(row["cpu_us"] for row in rows) / 1e3, "ms")
    if bench.on_cuda:
        kernels = sum(
            event.device_time_total
            for event in profiler.events()
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        )
        bench.row("profile", "device time of rows / of kernels", sum(r["device_us"] for r in rows) / kernels, "x")


def device_facts(bench: Bench) -> None:
    from accel_precision import DeviceFacts

    facts = DeviceFacts.probe(bench.device.type)
    bench.row("device facts", "fp8 in hardware", facts.fp8)
    if bench.on_cuda:
        expected = torch.version.hip is None and torch.cuda.get_device_capability(bench.device) >= (8, 9)
        if torch.version.hip is None and facts.fp8 != expected:
            raise AssertionError(f"fp8 is {facts.fp8}, and the device's capability says {expected}")


def explain(bench: Bench) -> None:
    accelerator = bench.accelerator(mixed_precision="bf16")
    workload = models.mlp(bench)
    model = workload.built(bench.device)
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.count_communication() as sent:
        accelerator.backward(workload.loss(prepared, moved(bench, workload)))
    bench.row("explain", "lines", len(str(accelerator.explain()).splitlines()))
    bench.row("explain", "collectives of one rank", len(sent))
