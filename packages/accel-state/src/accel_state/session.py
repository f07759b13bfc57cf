"""Session: this process's rank, device and process group, from opening to closing."""

import builtins
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, final

from accel_state import process
from accel_state.collectives.group_argument import is_fake
from accel_state.device.device import Device
from accel_state.environment import parse_flag
from accel_state.errors import UNSENDABLE, SessionError, TopologyError
from accel_state.process_group import group as groups
from accel_state.process_group.reference_count import (
    GroupLease,
    add_session,
    current_lease,
    open_sessions,
    remove_session,
)
from accel_state.topology import Topology

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

P = ParamSpec("P")
R = TypeVar("R")
_OFF = frozenset({"0", "off", "no", "false"})


@final
class Session:
    """Topology, device and process group of this process, while it is open.

    Created by ``open``; used as a context manager or closed by ``close``. Several sessions may be open in one
    process: they share torch's default group, which is closed with the last session. A group that existed before the
    first session is adopted and stays open.
    """

    def __init__(
        self, topology: Topology, device: Device, *, lease: GroupLease | None, group: "ProcessGroup | None", debug: bool
    ) -> None:
        self._topology = topology
        self._device = device
        self._lease = lease
        self._group = group
        self._debug = debug
        self._closed = False
        if lease is not None:
            lease.join(self)
        add_session(self)
        _spread_timeout()

    @classmethod
    def open(
        cls,
        *,
        cpu: bool = False,
        topology: Topology | None = None,
        device: "Device | str | torch.device | None" = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        init_method: "str | Store | None" = None,
        debug: bool | None = None,
        env: Mapping[str, str] | None = None,
    ) -> "Session":
        """Opens a session, and the default process group if there are several processes and no group is open.

        Collective: every rank of the group must call this. Arguments that are None are read from ``env`` (default:
        ``os.environ``): the topology from the launcher's variables, the device as in ``Device.choose``. ``timeout``
        is the timeout of collectives, and the upper limit of the wait at the rendezvous. A group that is already open
        keeps its timeout; a session with another timeout gets a second group of all ranks. Groups that accel, torch's
        device meshes or other libraries create without a timeout while the session is open get the session's timeout.

        ``init_method`` may be a URL (``tcp://``, ``file://``, ``env://``) or a ``torch.distributed.Store``. ``debug``
        verifies every collective before it runs; None reads ``ACCEL_DEBUG_MODE`` and ``ACCELERATE_DEBUG_MODE``. A group
        opened here gets a watchdog (see ``accel_state.watchdog``), unless ``ACCEL_HANG_DOCTOR`` is ``off``.

        Raises:
            TopologyError: the variables contradict each other, or there are more processes than devices.
            SessionError: ranks are missing at the rendezvous, or the group does not support the arguments.
        """
        env = os.environ if env is None else env
        if timeout is not None and timeout <= timedelta(0):
            raise SessionError(f"timeout={timeout} is not positive")
        topology, chosen = locate(cpu=cpu, topology=topology, device=device, env=env)
        lease = current_lease()
        if lease is not None:
            groups.check_adopted_backend(lease.group, backend)
            chosen.set_current()
        elif topology.world_size > 1:
            _spread_timeout()  # a session that was dropped without close may have left its timeout
            opened = groups.open_default_group(
                topology, chosen, backend=backend, timeout=timeout, init_method=init_method, env=env
            )
            lease = GroupLease(opened, owned=True)
            if env.get("ACCEL_HANG_DOCTOR", "on").lower() not in _OFF:
                lease.watch()
        else:
            groups.choose_backend(chosen, backend)
            chosen.set_current()  # libraries, and copies without a device of their own, use the current one
        group = None if lease is None else lease.group
        if group is not None and timeout not in {None, groups.read_timeout(group)}:
            assert timeout is not None
            group = groups.sibling_group(group, timeout=timeout)
        if debug is None:
            debug = any(parse_flag(env, name) for name in ("ACCEL_DEBUG_MODE", "ACCELERATE_DEBUG_MODE"))
        return cls(topology, chosen, lease=lease, group=group, debug=debug)

    @classmethod
    def current(cls) -> "Session | None":
        """Returns the session of this process that was opened last and is still open and referenced, or None."""
        sessions = open_sessions()
        return sessions[-1] if sessions else None

    def close(self, *, patience: float | None = None) -> None:
        """Closes this session; the last session also closes a group that accel opened. Further calls do nothing.

        ``patience`` is the time in seconds that closing the group may wait for the other ranks; None waits without a
        limit.
        """
        if self._closed:
            return
        self._closed = True
        remove_session(self)
        _spread_timeout()
        group, self._group = self._group, None
        lease, self._lease = self._lease, None
        if lease is None:
            return
        if group is not None and group is not lease.group and groups.default_group() is lease.group:
            groups.close_group(group, patience=patience)
        lease.leave(self, patience=patience)

    def __reduce__(self) -> NoReturn:
        raise TypeError(UNSENDABLE.format(kind="a Session"))

    def __deepcopy__(self, memo: object) -> "Session":
        return self

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error other ranks may have ended or hang, so closing must not wait for them.
        self.close(patience=None if error is None else 5.0)

    @property
    def topology(self) -> Topology:
        """Rank and sizes of this process."""
        return self._topology

    @property
    def device(self) -> Device:
        """The device this process computes on."""
        return self._device

    @property
    def group(self) -> "ProcessGroup | None":
        """Process group of this session's collectives: torch's default group, or one with the requested timeout.

        None for a single process without a group, and after ``close``.
        """
        return self._group

    @property
    def lease(self) -> GroupLease | None:
        """Reference count of torch's default group among the sessions of this process; None without a group."""
        return self._lease

    @property
    def debug(self) -> bool:
        """Whether collectives are verified on all ranks before they run."""
        return self._debug

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    @property
    def owns_group(self) -> bool:
        """Whether accel opened the group and closes it with the last session."""
        return self._lease is not None and self._lease.owned

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._topology.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._topology.world_size

    @property
    def local_rank(self) -> int:
        """Rank of this process on its node."""
        return self._topology.local_rank

    @property
    def timeout(self) -> timedelta | None:
        """Timeout of collectives, read from the group; None without a group."""
        return None if self._group is None else groups.read_timeout(self._group)

    @property
    def backend(self) -> str | None:
        """The group's backend, such as "gloo" or "cpu:gloo,cuda:nccl"; None without a group."""
        return None if self._group is None else groups.group_backend(self._group)

    def __repr__(self) -> str:
        if self._closed:
            return f"Session({self._topology}, device {self._device}, closed)"
        if self._group is None:
            return f"Session({self._topology}, device {self._device}, no process group)"
        life = "opened here" if self.owns_group else "adopted"
        return (
            f"Session({self._topology}, device {self._device}, backend {self.backend}, timeout {self.timeout}, {life})"
        )

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._topology.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self._topology.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this process has the highest rank."""
        return self._topology.is_last

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self._topology.world_size > 1

    def wait_for_everyone(self) -> None:
        """Returns once every rank has called it; at once for a single process.

        Collective: every rank of the group must call this.

        Raises:
            CollectiveError: a rank did not call it within the timeout.
        """
        group = self.live_group()
        if group is not None:
            process.barrier(group, self._device)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Context manager: rank 0 runs the block before the other ranks; if it fails there, all ranks raise.

        Collective: every rank of the group must call this.
        """
        return process.first(self.is_main_process, self.live_group())

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Context manager: local rank 0 of each node runs the block first; if one of them fails, all ranks raise.

        Collective: every rank of the group must call this.
        """
        return process.first(self.is_local_main_process, self.live_group())

    def on_main_process(self, function: Callable[P, R] | None = None) -> Any:
        """Decorates ``function`` to run on rank 0 only (None on other ranks); evaluated at each call."""
        return process.run_only(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[P, R] | None = None) -> Any:
        """Decorates ``function`` to run on local rank 0 of each node only."""
        return process.run_only(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[P, R] | None = None) -> Any:
        """Decorates ``function`` to run on the last rank only."""
        return process.run_only(lambda: self.is_last_process, function)

    def on_process(self, function: Callable[P, R] | None = None, process_index: int | None = None) -> Any:
        """Decorates ``function`` to run on rank ``process_index`` only; a single process always runs it."""
        _check_index("process_index", process_index)
        return process.run_only(lambda: not self.use_distributed or self.rank == process_index, function)

    def on_local_process(self, function: Callable[P, R] | None = None, local_process_index: int | None = None) -> Any:
        """Decorates ``function`` to run on local rank ``local_process_index`` only; a single process always runs it."""
        _check_index("local_process_index", local_process_index)
        return process.run_only(lambda: not self.use_distributed or self.local_rank == local_process_index, function)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Context manager that yields this rank's shard of ``inputs``; see ``accel_state.process.split``."""
        yield process.split(inputs, rank=self.rank, world_size=self.world_size, padding=apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on local rank 0 of each node."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def gather(self, tree: Any) -> Any:
        """All-gathers every tensor in ``tree``, concatenated along dim 0.

        Collective: every rank of the group must call this.
        """
        from accel_state.collectives.tensors import gather

        return gather(tree, group=self.live_group(), verify=self._debug)

    def gather_object(self, objects: Iterable[Any]) -> Any:
        """Returns the concatenated lists of all ranks, in order of rank, on every rank.

        Collective: every rank of the group must call this.
        """
        from accel_state.collectives.tensors import gather_object

        return gather_object(objects, group=self.live_group())

    def broadcast(self, tree: Any, from_process: int = 0) -> Any:
        """Broadcasts the tensors of rank ``from_process`` into those of the other ranks, in place.

        Collective: every rank of the group must call this.
        """
        from accel_state.collectives.tensors import broadcast

        return broadcast(tree, from_process, group=self.live_group(), verify=self._debug)

    def broadcast_object_list(self, objects: list[Any], from_process: int = 0) -> list[Any]:
        """Broadcasts the objects of rank ``from_process`` into the lists of the other ranks, in place.

        Collective: every rank of the group must call this.
        """
        from accel_state.collectives.tensors import broadcast_object_list

        return broadcast_object_list(objects, from_process, group=self.live_group())

    def reduce(self, tree: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
        """Reduces tensors in ``tree`` over the ranks ("sum", "mean", "max", "min") and multiplies them by ``scale``.

        Collective: every rank of the group must call this.
        """
        from accel_state.collectives.tensors import reduce

        return reduce(tree, reduction, scale, group=self.live_group(), verify=self._debug)

    def pad_across_processes(self, tree: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pads every tensor in ``tree`` along ``dim`` to its longest length over all ranks.

        Collective: every rank of the group must call this.
        """
        from accel_state.collectives.tensors import pad_across_processes

        return pad_across_processes(tree, dim, pad_index, pad_first, group=self.live_group(), verify=self._debug)

    def live_group(self) -> "ProcessGroup | None":
        """Returns the group for a collective; None for a single process.

        Raises:
            SessionError: the session is closed and there are several processes.
        """
        if self._closed and self.use_distributed:
            raise SessionError(f"{self!r} cannot reach the other processes any more")
        return self._group if self.use_distributed else None


def locate(
    *,
    cpu: bool = False,
    topology: Topology | None = None,
    device: "Device | str | torch.device | None" = None,
    env: Mapping[str, str] | None = None,
) -> tuple[Topology, Device]:
    """Returns the topology and the device of a session that ``Session.open`` would open, and opens nothing.

    Raises:
        TopologyError: the variables contradict each other, or there are more processes than devices.
    """
    env = os.environ if env is None else env
    lease = current_lease()
    if lease is not None:
        topology = _adopted_topology(lease.group, topology, env)
    elif topology is None:
        topology = Topology.from_env(env)
    # Of the ranks of a fake group only this one exists, so that it may use any device.
    on = Topology() if lease is not None and is_fake(lease.group) else topology
    return topology, Device.choose(on, cpu=cpu, asked=device, env=env)


def current_topology(env: Mapping[str, str] | None = None) -> Topology:
    """Returns the topology of ``Session.current``; without a session, that of ``env`` (default: ``os.environ``).

    Raises:
        TopologyError: no session is open and the launcher's variables contradict each other.
    """
    session = Session.current()
    return Topology.from_env(os.environ if env is None else env) if session is None else session.topology


def _adopted_topology(group: "ProcessGroup", given: Topology | None, env: Mapping[str, str]) -> Topology:
    rank, world_size = group.rank(), group.size()
    if given is not None:
        if (given.rank, given.world_size) != (rank, world_size):
            raise SessionError(
                f"the process group is already open as rank {rank} of {world_size}, but asked for {given}"
            )
        return given
    try:
        found = Topology.from_env(env)
    except TopologyError:
        found = Topology()
    if (found.rank, found.world_size) == (rank, world_size):
        return found
    # A group opened without a launcher: no variable describes it or another node, so all ranks are taken to be on this
    # one.
    return Topology.on_one_node(rank, world_size, launcher="adopted")


def _spread_timeout() -> None:
    """Makes the timeout of the last opened session the default of groups created from now on."""
    sessions = open_sessions()
    groups.set_default_timeout(sessions[-1].timeout if sessions else None)


def _check_index(name: str, index: int | None) -> None:
    if index is None:
        raise ValueError(f"{name} must be given: the number of the process that is to run the function")
