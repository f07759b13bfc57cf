"""Elastic rendezvous: nodes may join and leave within the limits that the user sets."""

import socket
import uuid
from datetime import timedelta
from typing import final

from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from accel_launch.config.setting import nearest
from accel_launch.launch.launch_plan import LaunchPlan
from accel_launch.launch.multi_node.rendezvous import MeetingPoint
from accel_launch.launch.supervisor.interrupts import Interrupts
from accel_launch.launch.supervisor.ports import reserved_port
from accel_state.environment import patch_environment
from accel_state.errors import LaunchError

# Seconds to wait for further nodes once enough have joined, seconds between two heartbeats, and number of missed
# heartbeats after which a node counts as lost.
_DEFAULTS = {"last_call_timeout": 5.0, "keep_alive_interval": 5.0, "keep_alive_max_attempt": 3.0, "join_timeout": 0.0}


@final
class ElasticMeeting(MeetingPoint):
    """Torch elastic's dynamic rendezvous over our store: assigns ranks to the nodes that are present.

    A node that joins later waits until the others have ended their round, which they do at once. A node that dies is
    detected by its missing heartbeats. The store exists as long as the launcher on the node of ``main_process_ip``.
    """

    def __init__(self, plan: LaunchPlan, interrupts: Interrupts) -> None:
        super().__init__(plan, interrupts)
        config = plan.config
        self._few, self._many = plan.min_machines, plan.num_machines
        self._options = options_of(config.rdzv_conf)
        self._timeout = self._options["join_timeout"] or self._timeout
        given = config.is_given("machine_rank")
        self._host = config.machine_rank == 0 if given else _is_mine(self._address, self._port)
        self._name = str(config.machine_rank) if given else uuid.uuid4().hex[:8]
        self._inner: DynamicRendezvousHandler | None = None

    @property
    def _is_host(self) -> bool:
        return self._host

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the minimum number of nodes, and briefly for more; the first node chooses a port for all."""
        self._held.close()
        if self._inner is None:
            self._inner = self._make_inner()
        with self._lost():
            try:
                # Otherwise torch would publish its own store in the first round only, where nodes that join later do
                # not look.
                with patch_environment(torch_disable_share_rdzv_tcp_store="1"):
                    info = self._inner.next_rendezvous()
            except RendezvousError as error:
                reason = self.given_up() or f"fewer than {self._few} machines came: {error}"
                raise LaunchError(f"{reason} (nnodes {self._few}:{self._many})") from error
            if info.rank == 0:
                address = self._own_address()
                port = self._held.enter_context(reserved_port(0))
                info.store.set("accel/place", f"{self._store.add('rounds', 1)} {port} {address}")
            number, port_text, address = info.store.get("accel/place").decode().split(" ", 2)
        self.round, self.size = int(number), info.world_size
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(address, int(port_text)))

    def num_nodes_waiting(self) -> int:
        """Number of nodes that wait to join, or to restart after a failure; the other nodes then start a new round."""
        assert self._inner is not None
        with self._lost():
            return self._inner.num_nodes_waiting()

    def restarts_left(self, max_restarts: int) -> int:
        """Restarts left. A failed round counts once for all nodes; a round that ended for a new node does not."""
        with self._lost():
            mine = self._store.compare_set(f"round/{self.round}/failed", "", self._name).decode() == self._name
            return max_restarts - (self._store.add("failures", int(mine)) - 1)

    def get_backend(self) -> str:
        """The name of this kind of rendezvous."""
        return "c10d"

    def _leave(self, error: BaseException) -> None:
        """Ends the job on all nodes only if this node holds the store."""
        if self._host:
            super()._leave(error)

    def _make_inner(self) -> DynamicRendezvousHandler:
        options = self._options
        made: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
            self._run_id,
            self._store,
            C10dRendezvousBackend(self._store, self._run_id),
            self._few,
            self._many,
            local_addr=self._own_address(),
            timeout=RendezvousTimeout(
                join=timedelta(seconds=self._timeout), last_call=timedelta(seconds=options["last_call_timeout"])
            ),
            keep_alive_interval=options["keep_alive_interval"],  # type: ignore[arg-type]  # it makes a timedelta of it
            keep_alive_max_attempt=int(options["keep_alive_max_attempt"]),
        )
        return made

    def _own_address(self) -> str:
        """Address by which the node that holds the store reaches this one."""
        if self._host:
            return self._address
        with socket.create_connection((self._address, self._port), timeout=30.0) as link:
            return str(link.getsockname()[0])


def options_of(text: str | None) -> dict[str, float]:
    """Parses ``rdzv_conf``; other options have their defaults, in seconds or as counts.

    Raises:
        LaunchError: an unknown option, with the nearest known one, or a value that is not a number.
    """
    options = dict(_DEFAULTS)
    for part in filter(None, (text or "").split(",")):
        name, _, value = part.partition("=")
        if name not in options:
            close = nearest(name, options)
            hint = f"did you mean {close}?" if close else f"known: {', '.join(options)}"
            raise LaunchError(f"rdzv_conf has {part!r}; {hint}")
        try:
            options[name] = float(value)
        except ValueError:
            raise LaunchError(f"rdzv_conf has {part!r}; expected {name}=NUMBER") from None
    return options


def _is_mine(address: str, port: int) -> bool:
    """Whether this launcher can hold the store: the address is this machine's, and the port is free."""
    try:
        # The smallest is of IPv4, if there is one: a name may also have an IPv6 address that its machine does not use.
        family, *_, place = min(socket.getaddrinfo(address, port, type=socket.SOCK_STREAM))
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except OSError:
        return False
    return True
