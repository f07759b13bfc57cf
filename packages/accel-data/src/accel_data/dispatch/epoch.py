"""One dispatched pass, on the rank that reads and on those that receive."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from accel_data.dispatch.buffers import Blocks
from accel_data.dispatch.pipeline import READER, Dispatched, Message, Receiver, Sender, take
from accel_data.dispatch.scatter import ABSENT
from accel_data.loader_group import LoaderGroup
from accel_data.order.cursor import Cursor, Step
from accel_data.source import Json, Pass
from accel_state.errors import DataStateError


class StepFacts(NamedTuple):
    """Metadata of one step, sent to every rank; ``counts`` and ``sizes`` as in ``Dealt``."""

    samples: int
    counts: tuple[int, ...] | None
    sizes: tuple[int, ...] | None
    rows: int
    record: dict[str, Json]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchPlan:
    """What a dispatched pass needs.

    Attributes:
        start: facts at the start of the pass.
        index: this rank's data shard.
        tag: distinguishes the messages of this pass from those of another pass in progress.
        length: see ``Pass.length``.
        step_rows: rows of a full step over all ranks.
        record: record of the base source there, taken before any lookahead, because afterwards it is that of
            the batch read last.
        peers: ranks that receive; None: this rank is alone.
        blocks: buffers of messages.
        base: pass that this rank reads; None: this rank receives.
        steps: steps that ``base`` is divided into.
        ending: returns, once ``base`` is read, what every rank needs to know of the base source behind the pass.
        looked_at: called with the record of each step that the loader looks at.
        left: called when the pass is over, with this rank's end of the pipeline and a function that closes ``base``,
            which is called when nothing of the pipeline is under way.
    """

    start: Step
    index: int
    tag: int
    length: int | None
    step_rows: int
    record: dict[str, Json]
    peers: LoaderGroup | None
    blocks: Blocks
    base: Pass | None
    steps: Iterator[Dispatched]
    ending: Callable[[], dict[str, Json] | None]
    looked_at: Callable[[dict[str, Json]], None]
    left: Callable[[Sender | Receiver, Callable[[], None]], None]


@final
class DispatchPass(Pass):
    """One pass over the batches that rank 0 reads."""

    def __init__(self, plan: DispatchPlan) -> None:
        self._plan = plan
        self._end: Sender | Receiver | None = None
        self._notes: deque[tuple[int, StepFacts, Any]] = deque(maxlen=3)
        self.length, self.initial_seed = plan.length, None if plan.base is None else plan.base.initial_seed
        self.batches = self._alone() if plan.peers is None else self._together(plan.peers)

    def _alone(self) -> Iterator[Any]:
        for number, step in enumerate(self._plan.steps, 1):
            self._notes.append((number, step.shared, step.own))
            yield step.parts[0]
        self._finish()

    def _together(self, peers: LoaderGroup) -> Iterator[Any]:
        end = self._end = self._open(peers)
        number = 1
        while True:
            message = take(end, peers.patience, number, self.trouble)
            if message.kind == "end":
                self._finish()
                return
            for part, facts, own in self._content(message):
                if part is not ABSENT:
                    self._notes.append((number, facts, own))
                    yield part
                    number += 1

    def _finish(self) -> None:
        if self._notes:
            _, facts, _ = self._notes[-1]
            self.remainder = facts.rows % self._plan.step_rows

    def _open(self, peers: LoaderGroup) -> Sender | Receiver:
        plan = self._plan
        end: Sender | Receiver
        if plan.base is None:
            end = Receiver(peers, plan.blocks, plan.tag)
        else:
            greeting = tuple(plan.start.cursor.state_dict().items())
            end = Sender(peers, plan.steps, greeting=greeting, ending=plan.ending, blocks=plan.blocks, tag=plan.tag)
        end.start()
        return end

    def _content(self, message: Message) -> list[tuple[Any, StepFacts, Any]]:
        greeting, steps = message.content
        here = self._plan.start.cursor.state_dict()
        if dict(greeting) != here:
            raise DataStateError(
                f"rank {READER} reads from {dict(greeting)}, this rank is at {here}: load the "
                "same state and set the same epoch on every rank"
            )
        found: list[tuple[Any, StepFacts, Any]] = steps
        return found

    @property
    def readers(self) -> Iterator[Any]:
        return self.batches if self._plan.base is None else self._plan.base.readers

    def step(self, number: int) -> Step:
        plan = self._plan
        if number == 0:
            plan.looked_at(plan.record)
            return plan.start
        facts, own = next((facts, own) for counted, facts, own in self._notes if counted == number)
        plan.looked_at(facts.record)
        # Only the reading rank has, and needs, the private state of its dataset.
        rows = None if facts.sizes is None else facts.sizes[plan.index]
        return Step(Cursor(plan.start.cursor.epoch, facts.samples), facts.counts, rows, private=own)

    def close(self) -> None:
        super().close()
        if self._end is None:
            self._close_base()
        else:
            self._plan.left(self._end, self._close_base)

    def _close_base(self) -> None:
        if self._plan.base is not None:
            self._plan.base.close()
            if self.delivered and not self.complete:
                self._plan.base.rewind(self.step(self.delivered).private)
