"""Private names of torch that this package uses, read in torch 2.9, 2.13 and 2.15, each with what happens without it.

No other module of the package uses a private name of torch; CI checks that.
"""

from typing import Any

import torch


def names_device(*args: Any, **kwargs: Any) -> bool:
    """Whether arguments of ``nn.Module.to`` name a device, by ``torch._C._nn._parse_to``; without it, yes."""
    parse = getattr(getattr(torch._C, "_nn", None), "_parse_to", None)
    return parse is None or parse(*args, **kwargs)[0] is not None
