"""Fake process group: collectives of one rank of many, which return at once, without the other ranks.

Every other rank is taken to have this rank's tensors: a sum is this rank's tensor times the size of the group, and a
gathered list has this rank's tensor in each place. An all-to-all receives from each rank what this rank sends to
itself. A message from one rank, or a tensor that only another rank has, is zero. torch's own fake group leaves tensors
as they are, and DDP fails with it because its all-reduce gives no result.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch.futures import Future

from accel_state.collectives.group_argument import FAKE
from accel_state.errors import SessionError

if TYPE_CHECKING:

    class _ProcessGroup:
        """torch's class without its methods, whose signatures differ between versions of torch."""

        def __init__(self, rank: int, size: int) -> None: ...
else:
    _ProcessGroup = dist.ProcessGroup


@final
@dataclass(frozen=True, slots=True)
class CountedCollective:
    """Collectives of one kind in one group.

    Attributes:
        kind: name of the collective: "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send",
            and so on.
        ranks: global ranks of the group.
        calls: number of calls.
        bytes: bytes that this rank passed to them; for "recv", bytes that it receives.
    """

    kind: str
    ranks: tuple[int, ...]
    calls: int
    bytes: int


@final
class FakeTraffic:
    """Collectives of all fake groups of this process since the last call of ``take``."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def add(self, kind: str, ranks: tuple[int, ...], size: int) -> None:
        """Counts one call with ``size`` bytes."""
        counts = self._counts.setdefault((kind, ranks), [0, 0])
        counts[0] += 1
        counts[1] += size

    def take(self) -> tuple[CountedCollective, ...]:
        """Returns what was counted, in the order of first calls, and counts from zero again."""
        found = tuple(CountedCollective(*key, calls, size) for key, (calls, size) in self._counts.items())
        self._counts.clear()
        return found


@final
class _Done(dist.Work):
    """A collective that has ended."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        devices: list[Any] = sorted({tensor.device for tensor in self._tensors if tensor.device.type != "cpu"}, key=str)
        future: Future[list[torch.Tensor]] = Future(devices=devices)
        future.set_result(self._tensors)
        return future


@final
class FakeGroup(_ProcessGroup):
    """Process group of which only this rank exists.

    Args:
        rank: this process's rank in the group.
        ranks: global ranks of the group.
        name: torch's name of the group.
        traffic: counts the collectives.
    """

    def __init__(self, rank: int, ranks: Sequence[int], name: str, traffic: FakeTraffic) -> None:
        super().__init__(rank, len(ranks))
        self._place, self._ranks, self._name, self._traffic = rank, tuple(ranks), name, traffic

    def getBackendName(self) -> str:  # torch's name
        """Name of the backend, as torch reads it."""
        return FAKE

    @property
    def group_name(self) -> str:
        """Name under which torch's functional collectives find the group."""
        return self._name

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Reduces equal tensors of all ranks, in place."""
        self._count("all_reduce", tensors)
        _reduced(tensors, opts, len(self._ranks))
        return _Done(tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """As ``allreduce``."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Reduces equal tensors of all ranks, in place on the root."""
        self._count("reduce", tensors)
        if getattr(opts, "rootRank", 0) == self._place:
            _reduced(tensors, opts, len(self._ranks))
        return _Done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Leaves the tensors as they are: the root has the same ones."""
        self._count("broadcast", tensors)
        return _Done(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Copies each input to all places of its list."""
        self._count("all_gather", inputs)
        _copied(outputs, inputs)
        return _Done([tensor for row in outputs for tensor in row])

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """As ``allgather``."""
        return self.allgather(outputs, inputs, opts)

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> dist.Work:
        """Copies the input to all places of the output."""
        return self.all_gather_single_coalesced([output], [own], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Copies each input to all places of its output."""
        self._count("all_gather", inputs)
        _copied([output.detach().view(-1).chunk(len(self._ranks)) for output in outputs], inputs)
        return _Done(outputs)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Copies the input to all places of the root's list."""
        self._count("gather", inputs)
        _copied(outputs, inputs)
        return _Done([tensor for row in outputs for tensor in row])

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> dist.Work:
        """Copies the root's tensor of this rank; other ranks receive zeros."""
        self._count("scatter", [tensor for row in inputs for tensor in row])
        for position, output in enumerate(outputs):
            output.detach().copy_(inputs[position][self._place]) if inputs else output.detach().zero_()
        return _Done(outputs)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> dist.Work:
        """Reduces equal tensors of all ranks to this rank's place."""
        self._count("reduce_scatter", [tensor for row in inputs for tensor in row])
        for output, row in zip(outputs, inputs, strict=True):
            output.detach().copy_(row[self._place])
        _reduced(outputs, opts, len(self._ranks))
        return _Done(outputs)

    def reduce_scatter_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> dist.Work:
        """Reduces equal tensors of all ranks to this rank's chunk."""
        return self.reduce_scatter_single_coalesced([output], [own], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduces equal tensors of all ranks to this rank's chunks."""
        self._count("reduce_scatter", inputs)
        for output, own in zip(outputs, inputs, strict=True):
            chunk = own.detach().reshape(-1).chunk(len(self._ranks))[self._place]
            output.detach().copy_(chunk.view(output.shape))
        _reduced(outputs, opts, len(self._ranks))
        return _Done(outputs)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Copies this rank's tensor for itself to all places, cut or repeated to the sizes that arrive."""
        self._count("all_to_all", inputs)
        for output in outputs:
            _fill(output, inputs[self._place])
        return _Done(outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        own: torch.Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> dist.Work:
        """Copies this rank's rows for itself to the rows of each rank, cut or repeated to the number that arrives."""
        self._count("all_to_all", [own])
        size = len(self._ranks)
        sent = own.detach().split(list(input_sizes)) if input_sizes else own.detach().chunk(size)
        received = output.detach().split(list(output_sizes)) if output_sizes else output.detach().chunk(size)
        for part in received:
            _fill(part, sent[self._place])
        return _Done([output])

    def barrier(self, opts: Any = None) -> dist.Work:
        """Returns at once."""
        self._count("barrier", [])
        return _Done()

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int = 0) -> dist.Work:
        """Sends to nobody."""
        self._count("send", tensors)
        return _Done(tensors)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> dist.Work:
        """Receives zeros."""
        self._count("recv", tensors)
        for tensor in tensors:
            tensor.detach().zero_()
        return _Done(tensors)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> dist.Work:
        """Receives zeros."""
        return self.recv(tensors, 0, tag)

    def _count(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        self._traffic.add(kind, self._ranks, sum(tensor.numel() * tensor.element_size() for tensor in tensors))

    # Names of the same methods before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def open_fake_group(rank: int, world_size: int) -> FakeTraffic:
    """Opens torch's default process group as a fake one, and returns what counts its collectives.

    Groups that torch, accel or the program create afterwards are fake, too.

    Raises:
        SessionError: a process group is open already, or ``rank`` is not below ``world_size``.
    """
    if dist.is_initialized():
        raise SessionError("a process group is open already; one rank of many needs a process without one")
    if not 0 <= rank < world_size:
        raise SessionError(f"rank={rank} is not below world_size={world_size}; expected 0 to {world_size - 1}")
    traffic = FakeTraffic()

    def create(facts: Any, options: Any = None) -> FakeGroup:
        ranks = facts.global_ranks_in_group or range(facts.group_size)
        return FakeGroup(facts.group_rank, ranks, facts.group_id, traffic)

    c10d: Any = dist
    c10d.Backend.register_backend(FAKE, create, extended_api=True, devices=["cpu", "cuda", "xpu", "hpu"])
    dist.init_process_group(FAKE, store=c10d.HashStore(), rank=rank, world_size=world_size)
    return traffic


def _reduced(tensors: Iterable[torch.Tensor], opts: Any, ranks: int) -> None:
    """Turns tensors into the reduction of equal ones of ``ranks`` ranks; a mean, minimum or maximum is the same."""
    operation = getattr(opts, "reduceOp", None)
    for tensor in tensors:
        if tensor.dtype == torch.bool:
            continue  # a sum is "or", a product is "and"
        if operation is None or operation == dist.ReduceOp.SUM:
            tensor.detach().mul_(ranks)
        elif operation == dist.ReduceOp.PRODUCT:
            tensor.detach().pow_(ranks)


def _copied(outputs: Iterable[Iterable[torch.Tensor]], inputs: Iterable[torch.Tensor]) -> None:
    for row, own in zip(outputs, inputs, strict=False):
        for output in row:
            output.detach().copy_(own.detach().reshape(output.shape) if output.shape != own.shape else own)


def _fill(output: torch.Tensor, own: torch.Tensor) -> None:
    """Copies the beginning of ``own``, repeated until ``output`` is full."""
    flat, target = own.detach().reshape(-1), output.detach().view(-1)
    if not target.numel():
        return
    if not flat.numel():
        target.zero_()
        return
    times = -(-target.numel() // flat.numel())
    target.copy_(flat.repeat(times)[: target.numel()] if times > 1 else flat[: target.numel()])
