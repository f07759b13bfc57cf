"""Rendezvous of the launchers of a job's nodes, at which they agree on each attempt."""

import contextlib
import json
import socket
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Self, final

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from accel_launch.launch.launch_plan import LaunchPlan
from accel_launch.launch.multi_node.store_probe import StoreProbe
from accel_launch.launch.supervisor.interrupts import Interrupts
from accel_launch.launch.supervisor.output import say
from accel_launch.launch.supervisor.ports import check_free, reserved_port
from accel_state.errors import LaunchError
from accel_state.process_group.name_lookup import stop_name_lookups

_POLL = 0.05
_STORE_TIMEOUT = timedelta(seconds=60)
_FAREWELL = 5.0
_PATIENCE = 5.0


class MeetingPoint(RendezvousHandler, ABC):
    """Store of a job's launchers, held by node 0 at the address that all nodes were given.

    Each round of the rendezvous has its own keys in the store, and each round's processes have their own port. So no
    state of a failed attempt reaches the next one.
    """

    def __init__(self, plan: LaunchPlan, interrupts: Interrupts) -> None:
        config = plan.config
        self.round = 0
        self.size = plan.num_machines
        self._name = str(config.machine_rank)
        self._address, self._port = plan.main_address, plan.main_port
        self._facts = {"num_processes": plan.num_processes, "num_machines": plan.num_machines}
        self._timeout = config.join_timeout.total_seconds()
        self._interrupts = interrupts
        self._done_round = 0
        self._alone = False
        self._held = ExitStack()

    @property
    @abstractmethod
    def _is_host(self) -> bool:
        """Whether this launcher holds the store."""

    @abstractmethod
    def restarts_left(self, max_restarts: int) -> int:
        """Restarts left for all nodes together after processes have failed; 0 ends the job."""

    def __enter__(self) -> Self:
        stop_name_lookups()
        if self._is_host:
            check_free(self._port, "")
            self._store = self._open("127.0.0.1", host=True)
            self._store.set("run", uuid.uuid4().hex)
        else:
            self._find_host()
            self._store = self._open(self._address, host=False)
        self._run_id = self._store.get("run").decode()
        self._introduce()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()
        if self._alone:
            return
        if error is not None:
            self._leave(error)
        with contextlib.suppress(RuntimeError):
            self._store.add("left", 1)
            # The store ends with node 0, which therefore leaves last.
            deadline = time.monotonic() + _FAREWELL
            while self._is_host and self._store.add("left", 0) < self._store.add("came", 0):
                if time.monotonic() > deadline:
                    return
                time.sleep(_POLL)

    def all_done(self) -> bool:
        """Records that this node's processes have succeeded; returns whether those of all nodes have."""
        with self._lost():
            added = int(self._done_round != self.round)
            self._done_round = self.round
            return self._store.add(f"round/{self.round}/done", added) >= self.size

    def await_done(self, seconds: float) -> None:
        """Records that this node's processes have ended, before it leaves by itself (because it was preempted).

        The node that holds the store waits for those of all nodes, at most ``seconds``.
        """
        deadline = time.monotonic() + seconds
        with contextlib.suppress(LaunchError):
            while not self.all_done() and self._is_host and time.monotonic() < deadline:
                time.sleep(_POLL)

    def give_up(self, reason: str) -> None:
        """Ends the job on the other nodes, with the reason."""
        with contextlib.suppress(RuntimeError):
            self._store.set("over", reason)

    def given_up(self) -> str | None:
        """Reason for which another node has ended the job; None if none has."""
        with self._lost():
            return self._store.get("over").decode() if self._store.check(["over"]) else None

    def get_run_id(self) -> str:
        """Id of the job; the same on all nodes."""
        return self._run_id

    def is_closed(self) -> bool:
        """Always False: the launchers exit when the job is over."""
        return False

    def set_closed(self) -> None:
        """Ends the job on all nodes."""
        self.give_up("the job was closed")

    def shutdown(self) -> bool:
        """No-op: the store is closed at the end of the ``with`` block."""
        return True

    def _leave(self, error: BaseException) -> None:
        """Ends the job on the other nodes because this node ends early."""
        self.give_up(f"machine {self._name} has ended: {error}")

    def _open(self, host_name: str, *, host: bool) -> TCPStore:
        return TCPStore(host_name, self._port, None, host, _STORE_TIMEOUT, wait_for_workers=False)

    def _introduce(self) -> None:
        mine = json.dumps(self._facts, sort_keys=True)
        theirs = self._store.compare_set("facts", "", mine).decode()
        if theirs != mine:
            raise LaunchError(f"this machine was started with {mine}, another one with {theirs}; they must be the same")
        self._store.add("came", 1)

    def _find_host(self) -> None:
        """Waits until node 0's store answers, because other programs may accept connections on the port."""
        place = f"{self._address}:{self._port}"
        problems = {
            False: f"nobody listens at {place}, where machine 0 should be",
            True: f"what answers at {place} is no launcher of machine 0; check main_process_ip and main_process_port",
        }
        heard = False

        def found() -> bool:
            nonlocal heard
            heard = heard or self._reachable()
            return heard and probe.answered()

        with StoreProbe(self._address, self._port, timedelta(seconds=self._timeout), ["run"]) as probe:
            self._until(found, lambda: problems[heard])

    def _reachable(self) -> bool:
        try:
            socket.create_connection((self._address, self._port), timeout=1.0).close()
        except socket.gaierror as error:
            raise LaunchError(f"main_process_ip {self._address!r} is no known host: {error.strerror}") from error
        except OSError:
            return False
        return True

    def _until(self, reached: Callable[[], bool], problem: Callable[[], str]) -> None:
        start, announced = time.monotonic(), False
        while not reached():
            waited = time.monotonic() - start
            if self._interrupts.received:
                raise SignalException("its launcher was asked to end", self._interrupts.received[0])
            if waited > self._timeout:
                raise LaunchError(f"{problem()} after {waited:.0f} s (join_timeout)")
            if self.round and (reason := self.given_up()) is not None:
                raise LaunchError(reason)
            if waited > _PATIENCE and not announced:
                announced = True
                say(f"accel launch: waiting for the other machines: {problem()}")
            time.sleep(_POLL)

    @contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._alone = True
            raise LaunchError(f"the launcher of machine 0 at {self._address}:{self._port} is gone") from error


@final
class Meeting(MeetingPoint):
    """Rendezvous of a fixed set of nodes, whose ranks the user gave."""

    def __init__(self, plan: LaunchPlan, interrupts: Interrupts) -> None:
        super().__init__(plan, interrupts)
        self._rank = plan.config.machine_rank

    @property
    def _is_host(self) -> bool:
        return self._rank == 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for all nodes and agrees with them on a fresh port for the processes."""
        self.round += 1
        arrived = f"round/{self.round}/arrived"
        self._held.close()
        with self._lost():
            self._store.set(f"{arrived}/{self._rank}", "")
            self._store.add(arrived, 1)
            self._until(
                lambda: self._store.add(arrived, 0) >= self.size, lambda: f"machines missing: {self._absent(arrived)}"
            )
            key = f"round/{self.round}/port"
            if self._rank == 0:
                self._store.set(key, str(self._held.enter_context(reserved_port(0))))
            self._until(lambda: self._store.check([key]), lambda: "machine 0 has named no port")
            port = int(self._store.get(key))
            agents = PrefixStore(f"round/{self.round}/agents", self._store)
        return RendezvousInfo(agents, self._rank, self.size, RendezvousStoreInfo(self._address, port))

    def num_nodes_waiting(self) -> int:
        """Number of nodes that have gone on to the next round because their processes failed in this one."""
        with self._lost():
            waiting = self._store.add(f"round/{self.round + 1}/arrived", 0)
        if waiting:
            say("accel launch: processes failed on another machine; starting all again")
        return waiting

    def restarts_left(self, max_restarts: int) -> int:
        """Restarts left. All nodes count the same rounds, whichever of them failed."""
        return max_restarts - (self.round - 1)

    def get_backend(self) -> str:
        """Name of this kind of rendezvous."""
        return "accel"

    def _introduce(self) -> None:
        if self._store.add(f"machine/{self._rank}", 1) > 1:
            raise LaunchError(f"two launchers have machine_rank {self._rank}; each machine needs its own")
        super()._introduce()

    def _absent(self, arrived: str) -> str:
        return ", ".join(str(rank) for rank in range(self.size) if not self._store.check([f"{arrived}/{rank}"]))
