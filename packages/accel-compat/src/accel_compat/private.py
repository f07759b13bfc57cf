"""Private names of torch and DeepSpeed that this package uses."""

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def synchronising(model: Any) -> Iterator[None]:
    """Within the block, DDP reduces the gradients of a forward that ran under ``no_sync``.

    torch has no public name for the preparation of the reducer; without it, the gradients stay those of this rank.
    """
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = True
    model.require_forward_param_sync = True
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before


def is_compiled(module: Any) -> bool:
    """Whether torch.compile returned this module; torch does not export the class of such modules."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)


def sampler_length(sampler: Any) -> int | None:
    """Number of samples that a RandomSampler was told to draw, which torch has no public name for; None: all."""
    count: int | None = sampler._num_samples
    return count


def publish_sequence_group(group: Any) -> Callable[[], None]:
    """Makes DeepSpeed's functions return a sequence-parallel group to scripts, until the returned function is called.

    The size that DeepSpeed knows stays 1, because accel's engines average gradients over all ranks.
    """
    from deepspeed.utils import groups

    published: dict[str, Any] = {
        "_get_sequence_parallel_group": lambda: group,
        "_get_sequence_parallel_rank": group.rank,
    }
    before = {name: getattr(groups, name) for name in published}
    groups.__dict__.update(published)
    return lambda: groups.__dict__.update(before)


def shard_records() -> Mapping[tuple[str, str], Any]:
    """All that ``.metadata`` of torch's distributed checkpoints may name, with the object that stands for it.

    Dtypes of torch come on top of these. Names of torch 2.2 and of Python 3.13 are among them.
    """
    from torch.distributed.checkpoint import filesystem, metadata
    from torch.serialization import _get_layout

    of_metadata, of_torch_2_2 = metadata.__name__, "torch.distributed._shard.sharded_tensor.metadata"
    encodings = metadata._MEM_FORMAT_ENCODING

    def member(given: Any, name: str) -> Any:
        """Placeholder of ``getattr``, with which some versions of Python 3.11 pickle enum members."""
        if given is not encodings or name not in encodings.__members__:
            raise pickle.UnpicklingError(f"getattr({given!r}, {name!r})")
        return encodings[name]

    def path(*parts: str) -> PurePosixPath:
        """Placeholder of ``PosixPath``, because a pickle can set attributes of a class that it names."""
        return PurePosixPath(*parts)

    records = (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
    )
    return {
        **{(of_metadata, record.__name__): record for record in records},
        (of_metadata, "_MEM_FORMAT_ENCODING"): encodings,
        (of_torch_2_2, "MEM_FORMAT_ENCODING"): encodings,
        (of_torch_2_2, "TensorProperties"): metadata.TensorProperties,
        (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
        ("torch.serialization", "_get_layout"): _get_layout,
        ("torch", "Size"): torch.Size,
        ("torch", "device"): torch.device,
        ("collections", "OrderedDict"): OrderedDict,
        ("builtins", "set"): set,
        ("builtins", "getattr"): member,
        ("pathlib", "PosixPath"): path,
        ("pathlib._local", "PosixPath"): path,
    }
