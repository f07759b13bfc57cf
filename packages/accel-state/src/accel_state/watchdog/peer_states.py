"""States of the other ranks: from shared memory on this machine, through the group's store on other machines."""

import contextlib
import json
import mmap
import os
import select
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from accel_state.process_group.torch_log import no_warnings
from accel_state.watchdog.call_record import CommonCall, read_call
from accel_state.watchdog.diagnosis import STALLED, Life, RankState
from accel_state.watchdog.operation_record import CALLS_AT, SIZE, Record, RecordSnapshot, decode

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LEFT = "\0"
"""Prefix of the last heartbeat's text of a process that ended by itself."""

_BUSY = 0.2
_ANSWERS_WITHIN = 5.0
_LOOK_EVERY = 0.01
_LAUNCHERS_POLL = 0.5


@final
class Watched:
    """One rank as this process sees it, with durations measured by this process's own clock."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.memory: mmap.mmap | None = None
        self.image: bytes | None = None
        self._pid = 0
        self._gone = False  # ended before its memory could be mapped
        self._pidfd = -1
        self._life: Life = "alive"
        self._since = self._heard = self._still = time.monotonic()
        self._number = -1
        self._beat = self._processor = 0.0

    def map(self, pid: int, descriptor: int, token: str) -> None:
        """Maps the memory of a process of this machine; if that is forbidden, its records are read from the store."""
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
                memory = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
            if memory[:16].hex() == token:
                self.memory, self._pid = memory, pid
                self._pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
        self._gone = self.memory is None and _has_ended(pid)

    @property
    def is_local(self) -> bool:
        """Whether the memory of the rank can be read."""
        return self.memory is not None

    def call(self, call: CommonCall) -> CommonCall | None:
        """What the rank has recorded of a call; None if it has not begun it, as far as is known."""
        memory = self.memory if self.memory is not None else self.image
        return None if memory is None else read_call(memory, CALLS_AT, call)

    @property
    def has_ended(self) -> bool:
        """Whether the process, if it is one of this machine, has ended."""
        if self._pidfd >= 0:
            return _shows_end(self._pidfd)
        # Linux before 5.3 has no descriptors of processes, and a container may forbid them.
        return self._gone or (self._pid > 0 and _has_ended(self._pid))

    def look(self, known_until: float | None = None) -> RankState:
        """Returns the current state; messages of other machines could last be read at ``known_until`` (None: now)."""
        now = time.monotonic()
        image = bytes(self.memory[:]) if self.memory is not None else self.image
        snapshot = None if image is None else decode(image)
        if snapshot is not None:
            self._follow(snapshot, now)
        life, reason = self._alive(snapshot, now if known_until is None else known_until)
        if life != self._life:
            self._life, self._since = life, now
        current = None if snapshot is None else snapshot.current
        lasting = now - (self._heard if life == "silent" else self._since)
        # The state of a process on another machine is known up to its last heartbeat only.
        known = now if self.is_local else self._heard
        idle = max(0.0, known - self._still) if life == "alive" else 0.0
        waiting = 0.0 if current is None else idle
        if snapshot is not None and snapshot.on_device and life == "alive":
            # A thread that waits for a CUDA device is busy, and mostly in no recorded operation. The two clocks of
            # machines differ, so the length of the wait is taken from the rank's own heartbeat.
            waiting = max(waiting, snapshot.beat - snapshot.on_device)
        return RankState(self.rank, life, lasting, snapshot, waiting, reason, idle)

    def restart(self) -> None:
        """Measures all durations from now on."""
        self._since = self._heard = self._still = time.monotonic()

    def close(self) -> None:
        """Unmaps the memory of the other process."""
        if self.memory is not None:
            self.memory.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)

    def _follow(self, snapshot: RecordSnapshot, now: float) -> None:
        last = snapshot.last
        number = -1 if last is None else last.number * 2 + (last.ended is not None)
        if snapshot.beat != self._beat:
            used, passed = snapshot.processor - self._processor, snapshot.beat - self._beat
            if number != self._number or used > _BUSY * passed:
                self._still = now
            self._beat, self._processor, self._heard = snapshot.beat, snapshot.processor, now
        elif number != self._number:
            self._still = now
        if self._runs():
            self._still = now
        self._number = number

    def _alive(self, snapshot: RecordSnapshot | None, known_until: float) -> tuple[Life, str]:
        if snapshot is not None and snapshot.said.startswith(LEFT):
            return "left", snapshot.said[1:]
        if self.has_ended:
            return "dead", ""
        if self._pid:
            return ("stopped" if self._state() in "Tt" else "alive"), ""
        return ("silent" if known_until - self._heard > 2 * STALLED else "alive"), ""

    def _state(self) -> str:
        return _state_of(self._pid)

    def _runs(self) -> bool:
        return bool(self._pid) and self._state() == "R"


@final
class Messages:
    """The store that the ranks share, used only while its server lives.

    torch prints its C++ stack when a request reaches no server, even after a successful run. An additional connection,
    on which nothing is sent, therefore detects that the process that serves the store has closed it or ended.
    """

    def __init__(self, store: "Store") -> None:
        self._store: Store | None = store
        self._line: socket.socket | None = None
        server: Any = store
        while hasattr(server, "underlying_store"):
            server = server.underlying_store
        if hasattr(server, "host") and hasattr(server, "port"):
            with contextlib.suppress(OSError):
                self._line = socket.create_connection((server.host, server.port), timeout=_ANSWERS_WITHIN)
                self._line.setblocking(False)

    def set(self, key: str, value: str) -> None:
        """Writes a message; RuntimeError if the store is gone."""
        with no_warnings():  # about a server that ends before it answers
            self._asked().set(key, value)

    def get(self, key: str) -> bytes | None:
        """Reads a message; None if it does not exist yet; RuntimeError if the store is gone."""
        with no_warnings():
            store = self._asked()
            return store.get(key) if store.check([key]) else None

    def close(self) -> None:
        """Closes the connection; later calls raise RuntimeError."""
        self._store = None
        if self._line is not None:
            self._line.close()
            self._line = None

    def _asked(self) -> "Store":
        if self._line is not None and self._is_cut(self._line):
            self.close()
        if self._store is None:
            raise RuntimeError("the store that the ranks share is gone")
        return self._store

    @staticmethod
    def _is_cut(line: socket.socket) -> bool:
        try:
            return line.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


@final
class PeerStates:
    """States of all ranks of a group, including this one."""

    def __init__(self, store: "Store", rank: int, world_size: int, record: Record) -> None:
        self._messages = Messages(store)
        self._rank = rank
        self._record = record
        self.watched = [Watched(other) for other in range(world_size)]
        self._unknown = set(range(world_size))
        self._answered = time.monotonic()
        me = {"host": _host(), "pid": os.getpid(), "descriptor": record.descriptor, "token": record.token.hex()}
        self._me: dict[str, Any] = me
        self._messages.set(f"who/{rank}", json.dumps(me))

    @property
    def memories(self) -> list[mmap.mmap]:
        """Memories of the other processes of this machine."""
        return [one.memory for one in self.watched if one.memory is not None and one.rank != self._rank]

    def meet(self) -> None:
        """Maps the memories of ranks that have registered since the last call; RuntimeError if the store is gone."""
        for rank in list(self._unknown):
            said = self._messages.get(f"who/{rank}")
            if said is None:
                continue
            who = json.loads(said)
            if who["host"] == self._me["host"] and who["descriptor"] >= 0:
                self.watched[rank].map(who["pid"], who["descriptor"], who["token"])
            self._unknown.discard(rank)

    def calls(self, call: CommonCall) -> dict[int, CommonCall]:
        """What the other ranks have recorded of a call, by rank."""
        found = {rank: self.watched[rank].call(call) for rank in call.ranks if rank != self._rank}
        return {rank: one for rank, one in found.items() if one is not None}

    @property
    def complete(self) -> bool:
        """Whether all ranks have registered."""
        return not self._unknown

    @property
    def scattered(self) -> bool:
        """Whether the memory of a rank cannot be read, because it is on another machine."""
        return any(not one.is_local for one in self.watched)

    def send(self) -> None:
        """Writes this process's record into the store, for the other machines."""
        self._messages.set(f"image/{self._rank}", self._record.image().hex())

    def receive(self) -> None:
        """Reads the records of the ranks on other machines."""
        for one in self.watched:
            image = None if one.is_local else self._messages.get(f"image/{one.rank}")
            if image is not None:
                one.image = bytes.fromhex(image.decode())
        self._answered = time.monotonic()

    def stop_asking(self) -> None:
        """Stops using the store, after a message about it to rank 0, which may have to serve the store until then."""
        with contextlib.suppress(RuntimeError):
            self._messages.set(f"quiet/{self._rank}", "")
        self._messages.close()

    def outlast(self, seconds: float) -> None:
        """Waits until no rank of another machine uses the store any more, for at most ``seconds``."""
        deadline = time.monotonic() + seconds
        asking = [one.rank for one in self.watched if one.rank != self._rank and not one.is_local]
        while asking and time.monotonic() < deadline:
            asking = [rank for rank in asking if self._messages.get(f"quiet/{rank}") is None]
            time.sleep(_LOOK_EVERY)

    def await_end(self, seconds: float) -> None:
        """Waits until the process of another rank of this machine has ended, for at most ``seconds``.

        A launcher that polls its processes needs a moment more to see the end.
        """
        deadline = time.monotonic() + seconds
        others = [one for one in self.watched if one.rank != self._rank]
        while not any(one.has_ended for one in others) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY)
        time.sleep(_LAUNCHERS_POLL)

    def look(self) -> list[RankState]:
        """Returns the current states of all ranks.

        A store that does not answer, or is gone, is evidence about rank 0 only, which serves it. Silence of the other
        ranks is therefore measured up to the last answer of the store.
        """
        return [one.look(None if one.rank == 0 else self._answered) for one in self.watched]

    def restart(self) -> None:
        """Measures all durations from now on: this process did not run for a while, and neither did others, perhaps."""
        for one in self.watched:
            one.restart()

    def close(self) -> None:
        """Unmaps the records of the other ranks and closes the store."""
        self._messages.close()
        for one in self.watched:
            one.close()


def _shows_end(pidfd: int) -> bool:
    poll = select.poll()  # ``select`` refuses descriptors from 1024 on, which a training process may have
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _state_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return _state_of(pid) in "ZX"


def _host() -> str:
    """Returns a name that differs between machines, and between containers with PID namespaces of their own."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
