"""Folders of torch's distributed checkpoints, read in full and with a closed unpickler, without model or ranks."""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from accel_compat.checkpoints.pickles import load
from accel_compat.private import shard_records
from accel_state.errors import CheckpointError

_RECORDS = shard_records()


@final
class _ClosedUnpickler(pickle.Unpickler):
    """Unpickler of ``.metadata``: records of torch's distributed checkpoints, sizes and dtypes.

    It imports nothing and looks up no attribute by a name in the file, because ``Unpickler.find_class`` follows dots in names
    to any object that a module reaches.
    """

    def find_class(self, module: str, name: str) -> Any:
        dtype = vars(torch).get(name) if module == "torch" else None
        found = dtype if isinstance(dtype, torch.dtype) else _RECORDS.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return found


@final
class _ClosedReader(FileSystemReader):
    """Reader whose metadata executes nothing."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        place = Path(self.path) / ".metadata"
        try:
            with open(place, "rb") as file:
                found = _ClosedUnpickler(file).load()
        except OSError as error:
            raise CheckpointError(f"{place} cannot be read: {error.strerror}") from error
        except (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"{place} holds more than the records of shards: {error}") from error
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{place} is a {type(found).__name__}; expected the records of shards")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


@final
class _ClosedPlanner(DefaultLoadPlanner):
    """Planner that reads values other than tensors as all files of states are read."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.plain: dict[str, Any] = {}

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.plain[read_item.dest_index.fqn] = load(value)


def read_shards(folder: Path) -> dict[str, Any]:
    """Returns all values of a folder, with full tensors in host memory.

    Raises:
        CheckpointError: the folder is damaged, or holds more than tensors and plain values.
    """
    reader = _ClosedReader(folder)
    facts = reader.read_metadata()
    flat: dict[str, Any] = {}
    for name, one in facts.state_dict_metadata.items():
        if isinstance(one, TensorStorageMetadata):
            flat[name] = torch.empty(one.size, dtype=one.properties.dtype)
        elif isinstance(one, BytesStorageMetadata):
            flat[name] = None
    planner = _ClosedPlanner()
    # The warning is of a load without a process group.
    with warnings.catch_warnings(action="ignore", category=UserWarning), failures_as_errors(folder):
        load_shards(flat, storage_reader=reader, planner=planner, no_dist=True)
    return _nested({**flat, **planner.plain}, facts.planner_data or {})


@contextmanager
def failures_as_errors(folder: Path) -> Iterator[None]:
    """Raises what torch reports of a load, which is no ``Exception``, as an error of the folder.

    Its text is the first failure's; torch's, with the tracebacks of all ranks, is the cause.

    Raises:
        CheckpointError: a step of the load failed on a rank.
    """
    try:
        yield
    except CheckpointException as error:
        first = next((str(one) or type(one).__name__ for one, _ in error.failures.values()), error)
        raise CheckpointError(f"the shards of {folder} cannot be read: {first}") from error


def _nested(flat: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuilds the tree; ``paths`` has the keys of each value."""
    root: dict[str, Any] = {}
    for name, value in flat.items():
        here: Any = root
        path = paths.get(name, (name,))
        for key, following in pairwise(path):
            here = _child(here, key, [] if isinstance(following, int) else {})
        _put(here, path[-1], value)
    return root


def _child(here: Any, key: Any, new: Any) -> Any:
    if isinstance(here, list):
        here.extend([None] * (key + 1 - len(here)))
        if here[key] is None:
            here[key] = new
        return here[key]
    return here.setdefault(key, new)


def _put(here: Any, key: Any, value: Any) -> None:
    if isinstance(here, list):
        here.extend([None] * (key + 1 - len(here)))
    here[key] = value
