"""torch.compile by mode: weights against eager, with accumulation too, and time over raw PyTorch in the same mode."""

from functools import partial
from typing import Any

import torch
from torch import nn

from accel_backends import compile_regions
from accel_state.errors import ConfigError
from benchmarks.gpu import models
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.loops import BF16, accel_step, raw_step
from benchmarks.gpu.models import Workload
from benchmarks.gpu.timing import measure

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "regional": {"use_regional_compilation": True},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "regional reduce-overhead": {"mode": "reduce-overhead", "use_regional_compilation": True},
}
FIRST = ("regional", "regional reduce-overhead")


def run(bench: Bench) -> None:
    """The compiler takes most of the time, so the modes that are read first come first."""
    first = {name: options for name, options in MODES.items() if name in FIRST}
    later = {} if bench.tiny else {name: options for name, options in MODES.items() if name not in FIRST}
    for some in (first, later):
        for name, options in some.items():
            for accumulate in bench.pick((1, 4), (4,)):
                label = f"{name}, accumulate {accumulate}"
                bench.attempt(label, partial(same_as_eager, bench, label, options, accumulate), cuda=graphs(options))
        for name, options in some.items():
            bench.attempt(f"speed, {name}", partial(speed, bench, name, options), cuda=graphs(options))
    label = "FSDP2, regional, accumulate 4"
    bench.attempt(label, partial(same_as_eager, bench, label, MODES["regional"], 4, sharded=True))


def graphs(options: dict[str, Any]) -> str | None:
    """Why the options need a GPU."""
    return "CUDA graphs" if "mode" in options else None


def plugin(bench: Bench, options: dict[str, Any]) -> Any:
    """Options of compilation; the test of the driver leaves out the compiler, which takes minutes."""
    from accel import TorchDynamoPlugin

    return TorchDynamoPlugin(backend=bench.pick("inductor", "aot_eager"), **options)


def small(bench: Bench) -> Workload:
    layers, width, length, batch, vocabulary = bench.pick((2, 256, 128, 8, 1024), (2, 32, 16, 2, 64))
    return Workload(
        "gpt",
        lambda: models.SmallGpt(vocabulary, width, layers, 4, length),
        models.tokens(batch, length, vocabulary),
        models.token_loss,
    )


def trained(bench: Bench, accumulate: int, **options: Any) -> tuple[list[torch.Tensor], float]:
    """Weights after 8 optimizer steps in fp32 with a meter that keeps losses, and the loss of an evaluation."""
    workload = small(bench)
    accelerator = bench.accelerator(gradient_accumulation_steps=accumulate, **options)
    model = workload.built(bench.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    prepared, stepping = accelerator.prepare(model, optimizer)
    meter = accelerator.meter(every=4)
    generator = torch.Generator().manual_seed(3)
    shape = workload.batch()[0].shape
    batch = (torch.empty(0),)
    for _ in range(8 * accumulate):
        batch = (torch.randint(64, shape, generator=generator).to(bench.device),)
        with accelerator.accumulate(prepared):
            loss = workload.loss(prepared, batch)
            accelerator.backward(loss)
            stepping.step()
            stepping.zero_grad()
        meter.step(loss)
    with torch.no_grad():
        prepared.eval()
        final = float(workload.loss(prepared, batch))
    weights = accelerator.get_state_dict(prepared).values()
    return [weight.detach().float().cpu() for weight in weights], final


def same_as_eager(bench: Bench, label: str, options: dict[str, Any], accumulate: int, *, sharded: bool = False) -> None:
    from accel import FullyShardedDataParallelPlugin

    torch.compiler.reset()

    def strategy() -> dict[str, Any]:
        return {"fsdp_plugin": FullyShardedDataParallelPlugin()} if sharded else {}

    expected, reference = trained(bench, accumulate, **strategy())
    try:
        found, evaluated = trained(bench, accumulate, dynamo_plugin=plugin(bench, options), **strategy())
    except ConfigError as error:
        bench.row(label, "refused by accel", str(error))
        return
    off = max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in zip(found, expected, strict=True))
    bench.row(label, "weights after 8 steps, relative to eager", off)
    bench.row(label, "evaluation, difference to eager", abs(evaluated - reference))
    if not off < 1e-3:
        raise AssertionError(f"weights after 8 steps differ from those of eager by {off:.2g} of their norm")


def speed(bench: Bench, name: str, options: dict[str, Any]) -> None:
    """accel over raw PyTorch in the same mode, on the GPT in bf16."""
    torch.compiler.reset()
    workload = models.gpt(bench)
    chosen = plugin(bench, options)

    def by_hand(model: nn.Module) -> Any:
        if options.get("use_regional_compilation"):
            compile_regions(model, chosen)
            return model
        return torch.compile(model, **chosen.to_kwargs())

    raw = raw_step(bench, workload, BF16, by_hand)
    variants = {"raw": raw, "accel": accel_step(bench, workload, BF16, dynamo_plugin=chosen)}
    times = measure(bench, variants, steps=bench.pick(5, 1), rounds=bench.pick(15, 2), seconds=8)
    bench.row(f"speed, {name}", "raw step", times.median("raw") * 1e3, "ms")
    bench.row(f"speed, {name}", "accel / raw", times.ratio("accel", "raw"), "x", goal="compile_ratio")
