"""Every kind of source that a prepared loader reads from, in runs whose every delivery and random draw is recorded."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler, get_worker_info

from accel_data import LoaderOptions, PreparedLoader, prepare_loader
from accel_state.collectives.objects import all_gather_object
from accel_state.parallelism.config import DataShard

SIZE, BATCH = 22, 2


class Place(NamedTuple):
    """Where a loader is prepared: this rank of how many, and the workers of each ("persistent": 2 that stay)."""

    rank: int
    ranks: int
    workers: int | str

    @property
    def kwargs(self) -> dict[str, Any]:
        """The DataLoader's arguments for these workers."""
        if self.workers == "persistent":
            return {"num_workers": 2, "persistent_workers": True}
        return {"num_workers": self.workers}


def sample(index: int, draws: bool) -> list[float]:
    """The index and, of a dataset that augments, a draw from each global generator."""
    if not draws:
        return [float(index), 0.0, 0.0, 0.0]
    return [float(index), torch.rand(()).item(), random.random(), float(np.random.rand())]


def collated(samples: list[Any]) -> torch.Tensor:
    """Rows of float64, one for each sample."""
    return torch.tensor([one["row"] if isinstance(one, dict) else one for one in samples], dtype=torch.float64)


class Rows(Dataset[list[float]]):
    def __init__(self, draws: bool = False) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> list[float]:
        return sample(index, self.draws)


class Stream(IterableDataset[list[float]]):
    """All rows, or every so many of them; it cannot be cut."""

    def __init__(self, draws: bool = False, first: int = 0, step: int = 1) -> None:
        self.draws, self.first, self.step = draws, first, step

    def __iter__(self) -> Iterator[list[float]]:
        return (sample(index, self.draws) for index in range(self.first, SIZE, self.step))


class Cut(Stream):
    """A stream that can be cut."""

    def shard(self, num_shards: int, index: int) -> "Cut":
        return Cut(self.draws, self.first + index * self.step, self.step * num_shards)


class Divided(Stream):
    """A stream that divides itself among the workers that read it."""

    def __iter__(self) -> Iterator[list[float]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (sample(index, self.draws) for index in range(first, SIZE, step))


class OwnSampler:
    """Shuffles with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE, generator=self.generator).tolist())

    def __len__(self) -> int:
        return SIZE


class InARow:
    """Two random samplers one after the other: the second draws when the first has ended."""

    def __iter__(self) -> Iterator[int]:
        half = SIZE // 2
        yield from torch.randperm(half).tolist()
        yield from (half + np.random.permutation(SIZE - half)).tolist()

    def __len__(self) -> int:
        return SIZE


class Remembering:
    """A sampler with a state: each pass shuffles on from where the one before ended."""

    def __init__(self) -> None:
        self.state = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE, generator=self.state).tolist())

    def __len__(self) -> int:
        return SIZE

    def state_dict(self) -> dict[str, list[int]]:
        return {"words": self.state.get_state().tolist()}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.state.set_state(torch.tensor(state["words"], dtype=torch.uint8))


class Ragged:
    """A batch sampler with batches of 1, 2, 3, 1, ... samples, shuffled by the global generator."""

    def __iter__(self) -> Iterator[list[int]]:
        order, first, width = torch.randperm(SIZE).tolist(), 0, 1
        while first < SIZE:
            yield order[first : first + width]
            first, width = first + width, width % 3 + 1

    def __len__(self) -> int:
        return sum(1 for _ in self)


def rows_of_files(files: list[int], draws: bool) -> Iterator[dict[str, list[float]]]:
    """The rows of some of six files."""
    for file in files:
        for index in range(file, SIZE, 6):
            yield {"row": sample(index, draws)}


def hugging_face(draws: bool) -> Any:
    """A stream of ``datasets`` over six files."""
    import datasets

    return datasets.IterableDataset.from_generator(rows_of_files, gen_kwargs={"files": list(range(6)), "draws": draws})


Make = Callable[[bool, Place], Any]


@dataclass(frozen=True)
class Kind:
    """One way of reading.

    Attributes:
        data: the dataset, given whether it draws, and the place.
        loading: the DataLoader's arguments that go with it.
        options: those of the prepared loader.
        unique: each sample comes once in an epoch.
    """

    data: Make
    loading: Callable[[], dict[str, Any]] = dict
    options: dict[str, Any] = field(default_factory=dict)
    unique: bool = True
    stateful: bool = False


def _rows(draws: bool, place: Place) -> Any:
    return Rows(draws)


def _stream(draws: bool, place: Place) -> Any:
    return Stream(draws)


KINDS: dict[str, Kind] = {
    "sequential": Kind(_rows),
    "shuffled": Kind(_rows, lambda: {"shuffle": True}),
    "weighted": Kind(
        _rows, lambda: {"sampler": WeightedRandomSampler(torch.arange(1.0, SIZE + 1), SIZE)}, unique=False
    ),
    "own sampler": Kind(_rows, lambda: {"sampler": OwnSampler()}),
    "samplers in a row": Kind(_rows, lambda: {"sampler": InARow()}),
    "stateful sampler": Kind(_rows, lambda: {"sampler": Remembering()}),
    "own batch sampler": Kind(_rows, lambda: {"batch_sampler": Ragged(), "batch_size": 1}),
    "dispatched map": Kind(_rows, lambda: {"shuffle": True}, {"dispatch_batches": True}),
    "stateful map": Kind(_rows, lambda: {"shuffle": True}, stateful=True),
    "strided": Kind(_stream),
    "divided": Kind(lambda draws, place: Divided(draws)),
    "sharded": Kind(lambda draws, place: Cut(draws)),
    "already sharded": Kind(
        lambda draws, place: Stream(draws, place.rank, place.ranks), options={"already_sharded": True}
    ),
    "dispatched stream": Kind(_stream, options={"dispatch_batches": True}),
    "hugging face": Kind(lambda draws, place: hugging_face(draws)),
    "hugging face, shuffled": Kind(lambda draws, place: hugging_face(draws).shuffle(seed=5, buffer_size=4)),
    "stateful stream": Kind(_stream, options={"use_stateful_dataloader": True}),
}


class Step(NamedTuple):
    """What one rank had of one step: its real rows, how many repeated ones, and a draw of the model's."""

    rows: list[tuple[float, ...]]
    repeated: int
    model: float


Trace = list[Step]


@dataclass(frozen=True)
class Rig:
    """A kind at a place; makes its loaders and runs them. ``group`` has the ranks that read."""

    kind: Kind
    place: Place
    group: Any
    draws: bool = False

    def loader(self, seed: int = 100) -> PreparedLoader:
        """A loader prepared in a process that is seeded so, differently on each rank. A collective."""
        seed_all(seed + self.place.rank)
        kind, place = self.kind, self.place
        loader_class: Any = DataLoader
        if kind.stateful:
            from torchdata.stateful_dataloader import StatefulDataLoader as loader_class
        data = kind.data(self.draws, place)
        arguments = {"batch_size": BATCH, "collate_fn": collated, **place.kwargs, **kind.loading()}
        options = LoaderOptions(**kind.options)
        shard = DataShard(place.rank, place.ranks)
        return prepare_loader(loader_class(data, **arguments), shard, options=options, session_group=self.group)

    def step(self, loader: PreparedLoader, batch: torch.Tensor) -> Step:
        """Records a batch, with a model behind it that draws."""
        counts = loader.real_counts
        real = len(batch) if counts is None else max(counts[self.place.rank], 0)
        return Step([tuple(row) for row in batch[:real].tolist()], len(batch) - real, torch.rand(()).item())

    def steps(self, loader: PreparedLoader) -> Iterator[Step]:
        """A pass, step by step."""
        for batch in loader:
            yield self.step(loader, batch)

    def epoch(self, loader: PreparedLoader) -> Trace:
        """A pass, or what is left of one."""
        return list(self.steps(loader))


def seed_all(seed: int) -> None:
    """Seeds the process as a script does."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class Saved(NamedTuple):
    """What a checkpoint has of one rank: the loader's state as JSON, and the states of the generators."""

    loader: dict[str, Any]
    generators: tuple[Any, Any, Any]

    @classmethod
    def of(cls, loader: PreparedLoader) -> "Saved":
        """Saves between two batches."""
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        return cls(json.loads(json.dumps(loader.state_dict())), states)

    def restore(self, loader: PreparedLoader) -> None:
        """Loads on the rank that saved."""
        loader.load_state_dict(self.loader)
        torch.set_rng_state(self.generators[0])
        random.setstate(self.generators[1])
        np.random.set_state(self.generators[2])


def rows_only(trace: Trace) -> list[list[float]]:
    """The samples of each step, without what was drawn."""
    return [[row[0] for row in step.rows] for step in trace]


def in_order(traces: list[Trace]) -> list[float]:
    """The samples of all ranks as the epoch has them: rank after rank in every step."""
    longest = max(map(len, traces), default=0)
    return [
        row[0] for number in range(longest) for trace in traces if number < len(trace) for row in trace[number].rows
    ]


def gathered(value: Any, group: Any) -> list[Any]:
    """Of all ranks of a group."""
    return all_gather_object(value, group=group)


def subgroup(ranks: int) -> Any:
    """The group of the first ``ranks`` ranks. A collective of all ranks, also of those outside of it."""
    return dist.group.WORLD if ranks == dist.get_world_size() else dist.new_group(list(range(ranks)))
