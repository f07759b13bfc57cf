"""Threads of dispatched loading: one rank reads and sends ahead of the step, the others receive ahead."""

import atexit
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

import torch

from accel_data.dispatch.buffers import Blocks
from accel_data.dispatch.serialization import FRONT, Arriving, body_size, joined_body, pack, split_body
from accel_data.failure_relay import stopped
from accel_data.loader_group import LoaderGroup
from accel_state.errors import DataError

if TYPE_CHECKING:
    from torch.distributed import Work

READER = 0
"""Rank of the group that reads."""
_HELD_MESSAGES = 2
_MOST_STEPS = 16
_MOST_BYTES = 8 << 20
_HURRY = 0.002
"""Seconds for which steps are collected into one message while the loop waits for a step."""
_LOOK_EVERY = 0.5
_GOODBYE = 7.5
"""Seconds for which a rank that leaves the loop waits for its thread, which then continues in the background.

More than the five after which torch's loader notices that a worker has died, because the thread may wait for that."""


class Dispatched(NamedTuple):
    """One step: a batch per shard, metadata for every rank, and private state for the reading rank only."""

    parts: tuple[Any, ...]
    shared: Any
    own: Any


class Message(NamedTuple):
    """Message between ranks: steps as ``(batch, shared, own)``, or the end of the pass, with ``DispatchThread.behind``.

    Of a failure, the name and text of the error.
    """

    kind: Literal["steps", "end", "left", "failed"]
    content: Any


@final
class DispatchPipeline:
    """Bounded queue of messages between a thread and the loop; after ``close`` neither end blocks."""

    def __init__(self, room: int = _HELD_MESSAGES) -> None:
        self._room, self._messages = room, deque[Message]()
        self._changed = threading.Condition()
        self.closed = False

    @property
    def is_empty(self) -> bool:
        """Whether the consumer has taken every message."""
        return not self._messages

    def put(self, message: Message) -> bool:
        """Waits for room and appends ``message``; returns False if the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or len(self._messages) < self._room)
            if not self.closed:
                self._messages.append(message)
                self._changed.notify_all()
            return not self.closed

    def get(self, patience: float | None) -> Message | None:
        """Returns the next message, or None after ``patience`` seconds (None: no limit)."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._messages), patience):
                return None
            message = self._messages.popleft()
            self._changed.notify_all()
            return message

    def close(self) -> None:
        """Drops queued messages and refuses further ones."""
        with self._changed:
            self.closed = True
            self._messages.clear()
            self._changed.notify_all()


class DispatchThread(ABC):
    """One rank's side of a pass: a daemon thread, and the queue between it and the loop.

    The thread ends before the interpreter does, if the other ranks end the pass within ``_GOODBYE`` seconds. A thread
    that returned from a send or receive during finalization would abort the process.

    Attributes:
        behind: what the reading rank has sent with the end of the pass; None before it.
    """

    def __init__(self, name: str) -> None:
        self.lane, self.behind = DispatchPipeline(), None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()
        atexit.register(self.close)

    def close(self, patience: float | None = _GOODBYE) -> bool:
        """Leaves the pass; returns whether the thread has ended, for which it waits up to ``patience`` seconds."""
        self.lane.close()
        if self._thread.ident is not None:
            self._thread.join(patience)
        ended = not self._thread.is_alive()
        if ended:
            atexit.unregister(self.close)
        return ended

    @abstractmethod
    def _run(self) -> None: ...


@final
class Sender(DispatchThread):
    """Runs on the reading rank: reads steps in a thread, sends each rank its batch, and keeps this rank's own.

    A step is sent within ``_HURRY`` seconds if this rank's loop waits for one; otherwise several steps share a larger
    message. A slow reader therefore delays no rank, and with a fast one the cost of a message is spread over many
    steps. (The loops of all ranks advance in step, so this rank's loop stands for all; gloo reports the arrival of a
    message only to a wait for it.) The thread stops reading while ``_HELD_MESSAGES`` messages are in flight and as many
    are queued here.
    """

    def __init__(
        self,
        peers: LoaderGroup,
        steps: Iterator[Dispatched],
        *,
        greeting: Any,
        ending: Callable[[], Any],
        blocks: Blocks,
        tag: int,
    ) -> None:
        """``greeting`` is included in every message, and what ``ending`` returns once all is read in the last one.

        Messages are built in ``blocks``. ``tag`` is unique to the pass, because nested passes use the same group.
        """
        super().__init__("accel-dispatch-send")
        self._peers, self._steps, self._greeting, self._ending, self._tag = peers, steps, greeting, ending, tag
        self._blocks = blocks
        self._on_the_way: deque[list[tuple[Work, torch.Tensor]]] = deque()
        self._gathered: list[Dispatched] = []
        self._size, self._sent = 0, -_HURRY
        self._sending = threading.Lock()
        """Held by the thread that collects or sends: the reading thread, or the loop, which never waits for it."""

    def start(self) -> None:
        """Reads the first step in the calling thread, which owns workers and seeds, and starts the reading thread.

        An error is sent in order with the messages, so that all ranks raise it.
        """
        try:
            self._steps = chain(list(islice(self._steps, 1)), self._steps)
        except Exception as error:
            self.failure = error
        super().start()

    def _run(self) -> None:
        try:
            last = self._read_all() if self.failure is None else _failed(self.failure)
        except BaseException as error:
            self.failure = error
            last = _failed(error)
        try:
            self._send_to_all([last] * (max(self._peers.parts) + 1))
            self.lane.put(last)
            while self._on_the_way:
                self._wait_for_oldest()
        except BaseException as error:
            self.failure = self.failure or error
            self.lane.put(_failed(error))
        finally:
            self._steps = iter(())

    def next(self, patience: float | None) -> Message | None:
        """Returns the next message for the loop; sends pending steps early if the loop waits."""
        message = self.lane.get(_HURRY)
        if message is not None:
            return message
        if self._sending.acquire(blocking=False):
            try:
                self._flush()
            finally:
                self._sending.release()
        return self.lane.get(patience)

    def _read_all(self) -> Message:
        try:
            for step in self._steps:
                if not self._add(step):
                    break
        finally:
            # Steps that were read before an error are sent before the error.
            with self._sending:
                self._flush()
        self.behind = self._ending()
        return Message("left" if self.lane.closed else "end", self.behind)

    def _add(self, step: Dispatched) -> bool:
        """Adds a step to the pending ones; sends them if they are large or awaited. False if this rank has left."""
        with self._sending:
            self._gathered.append(step)
            self._size += _bytes_of(step.parts)
            is_due = self.lane.is_empty and time.monotonic() - self._sent >= _HURRY
            if is_due or len(self._gathered) >= _MOST_STEPS or self._size >= _MOST_BYTES:
                self._flush()
            return not self.lane.closed

    def _flush(self) -> None:
        """Sends the pending steps, unless this rank has left the loop."""
        gathered, self._gathered, self._size = self._gathered, [], 0
        if not gathered or self.lane.closed:
            return
        while len(self._on_the_way) >= _HELD_MESSAGES:
            self._wait_for_oldest()
        self._send_to_all(
            [
                Message("steps", (self._greeting, [(step.parts[index], step.shared, None) for step in gathered]))
                for index in range(max(self._peers.parts) + 1)
            ]
        )
        self._sent = time.monotonic()
        mine = self._peers.parts[READER]
        kept = [(step.parts[mine], step.shared, step.own) for step in gathered]
        self.lane.put(Message("steps", (self._greeting, kept)))

    def _send_to_all(self, messages: list[Message]) -> None:
        """Sends ``messages[i]`` to every rank whose shard is ``i``."""
        import torch.distributed as dist

        packed: dict[int, tuple[torch.Tensor, ...]] = {}
        works: list[tuple[Work, torch.Tensor]] = []
        for rank, index in enumerate(self._peers.parts):
            if rank == READER:
                continue
            if index not in packed:
                made = pack(messages[index], self._blocks)
                packed[index] = (*split_body(made.body), *made.large)
            for tensor in packed[index]:
                work = dist.isend(tensor, group=self._peers.group, group_dst=rank, tag=self._tag)
                assert work is not None
                works.append((work, tensor))
        if works:
            self._on_the_way.append(works)

    def _wait_for_oldest(self) -> None:
        for work, _ in self._on_the_way.popleft():
            work.wait()


@final
class Receiver(DispatchThread):
    """Runs on every other rank: receives in a thread until the reading rank ends the pass.

    After this rank has left the loop, the thread still receives and drops messages: the reading rank never waits for a
    rank that has left, and no message of this pass is left in the group when the next one begins.
    """

    def __init__(self, peers: LoaderGroup, blocks: Blocks, tag: int) -> None:
        """``tag`` is that of the pass's sender."""
        super().__init__("accel-dispatch-receive")
        self._peers, self._blocks, self._tag = peers, blocks, tag

    def next(self, patience: float | None) -> Message | None:
        """Returns the next message for the loop; None after ``patience`` seconds."""
        return self.lane.get(patience)

    def _run(self) -> None:
        try:
            following: tuple[torch.Tensor, Work] | None = self._expect(
                torch.empty(FRONT, dtype=torch.uint8, device="cpu")
            )
            while following is not None:
                message, following = self._receive(*following)
                if message.kind in ("end", "left"):
                    self.behind = message.content
                self.lane.put(message)
        except BaseException as error:
            self.failure = error
            self.lane.put(Message("failed", (type(error).__name__, f"the reading rank is gone: {error}")))

    def _receive(self, front: torch.Tensor, arrival: "Work") -> "tuple[Message, tuple[torch.Tensor, Work] | None]":
        """Receives the message that begins with ``front``, and starts to receive the front of the next one, if any."""
        arrival.wait()
        block = self._blocks.take(body_size(front))
        for rest in joined_body(front, block):
            self._expect(rest)[1].wait()
        arriving = Arriving(block, self._blocks)
        message: Message = arriving.content()
        # All expected receives are posted at once, because the sender waits each time for the receiver's memory.
        rooms = [self._expect(room) for room in arriving.room]
        following = (
            self._expect(torch.empty(FRONT, dtype=torch.uint8, device="cpu")) if message.kind == "steps" else None
        )
        for _, work in rooms:
            work.wait()
        return message, following

    def _expect(self, tensor: torch.Tensor) -> "tuple[torch.Tensor, Work]":
        import torch.distributed as dist

        work = dist.irecv(tensor, group=self._peers.group, group_src=READER, tag=self._tag)
        assert work is not None
        return tensor, work


def take(
    end: "Sender | Receiver", patience: float | None, number: int, trouble: Callable[[], str | None] | None
) -> Message:
    """Returns the next message for the loop; raises a reading error on every rank, as a ``DataError`` that names it.

    ``trouble`` returns the error that another rank has reported by other means, because the reading rank may end before
    it can send its error.
    """
    began = time.monotonic()
    while True:
        left = None if patience is None else max(patience - (time.monotonic() - began), 0.0)
        message = end.next(left if trouble is None else min(_LOOK_EVERY, _LOOK_EVERY if left is None else left))
        if message is not None or left == 0.0 or trouble is None:
            break
        if (said := trouble()) is not None:
            message = end.next(_LOOK_EVERY)  # the reading rank's own message, if it still arrives
            if message is None:
                raise stopped(said)
            break
    if message is None:
        raise DataError(
            f"no batch came from rank {READER} for {time.monotonic() - began:.0f} s (batch {number} of this rank); it "
            "still reads, or has left the loop alone: all ranks must leave a dispatched loop at the same batch"
        )
    if message.kind == "failed":
        if isinstance(end, Sender) and end.failure is not None:
            raise end.failure
        name, text = message.content
        raise DataError(f"rank {READER} could not read batch {number}: {name}: {text}") from end.failure
    if message.kind == "left":
        raise DataError(
            f"rank {READER} left the loop before batch {number}, this rank did not: all ranks must leave a dispatched "
            "loop at the same batch"
        )
    return message


def _failed(error: BaseException) -> Message:
    return Message("failed", (type(error).__name__, str(error)))


def _bytes_of(parts: tuple[Any, ...]) -> int:
    """Returns the number of bytes of tensors in the last shard's batch, which stands for the others."""
    from accel_state.pytree.structure import leaves_of

    return sum(leaf.nbytes for leaf in leaves_of(parts[-1]) if isinstance(leaf, torch.Tensor))
