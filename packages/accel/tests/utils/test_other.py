"""The user's own model comes out of every wrapper, by Accelerate's arguments."""

import inspect
import pickle

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.utils import extract_model_from_parallel


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)


def test_the_arguments_are_accelerates() -> None:
    parameters = inspect.signature(extract_model_from_parallel).parameters
    defaults = {name: one.default for name, one in parameters.items() if name != "model"}
    assert defaults == {"keep_fp32_wrapper": True, "keep_torch_compile": True, "recursive": False}
    assert all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters.values())


def test_wrapped_modules_inside_stay_unless_asked_for() -> None:
    block = Block()
    linear = block.inside.module[0]
    wrapped = nn.DataParallel(block)
    assert extract_model_from_parallel(wrapped) is block
    assert isinstance(block.inside, nn.DataParallel)
    assert extract_model_from_parallel(wrapped, recursive=True) is block
    assert block.inside[0] is linear


@pytest.mark.parametrize("keep", [True, False])
def test_a_compiled_module_inside_is_kept_as_asked(keep: bool) -> None:
    outer = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))
    extract_model_from_parallel(outer, True, keep, True)
    assert isinstance(outer[0], nn.Linear) is not keep


def test_without_the_wrapper_of_precision_the_model_is_plain() -> None:
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(nn.Linear(2, 2))
    assert extract_model_from_parallel(prepared)(torch.ones(1, 2)).dtype == torch.float32
    plain = extract_model_from_parallel(prepared, False)
    assert type(plain) is nn.Linear
    assert plain.weight is prepared.weight
    assert pickle.loads(pickle.dumps(plain)).weight.shape == (2, 2)
