"""Autocast as on GPUs: the dtypes are those that torch's own autocast of CUDA gives fake tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from accel_planner import Batch, profile_model
from accel_planner.private import FakeTensorMode
from accel_planner.profile.gpu_autocast import autocast_lists_of
from accel_planner.profile.profile import Variant

Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
HALVES = (torch.bfloat16, torch.float16)
OPERATIONS: dict[str, Operation] = {
    "linear": lambda x, _: F.linear(x, x),
    "einsum": lambda x, _: torch.einsum("ab,cb->ac", x, x),
    "gelu": lambda x, _: F.gelu(x),
    "batch_norm": lambda x, _: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x, _: F.group_norm(x, 2),
    "rms_norm": lambda x, _: F.rms_norm(x, (4,)),
    "softmax": lambda x, _: x.softmax(-1),
    "softmax with a dtype": lambda x, _: x.softmax(-1, torch.float64),
    "log_softmax": lambda x, _: F.log_softmax(x, -1),
    "log_softmax with a dtype": lambda x, _: F.log_softmax(x, dim=-1, dtype=torch.bfloat16),
    "power": lambda x, _: x**2,
    "exponential": lambda x, _: 2**x,
    "rsqrt": lambda x, _: x.rsqrt(),
    "sum": lambda x, _: x.sum(),
    "sum over a dim": lambda x, _: x.sum(-1, keepdim=True),
    "sum with a dtype": lambda x, _: x.sum(-1, dtype=torch.bfloat16),
    "sum of integers": lambda _, n: n.sum(),
    "mean": lambda x, _: x.mean(),
    "cumsum": lambda x, _: x.cumsum(0),
    "product": lambda x, _: x.prod(),
    "vector norm": lambda x, _: torch.linalg.vector_norm(x),
    "cross entropy": lambda x, n: F.cross_entropy(x, n),
    "mse": lambda x, _: F.mse_loss(x, x),
    "binary cross entropy": lambda x, _: F.binary_cross_entropy_with_logits(x, x),
    "softplus": lambda x, _: F.softplus(x),
    "cat": lambda x, _: torch.cat([x, x.float()]),
}


def result(operation: Operation, device: str, given: torch.dtype, compute: torch.dtype) -> torch.dtype:
    x, n = torch.empty(4, 4, device=device, dtype=given), torch.empty(4, device=device, dtype=torch.long)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, compute)
    try:
        return operation(x, n).dtype
    finally:
        torch.set_autocast_enabled(device, False)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation_has_the_dtype_that_autocast_of_cuda_gives_it(operation: Operation) -> None:
    cases = [(half, half) for half in HALVES] + [(wide, torch.bfloat16) for wide in (torch.float32, torch.float64)]
    with FakeTensorMode(), torch.no_grad():
        theirs = [result(operation, "cuda", *case) for case in cases]
        with autocast_lists_of("cuda"):
            ours = [result(operation, "cpu", *case) for case in cases]
    assert ours == theirs


@pytest.mark.parametrize(
    ("operation", "lists"),
    [
        (lambda x, n: F.layer_norm(x, (4,)), {"cpu": torch.bfloat16, "xla": torch.bfloat16, "xpu": torch.float32}),
        (lambda x, n: F.max_pool3d(x.view(1, 1, 4, 2, 2), 2), {"cpu": torch.float32, "npu": torch.bfloat16}),
    ],
)
def test_the_lists_are_the_types_and_last_as_long_as_the_context(
    operation: Operation, lists: dict[str, torch.dtype]
) -> None:
    for device_type, dtype in lists.items():
        with autocast_lists_of(device_type):
            assert result(operation, "cpu", torch.bfloat16, torch.bfloat16) == dtype
        assert result(operation, "cpu", torch.bfloat16, torch.bfloat16) == lists["cpu"]


class Attention(nn.Module):
    """Scores in a softmax by hand, and a norm: bf16 on a CPU, fp32 on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.norm(self.embed(x))
        return self.out((x @ x.mT).softmax(-1) @ x).mean()


def peak(device_type: str, dtype: str) -> int:
    batch = Batch(torch.zeros(2, 128, 8))
    profile = profile_model(Attention(), batch, loss=lambda model, x: model(x), policy=dtype, device_type=device_type)
    return max(mark.highest for mark in profile.timelines[Variant()].marks)


def test_what_gpus_keep_in_fp32_is_planned_so() -> None:
    scores, rows = 2 * 128 * 128, 2 * 128 * 64
    more = peak("cuda", "bf16") - peak("cpu", "bf16")
    # The softmax keeps fp32 scores beside the bf16 ones of the product, and the norm its input and output in fp32.
    assert more >= 4 * scores + 4 * rows
    assert peak("cuda", "no") == peak("cpu", "no")
