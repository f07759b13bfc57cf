"""Rendezvous of the ranks of a run at a shared store, with reports of the missing ranks."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from queue import Empty, Queue
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from accel_state.clusters.variables import DEFAULT_PORT, LOCAL_ADDRESS
from accel_state.errors import SessionError
from accel_state.process_group.name_lookup import stop_name_lookups
from accel_state.process_group.torch_log import no_warnings
from accel_state.topology import Topology

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_LOG = logging.getLogger(__name__)
# A missing rank is reported long before the timeout, so that the user can act.
_REPORT_EVERY = 15.0
_ANSWERS_WITHIN = 5.0


def connect(
    topology: Topology, *, init_method: "str | Store | None", timeout: timedelta, env: Mapping[str, str]
) -> "Store":
    """Returns the shared store once every rank has joined it.

    Collective: every rank of the group must call this. ``init_method`` is a store, ``tcp://host:port``,
    ``file:///path``, or None / ``env://`` for the address of the launcher. Each launch attempt and each opening has its
    own key prefix, so that a closed group can be reopened through the same store.

    Raises:
        SessionError: within ``timeout``, with the address and the missing ranks.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    where = describe(topology, init_method)
    while True:
        try:
            store = _open(topology, init_method, deadline=deadline, env=env)
            join = partial(_join, store, topology, deadline=deadline, where=where, env=env)
            # A store whose process is stopped answers no request, and requests have no timeout.
            joined = _within(join, max(0.0, deadline - time.monotonic()) + _ANSWERS_WITHIN)
        except TimeoutError:
            raise SessionError(
                f"rank {topology.rank}: the store at {where} does not answer any more; is the process of rank 0, or of "
                "the launcher that keeps the store, stopped?"
            ) from None
        except _StoreLost as lost:
            # Rank 0 of another session that is closing may still serve the same port.
            if time.monotonic() >= deadline:
                raise SessionError(f"rank {topology.rank} lost the store at {where}: {lost}") from lost
            time.sleep(0.2)
        else:
            joined.set_timeout(timeout)
            return joined


def describe(topology: Topology, init_method: "str | Store | None") -> str:
    """Returns the place of the rendezvous for messages: host and port, a file, or the type of a given store."""
    if init_method is None or init_method == "env://":
        host, port = address(topology)
        return f"{host}:{port}"
    return init_method if isinstance(init_method, str) else f"the given {type(init_method).__name__}"


def address(topology: Topology) -> tuple[str, int]:
    """Returns host and port of rank 0.

    Raises:
        SessionError: several nodes, and the launcher gave no address of rank 0.
    """
    if topology.master_addr is None and topology.num_nodes > 1:
        raise SessionError(f"{topology} has no address of rank 0; set MASTER_ADDR and MASTER_PORT on every node")
    host = topology.master_addr or LOCAL_ADDRESS
    return host, DEFAULT_PORT if topology.master_port is None else topology.master_port


class _StoreLost(RuntimeError):
    """The connection to the store broke during a wait; connecting again may help."""


def _open(topology: Topology, init_method: "str | Store | None", *, deadline: float, env: Mapping[str, str]) -> "Store":
    if init_method is not None and not isinstance(init_method, str):
        return init_method
    parts = urlsplit(init_method or "env://")
    if parts.scheme == "env":
        host, port = address(topology)
    elif parts.scheme == "tcp":
        if parts.hostname is None or parts.port is None:
            raise SessionError(f"init_method={init_method!r} lacks host or port; expected like 'tcp://10.0.0.1:29500'")
        host, port = parts.hostname, parts.port
    elif parts.scheme == "file":
        return _file_store(parts.path, topology)
    else:
        raise SessionError(f"init_method={init_method!r} is unknown; expected tcp://host:port, file:///path or env://")
    if port == 0 and topology.world_size > 1:
        raise SessionError(
            f"the port of the rendezvous at {host} is 0; expected the port that rank 0 listens on, because the other "
            "ranks cannot learn a port that the system picks; nearest: torchrun --standalone, or a free MASTER_PORT"
        )
    uses_agent = parts.scheme == "env" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = topology.rank == 0 and not uses_agent
    return _tcp_store(host, port, serves=serves, deadline=deadline, topology=topology)


def _file_store(path: str, topology: Topology) -> "Store":
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise SessionError(f"cannot meet in {path!r}: the folder {folder!r} does not exist")
    return FileStore(path, topology.world_size)


def _tcp_store(host: str, port: int, *, serves: bool, deadline: float, topology: Topology) -> "Store":
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    stop_name_lookups()
    if not serves:
        _await_listener(host, port, deadline=deadline, topology=topology)
    left = max(1.0, deadline - time.monotonic())

    def build() -> "Store":
        return TCPStore(
            host,
            port,
            is_master=serves,
            timeout=timedelta(seconds=left),
            wait_for_workers=False,
            multi_tenant=True,
        )

    try:
        # torch waits without a timeout for a listener that never answers, so the timeout is applied here.
        return build() if serves else _within(build, left)
    except TimeoutError as error:
        raise SessionError(
            f"rank {topology.rank}: something listens at {host}:{port} but does not answer as rank 0's store; "
            "choose another port"
        ) from error
    except RuntimeError as error:
        if serves:
            why = "another process listens there; choose another port" if "EADDRINUSE" in str(error) else ""
            raise SessionError(
                f"rank 0 cannot listen on port {port} for {host}:{port}: {why or _first_line(error)}"
            ) from error
        raise _StoreLost(_first_line(error)) from error


def _await_listener(host: str, port: int, *, deadline: float, topology: Topology) -> None:
    """Returns once a socket listens at ``host:port``; torch's own retries print a stack trace at each attempt."""
    pause, report = 0.02, time.monotonic() + _REPORT_EVERY
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(5.0, deadline - time.monotonic()))).close()
            return
        except OSError as error:
            reason = error
        now = time.monotonic()
        if now >= deadline:
            raise SessionError(
                f"rank {topology.rank} found no rank 0 at {host}:{port} ({reason}); is the address right, is rank 0 "
                "running, is the port open?"
            ) from reason
        if now >= report:
            _LOG.warning("rank %d still waits for rank 0 at %s:%d (%s)", topology.rank, host, port, reason)
            report = now + _REPORT_EVERY
        time.sleep(min(pause, deadline - now))
        pause = min(2 * pause, 0.5)


def _within(build: "Callable[[], Store]", patience: float) -> "Store":
    """Runs ``build()`` in a thread; raises TimeoutError after ``patience`` seconds."""
    outcome: Queue[Store | BaseException] = Queue()

    def run() -> None:
        try:
            outcome.put(build())
        except BaseException as error:
            outcome.put(error)

    threading.Thread(target=run, name="accel-store", daemon=True).start()
    try:
        result = outcome.get(timeout=patience)
    except Empty:
        raise TimeoutError from None
    if isinstance(result, BaseException):
        raise result
    return result


def _join(store: "Store", topology: Topology, *, deadline: float, where: str, env: Mapping[str, str]) -> "Store":
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    # Elastic restarts may reuse the agent's store, which still holds the addresses of dead workers.
    outer = PrefixStore(f"accel/attempt_{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    opened = f"opened/{topology.rank}"
    try:
        with no_warnings():  # rank 0 may end meanwhile, or serve a session that is closing
            inner = PrefixStore(f"opening_{outer.add(opened, 1)}", outer)
            inner.set(f"here/{topology.rank}", "1")
            missing = _wait_for_all(inner, topology, deadline=deadline, where=where)
    except RuntimeError as error:
        raise _StoreLost(_first_line(error)) from error
    if missing:
        outer.add(opened, -1)
        raise SessionError(
            f"rank {topology.rank} waited in vain at {where} for {_ranks(missing)} of {topology.world_size}; "
            "did they start, with the same address and number of processes?"
        )
    return inner


def _wait_for_all(store: "Store", topology: Topology, *, deadline: float, where: str) -> list[int]:
    """Waits until rank 0 has seen every rank; returns the ranks that are missing at ``deadline``.

    Polls instead of waiting in the store, so that it behaves alike for every kind of store.
    """
    ranks = range(topology.world_size)
    keys = [f"here/{rank}" for rank in ranks] if topology.rank == 0 else ["all_here"]
    pause, report = 0.002, time.monotonic() + _REPORT_EVERY
    while not store.check(keys):
        now = time.monotonic()
        if now >= min(deadline, report):
            missing = [rank for rank in ranks if not store.check([f"here/{rank}"])] or [0]
            if now >= deadline:
                return missing
            _LOG.warning("rank %d still waits at %s for %s", topology.rank, where, _ranks(missing))
            report = now + _REPORT_EVERY
        time.sleep(min(pause, max(0.0, deadline - now)))
        pause = min(1.5 * pause, 0.25)
    if topology.rank == 0:
        store.set("all_here", "1")
    return []


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
