"""Ranks that prepare different models or optimizers get an error that names the first difference, on every backend."""

from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Bundle, Run, load_backend
from accel_precision import PrecisionPolicy
from accel_state import PrepareError, Session

CASES: dict[str, str] = {
    "shape": r"rank 0 has parameter 0.weight of shape \(4, 8\), fp32, trained where rank 1 has .*shape \(5, 8\)",
    "dtype": r"rank 0 has parameter 0.weight of shape \(4, 8\), fp32, trained where rank 1 has .*fp64",
    "frozen": r"rank 0 has parameter 0.bias .*trained where rank 1 has parameter 0.bias .*frozen",
    "name": r"rank 0 has an optimizer SGD .* where rank 1 has parameter 1.weight",
    "optimizer": r"rank 0 has an optimizer SGD with groups of 2 parameters where rank 1 has an optimizer Adam",
}


def made(case: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 5 if case == "shape" else 4))
    if case == "name":
        model.append(nn.Linear(4, 4))
    if case == "dtype":
        model.double()
    if case == "frozen":
        model[0].bias.requires_grad_(False)
    kind: Any = torch.optim.Adam if case == "optimizer" else torch.optim.SGD
    return model, kind(model[0].parameters(), lr=0.1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp1", "deepspeed"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(5)
def test_the_first_difference_is_named_on_every_rank(rank: int, name: str, case: str) -> None:
    if name == "deepspeed" and case in ("dtype", "name"):
        pytest.skip("it refuses fp64, and parameters without an optimizer, before it compares")
    model, optimizer = made(case if rank else "")
    backend = load_backend(name)(Run(Session.open(cpu=True), PrecisionPolicy.parse("no")))
    with pytest.raises(PrepareError, match=f"ranks prepare different models.*: {CASES[case]}"):
        backend.prepare(Bundle([model], [optimizer]))
    backend.close()
