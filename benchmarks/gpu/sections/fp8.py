"""fp8 with torchao: accel over the same by hand, over bf16, and the loss after some steps."""

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from benchmarks.gpu import models
from benchmarks.gpu.bench import Bench, NeedsCuda
from benchmarks.gpu.loops import BF16, StepCase, accel_step, raw_step
from benchmarks.gpu.timing import Step, measure

FP8 = StepCase("fp8", precision="fp8")


def run(bench: Bench) -> None:
    if find_spec("torchao") is None:
        raise ModuleNotFoundError("torchao is not installed; ci/pack_gpu.py packs it")
    for compiled in (True, False):
        for recipe in bench.pick(("tensorwise", "rowwise"), ("rowwise",) if compiled else ("tensorwise",)):
            label = f"{recipe}, {'compiled' if compiled else 'eager'}"
            bench.attempt(label, partial(speed, bench, label, recipe, compiled=compiled))
    bench.attempt("loss", partial(losses, bench))


def chosen(module: nn.Module, name: str) -> bool:
    """The layers that compute in fp8: all linear ones of the stack."""
    return isinstance(module, nn.Linear)


def recipes(recipe: str) -> Any:
    from accel_precision import AORecipeKwargs

    return AORecipeKwargs(recipe=recipe, module_filter_func=chosen)


def converted(bench: Bench, recipe: str, model: nn.Module) -> nn.Module:
    """As torchao's documentation has it; emulated where the hardware has no fp8."""
    from dataclasses import replace

    float8 = import_module("torchao.float8")
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=not bench.on_cuda, pad_inner_dim=True)
    result: nn.Module = float8.convert_to_float8_training(model, config=config, module_filter_fn=chosen)
    return result


def check_hardware(bench: Bench) -> None:
    if bench.on_cuda and torch.cuda.get_device_capability(bench.device) < (8, 9):
        raise NeedsCuda("a GPU of compute capability 8.9 or later for fp8")


def speed(bench: Bench, label: str, recipe: str, *, compiled: bool) -> None:
    from accel import TorchDynamoPlugin

    check_hardware(bench)
    torch.compiler.reset()
    compiler = bench.pick("inductor", "aot_eager")
    dynamo = TorchDynamoPlugin(backend=compiler, use_regional_compilation=True) if compiled else TorchDynamoPlugin()
    workload = models.stack(bench)

    def regional(model: nn.Module) -> nn.Module:
        if compiled:
            for layer in model.layers:  # type: ignore[union-attr]
                layer.compile(backend=compiler)
        return model

    def by_hand(model: nn.Module) -> nn.Module:
        return regional(converted(bench, recipe, model))

    variants: dict[str, Step] = {
        "bf16": raw_step(bench, workload, BF16, regional),
        "by hand": raw_step(bench, workload, BF16, by_hand),
        "accel": accel_step(bench, workload, FP8, kwargs_handlers=[recipes(recipe)], dynamo_plugin=dynamo),
    }
    times = measure(bench, variants, steps=bench.pick(3, 1), rounds=bench.pick(9, 2), seconds=6)
    goal = "fp8_speed" if compiled else None
    bench.row(label, "tokens per second, accel / by hand", times.ratio("by hand", "accel"), "x", goal=goal)
    bench.row(label, "tokens per second, accel / raw bf16", times.ratio("bf16", "accel"), "x")


def losses(bench: Bench) -> None:
    """A language model after 50 steps in fp8 and in bf16."""
    check_hardware(bench)
    layers, width, vocabulary = bench.pick((4, 1024, 4096), (2, 32, 64))
    steps = bench.pick(50, 3)
    found = {}
    for precision in ("bf16", "fp8"):
        torch.manual_seed(0)
        model = models.ManualGpt(vocabulary, width, layers, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        handlers = [recipes("tensorwise")] if precision == "fp8" else []
        accelerator = bench.accelerator(mixed_precision=precision, kwargs_handlers=handlers)
        prepared, stepping = accelerator.prepare(model, optimizer)
        batch = tuple(t.to(bench.device) for t in models.tokens(8, 64, vocabulary)())
        loss = torch.zeros(())
        for _ in range(steps):
            loss = models.token_loss(prepared, batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            stepping.step()
            stepping.zero_grad()
        found[precision] = float(loss.detach())
    bench.row("loss", f"after {steps} steps in bf16", found["bf16"])
    bench.row("loss", f"after {steps} steps in fp8", found["fp8"])
    if not abs(found["fp8"] - found["bf16"]) < 0.1 * max(found["bf16"], 1.0):
        raise AssertionError(f"the loss is {found['fp8']:.4g} in fp8 and {found['bf16']:.4g} in bf16")
