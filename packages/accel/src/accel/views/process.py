"""Process facts and collectives of an Accelerator, all delegated to the session."""

from abc import ABC
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accel_state.session import Session


class ProcessViews(ABC):
    """Delegates to ``self.session``; see ``accel_state.Session`` for the meaning of each name."""

    session: "Session"

    @property
    def device(self) -> torch.device:
        """Device of prepared models and batches."""
        return self.session.device.torch

    @property
    def num_processes(self) -> int:
        """World size: number of processes of this run."""
        return self.session.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process, from 0."""
        return self.session.rank

    @property
    def local_process_index(self) -> int:
        """Local rank of this process, from 0."""
        return self.session.local_rank

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.session.use_distributed

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.session.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is local rank 0."""
        return self.session.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self.session.is_last_process

    def wait_for_everyone(self) -> None:
        """Barrier: blocks until every process has called this.

        Collective: every rank of the group must call this.
        """
        self.session.wait_for_everyone()

    def print(self, *values: object, **options: Any) -> None:
        """``print``, on the local main process only."""
        self.session.print(*values, **options)

    def main_process_first(self) -> AbstractContextManager[None]:
        """The main process runs the block first, the others once it has left it."""
        return self.session.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """On each node, the local main process runs the block first, the others once it has left it."""
        return self.session.local_main_process_first()

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorates a function to run on the main process only; elsewhere it returns None."""
        decorated: Callable[..., Any] = self.session.on_main_process(function)
        return decorated

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorates a function to run on each node's main process only; elsewhere it returns None."""
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
        """Decorates a function to run on one process of each node only; elsewhere it returns None."""
        decorated: Callable[..., Any] = self.session.on_local_process(function, local_process_index=local_process_index)
        return decorated

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Yields this process's contiguous shard of ``inputs`` (list, tuple, dict of them, tensor, dataset)."""
        return self.session.split_between_processes(inputs, apply_padding=apply_padding)

    def gather(self, tensor: Any) -> Any:
        """All-gathers tensors in any nesting, concatenated along dimension 0; the result is on every process.

        Collective: every rank of the group must call this.
        """
        return self.session.gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """All-reduces tensors in any nesting elementwise (sum, mean, max or min), and multiplies them by ``scale``.

        Collective: every rank of the group must call this.
        """
        return self.session.reduce(tensor, reduction=reduction, scale=scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pads every process's tensors along ``dim`` to the longest of all processes, so that they can be gathered.

        Collective: every rank of the group must call this.
        """
        return self.session.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Sets a flag on this process, which ``check_trigger`` reports on all processes."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any process has called ``set_trigger`` since the last check; clears the flag.

        Collective: every rank of the group must call this.
        """
        flag = torch.tensor(int(getattr(self, "_trigger", False)), device=self.session.device.own_numbers)
        self._trigger = False
        return bool(self.session.reduce(flag, reduction="max").item())
