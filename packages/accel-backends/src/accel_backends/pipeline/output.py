"""Output of a model in a pipeline, and its exchange among the ranks."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from accel_state.collectives.pickled import broadcast_pickled
from accel_state.errors import BackendError

_IN_TRAINING = (
    "the forward and the backward of a pipeline run together, so that a loss which is computed from outputs afterwards "
    "has no gradients. Pass labels to the model, or give the loss to the pipeline: PipelineParallelConfig(loss_fn="
    "lambda outputs, batch: ...). Under torch.no_grad() outputs are returned"
)
_IN_EVALUATION = 'they are on the ranks of the last stage; nearest: PipelineParallelConfig(outputs="all")'


@final
class PipelineOutput(OrderedDict[str, Any]):
    """Output by field, also as attributes and by position, as transformers' models return it.

    Args:
        fields: those that this rank has.
        training: whether the call was one of training, which returns the loss alone.
    """

    def __init__(self, fields: Mapping[str, Any] = {}, *, training: bool = False) -> None:
        super().__init__(fields)
        self.__dict__["training"] = training

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "loss":
            return None
        if self.__dict__.get("training"):
            raise BackendError(f"outputs.{name} of a model that trains in a pipeline: {_IN_TRAINING}")
        raise BackendError(f"outputs.{name} of a model in a pipeline: {_IN_EVALUATION}")

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int | slice) else super().__getitem__(key)

    def to_tuple(self) -> tuple[Any, ...]:
        """Returns the values in the order of the fields."""
        return tuple(self.values())


def joined_outputs(parts: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Concatenates the tensors of the outputs of all micro-batches, without their losses."""
    names = [name for name, value in parts[0].items() if isinstance(value, torch.Tensor) and value.ndim]
    return {name: torch.cat([part[name] for part in parts]) for name in names if name != "loss"}


def sent_to_all(
    own: Mapping[str, torch.Tensor], source: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, torch.Tensor]:
    """Sends the outputs of the rank ``source`` of a group to all its ranks; in a fake group a rank has its own.

    Collective: every rank of the group must call this.
    """
    header = [(name, tuple(value.shape), value.dtype) for name, value in own.items()]
    found = {}
    for name, shape, dtype in broadcast_pickled(header, source, group):
        tensor = own[name].contiguous() if name in own else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(tensor, group=group, group_src=source)
        found[name] = tensor
    return found
