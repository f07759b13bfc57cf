"""Private names of torch that this package uses, read in torch 2.9, 2.13 and 2.15, each with what happens without it.

No other module of the package uses a private name of torch; CI checks that.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Without these there is nothing to profile with: a torch that has moved them fails at import, and names them.
flatten = _pytree.tree_flatten
leaves = _pytree.tree_leaves
mapped = _pytree.tree_map
unflatten = _pytree.tree_unflatten


# Operations of GPUs that read fp16 and write fp32. A torch without them fails at import.
WIDENING_SOFTMAX: Mapping[Any, Any] = {
    torch.ops.aten.softmax.int: torch.ops.aten._softmax.default,
    torch.ops.aten.log_softmax.int: torch.ops.aten._log_softmax.default,
}


def storage_key(storage: torch.UntypedStorage) -> int:
    """Returns a number that distinguishes living storages, also those without memory: ``_cdata``, or Python's ``id``.

    Without ``_cdata`` views that Python holds through several storage objects are counted several times.
    """
    key: int = getattr(storage, "_cdata", id(storage))
    return key


def packet_of(operation: Any) -> Any:
    """Returns the operation without its overload; None of a callable that has none."""
    return getattr(operation, "overloadpacket", None)
