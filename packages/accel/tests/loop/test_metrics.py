"""``gather_for_metrics`` gives every sample once, whatever the sharding repeated or cut."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel import Accelerator, DataLoaderConfiguration
from accel_state import DataError, ParallelismConfig

GRID = list(itertools.product(range(1, 41), range(1, 8)))
SAMPLE = [(1, 1), (1, 7), (2, 3), (3, 2), (5, 4), (7, 7), (11, 2), (13, 5), (16, 4), (23, 3), (40, 7)]


def expected(n: int, batch: int, ranks: int, drop_last: bool, even: bool) -> list[int]:
    """What one process would see: all samples, less the steps that ``drop_last`` leaves out."""
    if not drop_last:
        return list(range(n))
    return list(range(n // (batch * ranks) * batch * ranks))


def check(cases: list[tuple[int, int]], drop_last: bool, even: bool) -> None:
    options = DataLoaderConfiguration(even_batches=even)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    ranks = accelerator.num_processes
    for n, batch in cases:
        loader = accelerator.prepare_data_loader(DataLoader(range(n), batch_size=batch, drop_last=drop_last))
        seen: list[int] = []
        objects: list[str] = []
        for rows in loader:
            gathered = accelerator.gather_for_metrics({"rows": rows, "pair": (rows, rows * 2)})
            assert torch.equal(gathered["pair"][1], gathered["rows"] * 2)
            seen += gathered["rows"].tolist()
            objects += accelerator.gather_for_metrics([f"s{row}" for row in rows.tolist()])
        if even or accelerator.process_index == 0:
            assert seen == expected(n, batch, ranks, drop_last, even), (n, batch)
            assert objects == [f"s{row}" for row in seen], (n, batch)


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.ranks(2)), pytest.param(4, marks=pytest.mark.ranks(4))]
)
@pytest.mark.sampled(3)
def test_every_sample_once_on_a_sample_of_the_grid(ranks: int, drop_last: bool, even: bool) -> None:
    check(SAMPLE, drop_last, even)


@pytest.mark.slow
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, *(pytest.param(n, marks=pytest.mark.ranks(n, timeout=280)) for n in (2, 3, 4))])
def test_every_sample_once_on_the_full_grid(ranks: int, drop_last: bool, even: bool) -> None:
    check(GRID, drop_last, even)


class Stream(IterableDataset[int]):
    """Eleven samples, without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"even_batches": False},
        {"split_batches": True},
        {"dispatch_batches": True},
        {"dispatch_batches": True, "even_batches": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("data", [range(11), Stream()], ids=["map", "iterable"])
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.ranks(3))])
@pytest.mark.sampled(4)
def test_tokens_of_every_sample_once(ranks: int, data: Any, options: dict[str, bool]) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    size = 2 * accelerator.num_processes if options.get("split_batches") else 2
    samples, tokens, texts = [], [], []
    for rows in accelerator.prepare_data_loader(DataLoader(data, batch_size=size)):
        samples += accelerator.gather_for_metrics(rows).tolist()
        tokens += accelerator.gather_for_metrics(rows.repeat_interleave(3)).tolist()
        texts += accelerator.gather_for_metrics([f"{row} {beam}" for row in rows for beam in range(2)])
    if accelerator.process_index == 0:
        assert samples == list(range(11))
        assert tokens == [row for row in range(11) for _ in range(3)]
        assert texts == [f"{row} {beam}" for row in range(11) for beam in range(2)]


@pytest.mark.ranks(2)
def test_scalars_and_unrelated_shapes_are_not_cut(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare_data_loader(DataLoader(range(3), batch_size=2))
    found = [accelerator.gather_for_metrics(torch.tensor(float(rank))).tolist() for _ in loader]
    assert found == [[0.0, 1.0]] * len(loader)
    assert found


@pytest.mark.ranks(2)
def test_outside_of_a_loop_everything_is_kept(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    for _ in accelerator.prepare_data_loader(DataLoader(range(3), batch_size=2)):
        pass
    assert accelerator.gather_for_metrics(torch.arange(2)).tolist() == [0, 1, 0, 1]


@pytest.mark.ranks(2)
def test_an_evaluation_inside_of_training_is_cut_by_its_own_loader(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    outer = accelerator.prepare_data_loader(DataLoader(range(8), batch_size=2))
    inner = accelerator.prepare_data_loader(DataLoader(range(5), batch_size=2))
    for _ in outer:
        seen = [row for rows in inner for row in accelerator.gather_for_metrics(rows).tolist()]
        assert seen == [0, 1, 2, 3, 4]
        assert accelerator.clock.active_loader is outer


@pytest.mark.ranks(2)
def test_breaking_out_leaves_nothing_behind(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    for _ in accelerator.prepare_data_loader(DataLoader(range(8), batch_size=2)):
        break
    assert accelerator.gradient_state.active_dataloader is None


@pytest.mark.ranks(4)
@pytest.mark.parametrize("as_objects", [False, True], ids=["tensors", "objects"])
def test_ranks_that_are_left_gather_where_torch_has_no_numpy(
    rank: int, as_objects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "numpy", property(lambda tensor: pytest.fail("not there")), raising=False)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader = accelerator.prepare_data_loader(DataLoader(range(13), batch_size=2))
    seen = []
    for rows in loader:
        data = [{"row": row, "text": "x" * int(row)} for row in rows] if as_objects else {"row": rows}
        found = accelerator.gather_for_metrics(data)
        seen += [one["row"] for one in found] if as_objects else found["row"]
    # The last step has 2, 2 and 1 rows, and none on rank 3.
    assert [int(row) for row in seen] == list(range(13 if rank < 3 else 8))


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


@pytest.mark.ranks(2)
def test_none_beside_tensors_stays_none_and_other_objects_are_refused(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    outputs, pairs = [], []
    for rows in accelerator.prepare_data_loader(DataLoader(range(5), batch_size=2)):
        outputs.append(accelerator.gather_for_metrics(Output(rows)))
        pairs.append(accelerator.gather_for_metrics((rows, None)))
        with pytest.raises(DataError, match=r"a dict with tensors and a str at \['b'\]\[0\]; .*one call for"):
            accelerator.gather_for_metrics({"a": rows, "b": ["x"] * len(rows)})
    assert torch.cat([one.logits for one in outputs]).tolist() == list(range(5))
    assert torch.cat([one for one, _ in pairs]).tolist() == list(range(5))
    assert {one.loss for one in outputs} == {other for _, other in pairs} == {None}


SPLIT = ParallelismConfig(dp_shard_size=2, tp_size=2)


@pytest.mark.ranks(4)
def test_the_shards_of_ranks_follow_the_degrees(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator._loaders.shards_of_ranks() is None
    strategy = accelerator._strategy
    strategy.parallelism, strategy.data_shard = SPLIT, SPLIT.data_shard(accelerator.session.topology)
    assert accelerator._loaders.shards_of_ranks() == [0, 0, 1, 1]


class Images(IterableDataset[int]):
    """Numbers of images, of which nobody can seek or know the length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


def detections(images: list[int]) -> list[dict[str, torch.Tensor]]:
    """For each image as many boxes as its number says, from none to four."""
    return [{"boxes": torch.full((image % 5, 4), float(image)), "image": torch.tensor(image)} for image in images]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [1, 7, 12, 13])
@pytest.mark.parametrize(
    ("kind", "dispatch"),
    [(range, False), (range, True), (Images, False), (Images, True)],
    ids=["indices", "indices sent", "stream", "stream sent"],
)
@pytest.mark.filterwarnings("ignore:every reader of")
@pytest.mark.sampled(4)
def test_ragged_detections_come_once_each_from_every_kind_of_loader(
    rank: int, size: int, kind: Any, dispatch: bool
) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    outer = accelerator.prepare_data_loader(DataLoader(range(3), batch_size=2))
    inner = accelerator.prepare_data_loader(DataLoader(kind(size), batch_size=3))
    for _ in outer:
        found = [
            one
            for images in inner
            for one in accelerator.gather_for_metrics(detections(images.tolist()), use_gather_object=True)
        ]
        assert [int(one["image"]) for one in found] == list(range(size))
        assert [len(one["boxes"]) for one in found] == [image % 5 for image in range(size)]
        assert accelerator.clock.active_loader is outer


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("size", "batch", "uneven", "even"), [(3, 1, ([1, 1], [1]), [1, 1]), (7, 2, ([2, 2], [2, 1]), [2, 2])]
)
def test_uneven_ends_are_joined_and_even_ones_are_what_the_block_says(
    rank: int, size: int, batch: int, uneven: tuple[list[int], list[int]], even: list[int]
) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loader = accelerator.prepare_data_loader(DataLoader(torch.ones(size, 1), batch_size=batch))

    def read() -> list[int]:
        sizes = []
        for rows in loader:
            accelerator.backward(model(rows).sum())
            sizes.append(len(rows))
        return sizes

    with accelerator.join_uneven_inputs([model]):
        assert read() == uneven[rank]
    with accelerator.join_uneven_inputs([model], even_batches=True):
        assert read() == even
    with accelerator.join_uneven_inputs([model], even_batches=False):
        assert read() == uneven[rank]
