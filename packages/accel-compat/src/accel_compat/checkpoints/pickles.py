"""Files of torch, read with a closed unpickler, and files of safetensors."""

import codecs
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

LOG = logging.getLogger("accelerate.utils.other")


def plain_types() -> list[Any]:
    """Types beyond torch's own that states hold and that execute nothing when they are read.

    Functions of NumPy have the names of NumPy 1 and of NumPy 2, because either reads what the other wrote.
    """
    rebuild, scalar = np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]
    functions = [
        (function, f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")
        for function, name in ((rebuild, "_reconstruct"), (scalar, "scalar"))
    ]
    dtypes = [type(np.dtype(name)) for name in ("uint32", "int64", "float64", "float32", "uint64", "int32", "bool")]
    return [*functions, np.ndarray, np.dtype, codecs.encode, *dtypes]


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Reads a file of ``torch.save`` with a closed unpickler: tensors, numbers, texts, containers, NumPy arrays."""
    if kwargs.pop("weights_only", True) is not True:
        LOG.warning("%s is read with weights_only=True: a state executes no code", f)
    with torch.serialization.safe_globals(plain_types()):
        return torch.load(f, map_location=map_location, weights_only=True, **kwargs)


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Writes ``obj`` on the main process, or on the first process of each node.

    A path is written beside and renamed at the end, so that tensors mapped from the file before keep their values.
    """
    from accel_compat.state.process_state import SharedPartialState

    state = SharedPartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    if not isinstance(f, str | os.PathLike):
        _write(obj, f, safe_serialization=safe_serialization)
        return
    path = Path(f)
    staged = path.with_name(f".{path.name}.{state.process_index}.tmp")
    try:
        _write(obj, staged, safe_serialization=safe_serialization)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def _write(obj: Any, f: Any, *, safe_serialization: bool) -> None:
    if not safe_serialization:
        torch.save(obj, f)
        return
    from safetensors.torch import save_file

    tensors = clean_state_dict_for_safetensors(obj) if isinstance(obj, Mapping) else obj
    save_file(tensors, f, metadata={"format": "pt"})


def clean_state_dict_for_safetensors(state_dict: Any) -> dict[str, Any]:
    """Returns the tensors without further names of one piece of memory, each contiguous.

    Tensors that lie side by side in one storage, as the weights of recurrent layers on a GPU do, are all kept.
    """
    from accel_inference import id_tensor_storage

    taken: dict[Any, list[range]] = {}
    kept: dict[str, Any] = {}
    dropped = []
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            kept[name] = value
            continue
        if value.device.type != "meta":
            piece, others = _bytes_of(value), taken.setdefault(id_tensor_storage(value), [])
            if any(piece.start < one.stop and one.start < piece.stop for one in others):
                dropped.append(name)
                continue
            others.append(piece)
        kept[name] = value.contiguous()
    if dropped:
        LOG.warning(
            "Removed shared tensor %s while saving. This should be OK, but check by verifying that you don't receive "
            "any warning while reloading",
            dropped,
        )
    return kept


def _bytes_of(tensor: torch.Tensor) -> range:
    """Bytes of its storage from the first element of a tensor to behind its last one; none of an empty tensor."""
    size, start = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
    if tensor.numel() == 0:
        return range(start, start)
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(start, start + (last + 1) * size)
