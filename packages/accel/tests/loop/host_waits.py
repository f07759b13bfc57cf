"""Interception of calls that would wait for a device, with the lines of accel that make them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import accel

SOURCES = str(Path(accel.__file__).parents[3])
WAITING = {
    *(torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__bool__),
    *(torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.nonzero),
}
FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray}
PASSED_ON = ("torch/overrides.py", "torch/utils/_python_dispatch.py", "torch/_tensor.py")


def place_in_accel() -> str:
    """The line of accel that called torch; empty if the caller is not accel, but torch's optimizers, for example."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename == __file__ or frame.f_code.co_filename.endswith(PASSED_ON):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return f"{file}:{frame.f_lineno}" if file.startswith(SOURCES) and "/src/" in file else ""


class Waits(TorchFunctionMode):
    """Lists the lines of accel that read a tensor, or copy numbers of the host to a tensor's device."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args[0] if args else None
        waits = function in WAITING or (function in FROM_HOST and not isinstance(given, torch.Tensor))
        if waits and (place := place_in_accel()):
            self.found.append(f"{place}: {getattr(function, '__name__', function)}")
        return function(*args, **(kwargs or {}))


class Reads(TorchDispatchMode):
    """Lists the lines of accel from which an operator reads a number of a tensor."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and (place := place_in_accel()):
            self.found.append(f"{place}: {function}")
        return function(*args, **(kwargs or {}))


@contextmanager
def waits(*, by_operator: bool = True) -> Iterator[list[str]]:
    """The lines found in the block; ``by_operator=False`` where torch makes tensors that no dispatch mode permits."""
    found: list[str] = []
    with Reads(found) if by_operator else nullcontext(), Waits(found):
        yield found
