"""New memory for many bytes, in large pages where the system has them.

Memory that is written for the first time is given out page by page, which costs as much as the copy that fills it.
Linux gives 2 MiB at a time to who asks for it: filling 200 MB of new tensors from the page cache took half the time.
"""

import ctypes
import sys
from collections.abc import Sequence

import torch

_LARGE = 2 * 2**20
_MADV_HUGEPAGE = 14


def new_tensor(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
    """An uninitialised CPU tensor; of its memory, what covers whole large pages is in such, if the system does that."""
    tensor = torch.empty(tuple(shape), dtype=dtype, pin_memory=pinned)
    begin = tensor.data_ptr()
    first, last = -(-begin // _LARGE) * _LARGE, (begin + tensor.numel() * tensor.element_size()) // _LARGE * _LARGE
    if first < last and not pinned and sys.platform == "linux":
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_HUGEPAGE)  # what it refuses stays as it was
    return tensor
