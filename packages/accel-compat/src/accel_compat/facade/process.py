"""Methods of the Accelerator about the process, its ranks and collectives."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch

from accel_compat.helpers import operations
from accel_compat.state.accelerator_state import SharedAcceleratorState
from accel_compat.state.process_state import SharedPartialState
from accel_state.enums import DistributedType


def _deferred(function: Callable[..., Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """A function that is wrapped anew at each call, because the state decides then."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrap(function)(*args, **kwargs)

    return call


class ProcessMethods:
    """Process, ranks and collectives of an Accelerator."""

    state: SharedAcceleratorState
    flag_tensor: torch.Tensor | None

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes with an accelerator each."""
        kind = self.distributed_type.value
        return bool(self.use_distributed and kind.startswith("MULTI_") and kind != "MULTI_CPU")

    @property
    def distributed_type(self) -> DistributedType:
        """Accelerate's name for the kind of distribution."""
        kind: DistributedType = self.state.distributed_type
        return kind

    @property
    def num_processes(self) -> int:
        """World size."""
        return int(self.state.num_processes)

    @property
    def process_index(self) -> int:
        """Rank."""
        return int(self.state.process_index)

    @property
    def local_process_index(self) -> int:
        """Rank on this node."""
        return int(self.state.local_process_index)

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        device: torch.device = self.state.device
        return device

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this process has the highest rank."""
        return self.state.is_last_process

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Context manager that yields this rank's shard of ``inputs``."""
        return SharedPartialState().split_between_processes(inputs, apply_padding=apply_padding)

    def _wrap(self, function: Any, name: str, *args: Any) -> Any:
        if function is None:
            return lambda one: self._wrap(one, name, *args)
        return _deferred(function, lambda one: getattr(SharedPartialState(), name)(one, *args))

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorator: runs the function on the main process only."""
        return self._wrap(function, "on_main_process")

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorator: runs the function on the first process of each node only."""
        return self._wrap(function, "on_local_main_process")

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        """Decorator: runs the function on the last process only."""
        return self._wrap(function, "on_last_process")

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorator: runs the function on the process with this rank only."""
        return self._wrap(function, "on_process", process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorator: runs the function on the processes with this local rank only."""
        return self._wrap(function, "on_local_process", local_process_index)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Context manager: rank 0 runs the block before the other ranks."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Context manager: local rank 0 runs the block before the other ranks of its node."""
        return self.state.local_main_process_first()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on local rank 0 of each node."""
        self.state.print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """Barrier: blocks until every process has called this."""
        SharedPartialState().wait_for_everyone()

    def gather(self, tensor: Any) -> Any:
        """All-gathers every tensor, concatenated along dim 0."""
        return operations.gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduces every tensor over the processes."""
        return operations.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pads every tensor along ``dim`` to its longest length over all processes."""
        return operations.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Sets the flag that ``check_trigger`` reads on all processes."""
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Whether any process has set the flag; clears it."""
        if self.flag_tensor is None:
            self.flag_tensor = torch.tensor(0, device=self.device)
        found = int(self.reduce(self.flag_tensor).item()) >= 1
        if found:
            self.flag_tensor = torch.tensor(0, device=self.device)
        return found
