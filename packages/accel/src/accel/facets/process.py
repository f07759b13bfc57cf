"""An Accelerator's process facts and collectives, all of them the session's."""

from abc import ABC
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accel_state.session import Session


class ProcessFacet(ABC):
    """Forwards to ``self.session``; see :class:`accel_state.Session` for what each name means."""

    session: "Session"

    @property
    def device(self) -> torch.device:
        """Where prepared models and batches live."""
        return self.session.device.torch

    @property
    def num_processes(self) -> int:
        """Processes of this run."""
        return self.session.world_size

    @property
    def process_index(self) -> int:
        """This process's rank, 0-based, over all machines."""
        return self.session.rank

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine, 0-based."""
        return self.session.local_rank

    @property
    def use_distributed(self) -> bool:
        """There is more than one process."""
        return self.session.use_distributed

    @property
    def is_main_process(self) -> bool:
        """Rank 0 of all."""
        return self.session.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Rank 0 of this machine."""
        return self.session.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """The highest rank."""
        return self.session.is_last_process

    def wait_for_everyone(self) -> None:
        """Blocks until every process has come here."""
        self.session.wait_for_everyone()

    def print(self, *values: object, **options: Any) -> None:
        """``print``, on the local main process only."""
        self.session.print(*values, **options)

    def main_process_first(self) -> AbstractContextManager[None]:
        """The main process runs the block first, the others once it has left it."""
        return self.session.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Each machine's main process runs the block first, its others once it has left it."""
        return self.session.local_main_process_first()

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorates a function to run on the main process only; elsewhere it returns None."""
        decorated: Callable[..., Any] = self.session.on_main_process(function)
        return decorated

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorates a function to run on each machine's main process only; elsewhere it returns None."""
        decorated: Callable[..., Any] = self.session.on_local_main_process(function)
        return decorated

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorates a function to run on the last process only; elsewhere it returns None."""
        decorated: Callable[..., Any] = self.session.on_last_process(function)
        return decorated

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorates a function to run on one process only; elsewhere it returns None."""
        decorated: Callable[..., Any] = self.session.on_process(function, process_index=process_index)
        return decorated

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorates a function to run on one process of each machine only; elsewhere it returns None."""
        decorated: Callable[..., Any] = self.session.on_local_process(function, local_process_index=local_process_index)
        return decorated

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Yields this process's contiguous part of ``inputs`` (list, tuple, dict of them, tensor, dataset)."""
        return self.session.split_between_processes(inputs, apply_padding=apply_padding)

    def gather(self, tensor: Any) -> Any:
        """Concatenates every process's tensors along dimension 0, in any nesting; the result is on every process."""
        return self.session.gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduces all processes' tensors elementwise (sum, mean, max or min), in any nesting, times ``scale``."""
        return self.session.reduce(tensor, reduction=reduction, scale=scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pads every process's tensors along ``dim`` to the longest among them, so that they can be gathered."""
        return self.session.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Raises a flag on this process, which ``check_trigger`` makes known to all."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any process has called ``set_trigger`` since the last check. Collective; lowers the flag."""
        flag = torch.tensor(int(getattr(self, "_trigger", False)), device=self.session.device.own_numbers)
        self._trigger = False
        return bool(self.session.reduce(flag, reduction="max").item())
