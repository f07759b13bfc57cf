"""What this process knows of the others: by their memory on this machine, by the store of the group elsewhere."""

import contextlib
import json
import mmap
import os
import select
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from accel_state.doctor.diagnosis import STALLED, Life, RankState
from accel_state.doctor.record import SIZE, Record, Snapshot, decode

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LEFT = "\0"
"""Begins what a process said last, when it left by itself."""

_BUSY = 0.2


@final
class Watched:
    """One rank as this process sees it, followed from one look to the next by this process's own clock."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.memory: mmap.mmap | None = None
        self.image: bytes | None = None
        self._pid = 0
        self._gone = False
        self._pidfd = -1
        self._life: Life = "alive"
        self._since = self._looked = self._heard = self._still = time.monotonic()
        self._number = -1
        self._beat = self._processor = 0.0

    def map(self, pid: int, descriptor: int, token: str) -> None:
        """Maps the memory of a process of this machine; where that is forbidden, its messages have to do."""
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
                memory = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
            if memory[:16].hex() == token:
                self.memory, self._pid = memory, pid
                self._pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
        self._gone = self.memory is None and _has_ended(pid)

    @property
    def is_local(self) -> bool:
        """Its memory can be read."""
        return self.memory is not None

    def look(self) -> RankState:
        """How it is now."""
        now = time.monotonic()
        image = bytes(self.memory[:]) if self.memory is not None else self.image
        snapshot = None if image is None else decode(image)
        if snapshot is not None:
            self._follow(snapshot, now)
        life, reason = self._alive(snapshot, now)
        if life != self._life:
            self._life, self._since = life, now
        current = None if snapshot is None else snapshot.current
        lasting = now - (self._heard if life == "silent" else self._since)
        # Of a process elsewhere nothing is known since it was last heard of.
        known = now if self.is_local else self._heard
        waiting = max(0.0, known - self._still) if current is not None and life == "alive" else 0.0
        return RankState(self.rank, life, lasting, snapshot, waiting, reason)

    def close(self) -> None:
        """Lets go of the other's memory."""
        if self.memory is not None:
            self.memory.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)

    def _follow(self, snapshot: Snapshot, now: float) -> None:
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

    def _alive(self, snapshot: Snapshot | None, now: float) -> tuple[Life, str]:
        if snapshot is not None and snapshot.said.startswith(LEFT):
            return "left", snapshot.said[1:]
        if self._gone:  # before its memory could be mapped
            return "dead", ""
        if self._pidfd >= 0 and select.select([self._pidfd], [], [], 0)[0]:
            return "dead", ""
        if self._pid:
            return ("stopped" if self._state() in "Tt" else "alive"), ""
        return ("silent" if now - self._heard > 2 * STALLED else "alive"), ""

    def _state(self) -> str:
        return _state_of(self._pid)

    def _runs(self) -> bool:
        return bool(self._pid) and self._state() == "R"


@final
class Peers:
    """All ranks of a group, this one included."""

    def __init__(self, store: "Store", rank: int, world_size: int, record: Record) -> None:
        self._store = store
        self._rank = rank
        self._record = record
        self.watched = [Watched(other) for other in range(world_size)]
        self._unknown = set(range(world_size))
        me = {"host": _host(), "pid": os.getpid(), "descriptor": record.descriptor, "token": record.token.hex()}
        self._me: dict[str, Any] = me
        store.set(f"who/{rank}", json.dumps(me))

    @property
    def memories(self) -> list[mmap.mmap]:
        """The memories of the other processes of this machine."""
        return [one.memory for one in self.watched if one.memory is not None and one.rank != self._rank]

    def meet(self) -> None:
        """Maps the memories of those that have introduced themselves since; raises RuntimeError without a store."""
        for rank in list(self._unknown):
            key = f"who/{rank}"
            if not self._store.check([key]):
                continue
            who = json.loads(self._store.get(key))
            if who["host"] == self._me["host"] and who["descriptor"] >= 0:
                self.watched[rank].map(who["pid"], who["descriptor"], who["token"])
            self._unknown.discard(rank)

    @property
    def complete(self) -> bool:
        """All have introduced themselves."""
        return not self._unknown

    @property
    def scattered(self) -> bool:
        """Some rank is on another machine."""
        return any(not one.is_local for one in self.watched)

    def send(self) -> None:
        """Tells the other machines how this process is."""
        self._store.set(f"image/{self._rank}", self._record.image().hex())

    def receive(self) -> None:
        """Takes in how those on other machines are."""
        for one in self.watched:
            key = f"image/{one.rank}"
            if not one.is_local and self._store.check([key]):
                one.image = bytes.fromhex(self._store.get(key).decode())

    def look(self) -> list[RankState]:
        """How all are now."""
        return [one.look() for one in self.watched]

    def close(self) -> None:
        """Lets go of the others' memories."""
        for one in self.watched:
            one.close()


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
    """Tells machines, and containers with process numbers of their own, apart."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
