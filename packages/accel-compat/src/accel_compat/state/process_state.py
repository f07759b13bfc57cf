"""PartialState: the process, its device and its group, shared by all instances."""

import builtins
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from accel_compat.state.shared import SharedAttributes
from accel_state.enums import DistributedType
from accel_state.environment import parse_flag_from_env
from accel_state.session import Session

_FACTS = (
    "_cpu _mixed_precision _shared_state backend debug device distributed_type fork_launched local_process_index "
    "num_processes process_index"
)


class SharedPartialState(SharedAttributes):
    """The process as Accelerate's ``PartialState`` presents it: one state for all instances, made by the first.

    Attributes:
        device: the device of this process.
        distributed_type: Accelerate's name for the kind of distribution.
        num_processes: world size.
        process_index: rank.
        local_process_index: rank on this node.
    """

    _shared_state: dict[str, Any] = {}
    _known_attrs = frozenset(_FACTS.split())
    _shown = "PartialState"

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        super().__init__()
        if not self.initialized:
            self._open(cpu, kwargs)
        self.fork_launched = parse_flag_from_env("FORK_LAUNCHED")

    def _open(self, cpu: bool, kwargs: dict[str, Any]) -> None:
        kwargs.pop("_use_sagemaker_dp", None)
        asked = kwargs.get("backend")
        device = os.environ.get("ACCELERATE_TORCH_DEVICE")
        deepspeed = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
        options = {name: kwargs[name] for name in ("backend", "timeout", "init_method") if kwargs.get(name) is not None}
        if cpu and options.get("backend") == "nccl":
            del options["backend"]
        session = Session.open(cpu=cpu, device=device, **options)
        if asked is not None and not session.use_distributed and not torch.distributed.is_initialized():
            session.close()
            raise ValueError(
                "Default process group has not been initialized, please make sure to call init_process_group."
            )
        self._session = session
        self._cpu = cpu
        self.backend = session.backend
        self.debug = parse_flag_from_env("ACCELERATE_DEBUG_MODE")
        self.num_processes = session.world_size
        self.process_index = session.rank
        self.local_process_index = session.local_rank
        self.distributed_type = DistributedType.DEEPSPEED if deepspeed and not cpu else _kind(session)
        torch_device = session.device.torch
        if torch_device.type == "cpu" and session.use_distributed and device is None:
            torch_device = torch.device("cpu", 0)
        self.device = torch_device if device is None else torch.device(device)

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}{('  Backend: ' + self.backend) if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    @property
    def session(self) -> Session:
        """accel's session of this process."""
        session: Session = self.__dict__["_session"]
        return session

    @staticmethod
    def _reset_state() -> None:
        """Forgets the state; the process group stays open."""
        SharedPartialState._shared_state.clear()

    @property
    def initialized(self) -> bool:
        """Whether the state exists."""
        return self._shared_state != {}

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return bool(self.distributed_type != DistributedType.NO and self.num_processes > 1)

    @property
    def is_last_process(self) -> bool:
        """Whether this process has the highest rank."""
        return bool(self.process_index == self.num_processes - 1)

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return bool(self.process_index == 0)

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return bool(self.local_process_index == 0)

    @property
    def default_device(self) -> torch.device:
        """The device that a process without a launcher uses."""
        from accel_state.session import locate

        return locate()[1].torch

    def set_device(self) -> None:
        """Does nothing: the device is chosen when the state is made."""

    def wait_for_everyone(self) -> None:
        """Barrier: blocks until every process has called this."""
        if self.use_distributed:
            self.session.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Context manager: rank 0 runs the block before the other ranks."""
        return self.session.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Context manager: local rank 0 runs the block before the other ranks of its node."""
        return self.session.local_main_process_first()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Context manager that yields this rank's shard of ``inputs``."""
        if self.num_processes == 1:
            yield inputs
            return
        with self.session.split_between_processes(inputs, apply_padding) as shard:
            yield shard

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Returns ``function`` on the main process, and a function without effect on others."""
        if not self.initialized:
            raise ValueError("The `PartialState` or `Accelerator` must be initialized before calling this function.")
        assert function is not None
        return function if self.is_main_process or not self.use_distributed else do_nothing

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Returns ``function`` on the first process of each node, and a function without effect on others."""
        assert function is not None
        return function if self.is_local_main_process or not self.use_distributed else do_nothing

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``function`` on the last process, and a function without effect on others."""
        return function if self.is_last_process or not self.use_distributed else do_nothing

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Returns ``function`` on the process with this rank, and a function without effect on others."""
        if function is None:
            return partial(self.on_process, process_index=process_index)
        return function if self.process_index == process_index or not self.use_distributed else do_nothing

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Returns ``function`` on the process with this local rank, and a function without effect on others."""
        if function is None:
            return partial(self.on_local_process, local_process_index=local_process_index)
        return function if self.local_process_index == local_process_index or not self.use_distributed else do_nothing

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on local rank 0 of each node."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroys the process group, unless the processes were forked."""
        if self.fork_launched and group is None:
            return
        if group is None and "_session" in self.__dict__:
            self.session.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(group)


def _kind(session: Session) -> DistributedType:
    if not session.use_distributed:
        return DistributedType.NO
    kind = "GPU" if session.device.type == "cuda" else session.device.type.upper()
    return DistributedType.XLA if kind == "XLA" else DistributedType(f"MULTI_{kind}")


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Returns None."""
    return None
