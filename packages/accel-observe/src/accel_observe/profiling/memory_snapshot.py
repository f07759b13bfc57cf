"""Memory snapshot at an out-of-memory error: the largest tensors, by name."""

import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final

import torch
from torch import nn

from accel_state.device.device import Device

if TYPE_CHECKING:
    from accel_state.session import Session


@final
@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor that takes memory: its description, as far as known, and its bytes on this rank."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.nbytes / 2**20:10.2f} MiB  {self.dtype} {list(self.shape)} on {self.device}: {self.name}"


class NamedObjects(Protocol):
    """Interface of the objects whose tensors have names: models, and the users' optimizers."""

    @property
    def models(self) -> Sequence[nn.Module]: ...
    @property
    def inner_optimizers(self) -> Sequence[torch.optim.Optimizer]: ...


@contextmanager
def memory_snapshot(session: "Session", named: NamedObjects, path: str | Path | None, count: int) -> Iterator[None]:
    """On an out-of-memory error in the block, adds the ``count`` largest tensors to the error, and to a file.

    ``{rank}`` in ``path`` stands for the rank; None: no file.
    """
    from accel_state.device.memory import should_reduce_batch_size

    try:
        yield
    except Exception as error:
        if should_reduce_batch_size(error):
            held = largest_tensors(names_of(named.models, named.inner_optimizers), count)
            error.add_note("the largest tensors:\n" + "\n".join(map(str, held)))
            if path is not None:
                place = Path(str(path).replace("{rank}", str(session.rank)))
                write_snapshot(place, error, held, session.device)
        raise


def names_of(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, str]:
    """Names of a run's parameters, buffers, gradients and optimizer states, keyed by storage."""
    names: dict[int, str] = {}
    of_parameter: dict[int, str] = {}
    for number, model in enumerate(models):
        prefix = "model" if number == 0 else f"model_{number}"
        for name, weight in model.named_parameters():
            parameter: torch.Tensor = weight
            of_parameter[id(parameter)] = f"{prefix}.{name}"
            names[_storage(parameter)] = f"{prefix}.{name}"
            if parameter.grad is not None:
                names[_storage(parameter.grad)] = f"gradient of {prefix}.{name}"
        for name, buffer in model.named_buffers():
            names[_storage(buffer)] = f"buffer {prefix}.{name}"
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    names[_storage(value)] = f"{key} of {of_parameter.get(id(parameter), 'a parameter')}"
    return names


def largest_tensors(names: Mapping[int, str], count: int = 20) -> list[HeldTensor]:
    """The largest tensors of this process, each storage once."""
    found: dict[int, HeldTensor] = {}
    for candidate in gc.get_objects():
        try:
            if not issubclass(type(candidate), torch.Tensor):  # isinstance would trigger warnings of deprecated objects
                continue
            tensor = _local(candidate)
            storage = tensor.untyped_storage()
            key, nbytes = storage.data_ptr(), storage.nbytes()
        except Exception:  # objects that are half constructed or half destroyed, and tensors without memory
            continue
        if key and (key not in found or tensor.numel() > math.prod(found[key].shape)):
            kind = "an activation or saved value" if tensor.grad_fn is not None else "unnamed"
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[key] = HeldTensor(names.get(key, kind), dtype, tuple(tensor.shape), str(tensor.device), nbytes)
    return sorted(found.values(), key=lambda one: -one.nbytes)[:count]


def write_snapshot(path: Path, error: BaseException, tensors: Iterable[HeldTensor], device: Device) -> None:
    """Writes the error, the tensors, and the summary of torch's allocator if the device has one."""
    lines = [f"{type(error).__name__}: {error}", "", *map(str, tensors)]
    if summary := device.memory_summary():
        lines += ["", summary]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _storage(tensor: torch.Tensor) -> int:
    return _local(tensor).untyped_storage().data_ptr()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
