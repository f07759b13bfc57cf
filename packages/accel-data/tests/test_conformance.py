"""One list of promises, kept by every kind of source with any ranks and workers through anything that happens to a run.

A cell is a kind of source, a number of workers, a number of ranks and an event. ``NOT_PROMISED`` has every cell that is
not exact, with the reason; docs/guides/data.md says the same. Every other cell delivers each sample of an epoch exactly
once, in the order of an uninterrupted run, with all random draws of dataset and model, bit for bit. The tests run the
cells of a covering array of strength 3: each combination of values of any three of the four is in one of them.
"""

import gc
import re
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from covertable import make
from data_conformance import KINDS, SIZE, Place, Rig, Saved, Trace, gathered, in_order, rows_only, subgroup

from accel_data import skip_first_batches
from accel_state.errors import CollectiveError, DataStateError

pytestmark = [
    pytest.mark.filterwarnings("ignore:every reader of"),
    pytest.mark.filterwarnings("ignore:.*set_vital"),
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]

CUT = 3
"""Steps after which a run is saved; odd, so that two workers have not delivered equally many."""


class Reference(NamedTuple):
    """An uninterrupted run of two epochs on one rank, saved in the first."""

    first: Trace
    second: Trace
    saved: Saved
    ended: Saved


def reference(rig: Rig) -> Reference:
    loader, first = rig.loader(), []
    for step in rig.steps(loader):
        first.append(step)
        if len(first) == CUT:
            saved = Saved.of(loader)
        ended = Saved.of(loader)
    return Reference(first, rig.epoch(loader), saved, ended)


def assert_each_once(rig: Rig, *traces: Trace) -> None:
    """Over all ranks, in what was delivered by these parts of an epoch."""
    if rig.kind.unique:
        delivered = [
            row for trace in traces for rank in gathered(trace, rig.group) for step in rank for row in step.rows
        ]
        assert sorted(row[0] for row in delivered) == list(range(SIZE))


def resume(rig: Rig, run: Reference) -> None:
    """A new process goes on inside the epoch; the next epoch follows."""
    assert_each_once(rig, run.first)
    assert_each_once(rig, run.second)
    loader = rig.loader(seed=900)
    run.saved.restore(loader)
    assert rig.epoch(loader) == run.first[CUT:]
    assert rig.epoch(loader) == run.second


def resume_at_the_end(rig: Rig, run: Reference) -> None:
    """A new process goes on behind the last batch of an epoch, before the loop has returned for its end."""
    loader = rig.loader(seed=900)
    run.ended.restore(loader)
    rest = rig.epoch(loader)
    if not rest:  # Where only reading tells that the epoch has ended.
        rest = rig.epoch(loader)
    assert rest == run.second


def skip(rig: Rig, run: Reference) -> None:
    loader = rig.loader()
    assert rows_only(rig.epoch(skip_first_batches(loader, CUT))) == rows_only(run.first[CUT:])
    assert rows_only(rig.epoch(loader)) == rows_only(run.second)


def set_epoch(rig: Rig, run: Reference) -> None:
    loader = rig.loader()
    loader.set_epoch(1)
    assert rows_only(rig.epoch(loader)) == rows_only(run.second)
    loader.set_epoch(0)
    assert rows_only(rig.epoch(loader)) == rows_only(run.first)


def break_and_pass_again(rig: Rig, run: Reference) -> None:
    loader, broken = rig.loader(), []
    for step in rig.steps(loader):
        broken.append(step)
        if len(broken) == CUT:
            break
    assert broken == run.first[:CUT]
    assert rows_only(rig.epoch(loader)) == rows_only(run.second)


def nested(rig: Rig, run: Reference) -> None:
    loader, outer = rig.loader(), []
    for step in rig.steps(loader):
        outer.append(step)
        if len(outer) == CUT:
            state = loader.state_dict()
            assert rows_only(rig.epoch(loader)) == rows_only(run.first)
            assert loader.state_dict() == state
    assert rows_only(outer) == rows_only(run.first)
    assert rows_only(rig.epoch(loader)) == rows_only(run.second)


def refused_load(rig: Rig, run: Reference) -> None:
    loader, trace = rig.loader(), []
    for step in rig.steps(loader):
        trace.append(step)
        if len(trace) == CUT:
            before = loader.state_dict()
            with pytest.raises(DataStateError, match="version 99"):
                loader.load_state_dict({**run.saved.loader, "version": 99})
            assert loader.state_dict() == before
    assert trace == run.first
    assert rig.epoch(loader) == run.second


def load_save_load(rig: Rig, run: Reference) -> None:
    between, loader = rig.loader(seed=500), rig.loader(seed=900)
    run.saved.restore(between)
    Saved.of(between).restore(loader)
    assert rig.epoch(loader) == run.first[CUT:]
    assert rig.epoch(loader) == run.second


def free_and_prepare_again(rig: Rig, run: Reference) -> None:
    for _ in range(2):
        loader = rig.loader()
        passing = rig.steps(loader)
        next(passing)
        del loader, passing
        gc.collect()
    assert rig.epoch(rig.loader()) == run.first


def groups_of_others(rig: Rig, run: Reference) -> None:
    if rig.place.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    loader = rig.loader()
    assert rig.epoch(loader) == run.first
    if rig.place.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    assert rig.epoch(loader) == run.second


EVENTS = {
    event.__name__: event
    for event in (
        resume,
        resume_at_the_end,
        skip,
        set_epoch,
        break_and_pass_again,
        nested,
        refused_load,
        load_save_load,
        free_and_prepare_again,
        groups_of_others,
    )
}
WORKERS = (0, 1, 2, "persistent")
RANKS = (1, 2, 3)
STREAMS = (
    "strided",
    "divided",
    "sharded",
    "already sharded",
    "dispatched stream",
    "hugging face",
    "hugging face, shuffled",
    "stateful stream",
)
NAMES = (*EVENTS, "draws", "resize")
"""What happens; "draws" is a resume of a dataset that draws from the global generators, "resize" one on other ranks."""


class Cell(NamedTuple):
    kind: str
    workers: int | str
    ranks: int
    event: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.workers}-{self.ranks}-{self.event}".replace(" ", "_")

    def run(self, rank: int) -> None:
        if self.event == "resize":
            resize(self.kind, self.workers, rank, self.ranks)
            return
        draws = self.event == "draws"
        rig = Rig(KINDS[self.kind], Place(rank, self.ranks, self.workers), subgroup(self.ranks), draws)
        (resume if draws else EVENTS[self.event])(rig, reference(rig))

    def ranks_mark(self) -> Any:
        return pytest.mark.ranks(3 if self.event == "resize" else self.ranks)


class Row(NamedTuple):
    """Cells that are not exact, and why.

    Attributes:
        because: the reason; docs/guides/data.md has it in these words.
        witness: one of the cells, in which a test sees that it is so.
    """

    because: str
    witness: Cell
    kinds: tuple[str, ...]
    event: str
    workers: tuple[int | str, ...] = WORKERS
    ranks: tuple[int, ...] = RANKS

    def holds(self, cell: Cell) -> bool:
        return (
            cell.kind in self.kinds
            and cell.event == self.event
            and cell.workers in self.workers
            and cell.ranks in self.ranks
        )


NOT_PROMISED = (
    Row(
        "a resume seeks in the stream, or reads it again from the start of the epoch. The global generators no longer "
        "have the states with which the epoch began",
        Cell("strided", 0, 1, "draws"),
        STREAMS,
        "draws",
        workers=(0,),
    ),
    Row(
        "seeking, and refilling the shuffle buffer, does not repeat the draws of skipped elements",
        Cell("hugging face, shuffled", 2, 1, "draws"),
        ("hugging face", "hugging face, shuffled"),
        "draws",
        workers=(1, 2, "persistent"),
    ),
    Row(
        "rank 0 reads ahead in a thread of its main process, so dataset and model draw from the same generators in no "
        "fixed order",
        Cell("dispatched map", 0, 2, "draws"),
        ("dispatched map",),
        "draws",
        workers=(0,),
        ranks=(2, 3),
    ),
    Row(
        "The order of such a sampler depends on its saved state, not on the number of the epoch",
        Cell("stateful sampler", 0, 1, "set_epoch"),
        ("stateful sampler",),
        "set_epoch",
    ),
    Row(
        "Several ranks can agree on the end of only one pass at a time, so a nested pass is refused with an error",
        Cell("sharded", 0, 2, "nested"),
        ("sharded", "already sharded", "hugging face", "hugging face, shuffled"),
        "nested",
        ranks=(2, 3),
    ),
    Row(
        "Other ranks would read other shards, so the position is refused with an error",
        Cell("already sharded", 0, 1, "resize"),
        ("already sharded",),
        "resize",
    ),
)


def resize(kind: str, workers: int | str, rank: int, ranks: int) -> None:
    """Another number of ranks and of workers goes on inside the epoch."""
    others, groups = ranks % 3 + 1, {n: subgroup(n) for n in RANKS}
    other_workers = {0: 2, 1: 0, 2: 1, "persistent": 0}[workers]
    mine: Any = None
    if rank < ranks:
        rig = Rig(KINDS[kind], Place(rank, ranks, workers), groups[ranks])
        run = reference(rig)
        order = in_order(gathered(run.first, rig.group))
        mine = in_order(gathered(run.first[:CUT], rig.group)), order, run.saved.loader
    delivered, order, state = gathered(mine, None)[0]
    if rank < others:
        rig = Rig(KINDS[kind], Place(rank, others, other_workers), groups[others])
        loader = rig.loader(seed=900)
        loader.load_state_dict(state)
        rest = in_order(gathered(rig.epoch(loader), rig.group))
        if rig.kind.unique:
            assert sorted(delivered + rest) == list(range(SIZE))
        assert delivered + rest == order
        assert_each_once(rig, rig.epoch(loader))


CELLS = [Cell(*cell) for cell in product(KINDS, WORKERS, RANKS, NAMES)]


def promised(cell: Cell) -> bool:
    return not any(row.holds(cell) for row in NOT_PROMISED)


@cache
def covering() -> list[Cell]:
    """The promised cells of a covering array of strength 3, and those of the sample, in the order of ``CELLS``."""
    only_promised = {
        "operator": "fn",
        "requires": Cell._fields,
        "evaluate": lambda row: promised(Cell(**{name: row[name] for name in Cell._fields})),
    }
    factors = dict(zip(Cell._fields, (list(KINDS), WORKERS, RANKS, NAMES), strict=True))
    rows = {Cell(**row) for row in make(factors, strength=3, constraints=[only_promised])}
    return [cell for cell in CELLS if promised(cell) and (cell in rows or in_sample(cell))]


def in_sample(cell: Cell) -> bool:
    """A third of the kinds and events, each with some workers and ranks."""
    kind, event = list(KINDS).index(cell.kind), NAMES.index(cell.event)
    turn = (kind * len(NAMES) + event) // 3
    return (kind + event) % 3 == 0 and cell.workers == WORKERS[turn % 4] and cell.ranks == RANKS[turn // 2 % 3]


def marked(cell: Cell) -> Any:
    marks = [cell.ranks_mark()]
    if not in_sample(cell):
        marks.append(pytest.mark.slow)
    return pytest.param(cell, id=str(cell), marks=marks)


@pytest.mark.parametrize("cell", [marked(cell) for cell in covering()])
@pytest.mark.sampled(12)
def test_a_run_goes_on_exactly(rank: int, cell: Cell) -> None:
    cell.run(rank)


def test_any_three_values_that_are_promised_together_are_in_a_cell() -> None:
    def triples(cells: list[Cell]) -> set[tuple[object, ...]]:
        return {(fields, *(cell[at] for at in fields)) for cell in cells for fields in combinations(range(4), 3)}

    cells = covering()
    assert triples(cells) == triples([cell for cell in CELLS if promised(cell)])
    assert len(cells) < len(CELLS) / 2


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=str(row.witness), marks=row.witness.ranks_mark()) for row in NOT_PROMISED]
)
def test_what_is_not_promised_is_not_so(rank: int, row: Row) -> None:
    if "refused" not in row.because:
        with pytest.raises(AssertionError):
            row.witness.run(rank)
    elif rank < row.witness.ranks % 3 + 1:  # in a resize, the ranks that load
        with pytest.raises((DataStateError, CollectiveError), match=r"must leave a loop|cut into shards for"):
            row.witness.run(rank)
    else:
        row.witness.run(rank)


def test_the_exceptions_are_those_of_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "data.md").read_text()
    section = page.partition("## What is exact")[2].partition("## ")[0]
    told = [
        " ".join(text.split()) for text in re.findall(r"^\d+\. (.*?)(?=^\d+\. |^$)", section, re.MULTILINE | re.DOTALL)
    ]
    assert len(told) == len(NOT_PROMISED)
    assert [row.because for row in NOT_PROMISED if not any(row.because in text for text in told)] == []
