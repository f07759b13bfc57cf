"""Private names of torch that this package uses, read in torch 2.9 and 2.13, each with what happens without it.

No other module of the package uses a private name of torch; CI checks that.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def names_device(*args: Any, **kwargs: Any) -> bool:
    """Whether arguments of ``nn.Module.to`` name a device, by ``torch._C._nn._parse_to``; without it, yes."""
    parse = getattr(getattr(torch._C, "_nn", None), "_parse_to", None)
    return parse is None or parse(*args, **kwargs)[0] is not None


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """A function that ``torch.compile`` leaves to Python, with all that it calls.

    ``torch.compiler.disable`` does that, too, and imports the compiler, which takes seconds: here it is used once
    something else has imported it (``torch._dynamo``).
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" in sys.modules:
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return wrapper
