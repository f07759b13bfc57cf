"""The loss scale of accel beside ``torch.amp.GradScaler``, with overflows planted at the same steps."""

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.bench import Bench


def run(bench: Bench) -> None:
    for fused in (False, True):
        label = f"trace, {'fused' if fused else 'foreach'}"
        bench.attempt(label, partial(same_trace, bench, label, fused=fused), cuda="fused updates" if fused else None)


def same_trace(bench: Bench, label: str, *, fused: bool) -> None:
    from accel import GradScalerKwargs

    steps, interval = bench.pick(300, 40), 7
    options: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": interval}
    planted = {3, 4, 11, 29, 30, 31, 120, 251}
    accelerator = bench.accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**options)])
    torch.manual_seed(0)
    ours, theirs = nn.Linear(16, 16).to(bench.device), nn.Linear(16, 16).to(bench.device)
    theirs.load_state_dict(ours.state_dict())
    kind = {"fused": True} if fused else {"foreach": True}
    own = torch.optim.SGD(ours.parameters(), lr=1e-3, **kind)
    other = torch.optim.SGD(theirs.parameters(), lr=1e-3, **kind)
    model, optimizer = accelerator.prepare(ours, own)
    scaler = torch.amp.GradScaler(bench.device.type, **options)
    generator = torch.Generator().manual_seed(5)
    differing = 0
    for number in range(steps):
        batch = torch.randn(8, 16, generator=generator).to(bench.device)
        factor = float("inf") if number in planted else 1.0
        accelerator.backward(model(batch).square().mean() * factor)
        differing += accelerator.scaler.get_scale() != scaler.get_scale()  # those that this step's losses have
        optimizer.step()
        optimizer.zero_grad()
        with torch.autocast(bench.device.type, dtype=torch.float16):
            loss = theirs(batch).float().square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(other)
        scaler.update()
        other.zero_grad()
    bench.row(label, f"steps of {steps} whose scales differ", differing)
    same = all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    bench.row(label, "weights are equal bit for bit", same)
    if differing:
        raise AssertionError(f"the scales of {differing} of {steps} steps differ")
