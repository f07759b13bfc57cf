"""Waits for the device in the steps of sharded models, pipelines, DeepSpeed, meters and fp16: where, how often."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, DistributedDataParallelKwargs
from accel_state import ParallelismConfig
from accel_testing.equivalence.causal_lms import VOCABULARY, tiny_llama

from .host_waits import waits

STEPS, ACCUMULATED = 3, 2
DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


class Rows(nn.Module):
    """A net with a layer that no step uses, if it is asked for."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
        self.unused = nn.Linear(4, 4) if unused else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows).square().mean()


def rows() -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield {"rows": torch.randn(3, 4)}


def texts() -> Iterator[dict[str, torch.Tensor]]:
    while True:
        tokens = torch.randint(0, VOCABULARY, (4, 12))
        yield {"input_ids": tokens, "labels": tokens}


@dataclass(frozen=True)
class Case:
    """A kind of loop, and by module of accel the reads of tensors in an optimizer step.

    These are the reads that cannot be left out, each with its reason, and reads of tensors of the host.
    """

    options: dict[str, Any]
    reads: dict[str, int] = field(default_factory=dict)
    unused: bool = False
    meter: bool = False
    texts: bool = False


# The step is taken or skipped by the host, for every optimizer and on all ranks alike, so the host has to learn of an
# overflow before: once in an optimizer step, however many micro-batches it has. torch's GradScaler does the same, but
# for optimizers whose fused kernel skips by itself.
OVERFLOW = {"accel_precision/scaler.py": 1}
# Whether all ranks gathered the same parameters is compared once in a step; without it a difference is a hang.
SAME_GATHERS = {"accel_deepspeed/zero/gather_order.py": 2}
# The number of labels in each micro-batch divides its loss before the backward that the schedule starts, so it is read
# once in each call; the number of a micro-batch, and whether a stage has failed, are tensors of the host.
LABELS = {
    "accel_backends/pipeline/micro_batches.py": 2,
    "accel_backends/parallel/pipeline/stages.py": 4,
    "accel_backends/parallel/pipeline/faults.py": 4,
}
# The previous loss, in pinned memory; where gradients are sharded, what all ranks found in theirs, on the host.
LATE = {"accel_observe/meters/late_loss.py": 1}

CASES: dict[str, Case] = {
    "fp16": Case({"mixed_precision": "fp16"}, OVERFLOW),
    "fp16 fsdp": Case({"mixed_precision": "fp16", "strategy": "fsdp"}, OVERFLOW),
    "find_unused_parameters": Case(
        {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}, unused=True
    ),
    "meter": Case({}, LATE, meter=True),
    "meter fsdp": Case({"strategy": "fsdp"}, {**LATE, "accel_observe/meters/meter.py": 2}, meter=True),
    "zero 0": Case({"deepspeed_plugin": {"zero_stage": 0}}),
    "zero 1": Case({"deepspeed_plugin": {"zero_stage": 1}}),
    "zero 2": Case({"deepspeed_plugin": {"zero_stage": 2}}),
    "zero 3": Case({"deepspeed_plugin": {"zero_stage": 3}}, SAME_GATHERS),
    "tp": Case({"parallelism_config": ParallelismConfig(tp_size=2)}, texts=True),
    "cp": Case({"parallelism_config": ParallelismConfig(cp_size=2)}, texts=True),
    "sp": Case({"parallelism_config": ParallelismConfig(sp_size=2)}, texts=True),
    "pp": Case({"parallelism_config": ParallelismConfig(pp_size=2)}, LABELS, texts=True),
}


REPEATED = ("fp16 fsdp", "meter", "zero 0", "zero 1", "sp")


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [DEEPSPEED] * ("zero" in name) + [pytest.mark.slow] * (name in REPEATED)


def steps(accelerator: Accelerator, model: Any, optimizer: Any, batches: Iterator[Any], meter: Any, count: int) -> None:
    for _ in range(count * ACCUMULATED):
        with accelerator.accumulate(model):
            output = model(**next(batches))
            loss = output if isinstance(output, torch.Tensor) else output.loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if meter is not None and accelerator.sync_gradients:
            meter.step(loss)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CASES])
@pytest.mark.sampled(2)
def test_a_step_waits_where_it_has_to_and_nowhere_else(rank: int, name: str) -> None:
    case = CASES[name]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, **case.options)
    net = tiny_llama(num_hidden_layers=2) if case.texts else Rows(unused=case.unused)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    meter: Any = accelerator.meter(every=100) if case.meter else None
    if meter is not None:
        meter._late = True  # as on an accelerator
    run = accelerator, model, optimizer, texts() if case.texts else rows(), meter
    steps(*run, 2)
    # Context-parallel attention makes a tensor of a class that a dispatch mode breaks.
    with waits(by_operator=name != "cp") as found:
        steps(*run, STEPS)
    accelerator.end_training()
    modules = Counter(line.rpartition("/src/")[2].partition(":")[0] for line in found)
    assert {module: number / STEPS for module, number in modules.items()} == case.reads, sorted(set(found))
