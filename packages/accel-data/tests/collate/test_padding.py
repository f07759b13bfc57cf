"""Padding collation: what is padded, what is kept, what is refused."""

import ast
import sysconfig
from collections import UserDict, namedtuple
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from accel_data.collate.padding import PaddingCollator, pad_sequences, padded_length, padding_share
from accel_data.collate.token_budget import TokenBudget, TokenBudgetSampler, even_out, pack
from accel_data.options import LoaderOptions
from accel_data.prepare import prepare_loader
from accel_state.errors import AccelError, ConfigError, DataError, DataStateError
from accel_state.parallelism.config import DataShard

Pair = namedtuple("Pair", "tokens label")


@dataclass
class Example:
    tokens: list[int]
    name: str


@pytest.mark.parametrize(
    ("longest", "multiple", "maximum", "expected"),
    [(5, 1, None, 5), (5, 8, None, 8), (8, 8, None, 8), (9, 8, 12, 12), (9, 1, 4, 4), (0, 8, None, 0)],
)
def test_padded_length_rounds_up_and_never_passes_the_maximum(longest, multiple, maximum, expected):
    assert padded_length(longest, multiple_of=multiple, max_length=maximum) == expected


@given(st.lists(st.lists(st.integers(1, 9), max_size=7), min_size=1, max_size=5), st.sampled_from(["left", "right"]))
def test_padding_adds_only_the_value_on_one_side(rows, side):
    length = max(map(len, rows))
    batch = pad_sequences([torch.tensor(row, dtype=torch.int64) for row in rows], length=length, value=0, side=side)
    fill = [[0] * (length - len(row)) for row in rows]
    assert batch.tolist() == [f + r if side == "left" else r + f for r, f in zip(rows, fill, strict=True)]


def test_trailing_dimensions_are_kept():
    batch = pad_sequences([torch.ones(2, 3), torch.ones(4, 3)], length=4)
    assert batch.shape == (2, 4, 3)
    assert batch.sum() == 18


@pytest.mark.parametrize(("side", "kept"), [("right", [1, 2, 3]), ("left", [3, 4, 5])])
def test_truncation_cuts_the_padded_side(side, kept):
    collate = PaddingCollator(max_length=3, side=side)
    assert collate([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])[0].tolist() == kept


def test_nothing_is_cut_unless_asked():
    assert PaddingCollator()([[1] * 1000, [1]]).shape == (2, 1000)


def test_values_and_sides_are_per_name():
    collate = PaddingCollator(pad_value={"labels": -100}, side={"ids": "left"})
    batch = collate([{"ids": [1, 2], "labels": [3, 4]}, {"ids": [5], "labels": [6]}])
    assert batch["ids"].tolist() == [[1, 2], [0, 5]]
    assert batch["labels"].tolist() == [[3, 4], [6, -100]]


def test_a_full_path_wins_over_the_last_part():
    collate = PaddingCollator(pad_value={"a.x": 1, "x": 2})
    batch = collate([{"a": {"x": [0, 0]}, "b": {"x": [0, 0]}}, {"a": {"x": [0]}, "b": {"x": [0]}}])
    assert batch["a"]["x"][1].tolist() == [0, 1]
    assert batch["b"]["x"][1].tolist() == [0, 2]


def test_other_leaves_are_kept():
    batch = PaddingCollator()([{"text": "a", "n": 1, "w": 0.5, "ok": True, "x": None}] * 2)
    assert batch["text"] == ["a", "a"]
    assert batch["x"] == [None, None]
    assert (batch["n"].dtype, batch["w"].dtype, batch["ok"].dtype) == (torch.int64, torch.float64, torch.bool)


@pytest.mark.parametrize(
    ("samples", "kind"),
    [
        ([{"tokens": [1, 2], "name": "a"}, {"tokens": [1], "name": "b"}], dict),
        ([UserDict(tokens=[1, 2], name="a"), UserDict(tokens=[1], name="b")], UserDict),
        ([Pair([1, 2], 0), Pair([1], 1)], Pair),
        ([([1, 2], "a"), ([1], "b")], tuple),
        ([Example([1, 2], "a"), Example([1], "b")], Example),
    ],
)
def test_the_container_of_the_samples_is_the_container_of_the_batch(samples, kind):
    batch = PaddingCollator()(samples)
    assert type(batch) is kind
    tokens = batch[0] if isinstance(batch, tuple) else getattr(batch, "tokens", None)
    tokens = batch["tokens"] if tokens is None else tokens
    assert tokens.tolist() == [[1, 2], [1, 0]]


def test_the_samples_are_not_changed():
    sample = UserDict(tokens=[1, 2])
    PaddingCollator(multiple_of=4)([sample, sample])
    assert sample == {"tokens": [1, 2]}


def test_arrays_are_sequences():
    numpy = pytest.importorskip("numpy")
    batch = PaddingCollator()([{"a": numpy.ones(2, dtype="float32")}, {"a": numpy.ones(3, dtype="float32")}])
    assert batch["a"].shape == (2, 3)
    assert batch["a"].dtype == torch.float32


def test_only_named_keys_are_padded():
    collate = PaddingCollator(keys=["ids"], multiple_of=4)
    batch = collate([{"ids": [1], "features": torch.zeros(3)}, {"ids": [1, 2], "features": torch.zeros(3)}])
    assert batch["ids"].shape == (2, 4)
    assert batch["features"].shape == (2, 3)


def test_ragged_names_stay_lists_even_when_equal():
    batch = PaddingCollator(ragged=["boxes"])([{"boxes": torch.zeros(2, 4)}] * 2)
    assert [box.shape for box in batch["boxes"]] == [(2, 4), (2, 4)]


@pytest.mark.parametrize(
    ("side", "expected"), [("right", [[1, 1, 0, 0], [1, 0, 0, 0]]), ("left", [[0, 0, 1, 1], [0, 0, 0, 1]])]
)
def test_mask_marks_real_positions(side, expected):
    collate = PaddingCollator(mask="mask", multiple_of=4, side=side)
    assert collate([{"x": [5, 5]}, {"x": [5]}])["mask"].int().tolist() == expected


def test_a_mask_of_the_samples_is_kept():
    batch = PaddingCollator(mask="mask")([{"x": [5, 5], "mask": [1, 1]}, {"x": [5], "mask": [1]}])
    assert batch["mask"].tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize(
    ("collate", "samples", "words"),
    [
        (PaddingCollator(), [], "empty list"),
        (PaddingCollator(), [{"a": 1}, {"b": 1}], "sample 1 of the batch has no 'a'"),
        (PaddingCollator(), [(1, 2), (1,)], "1 entries"),
        (PaddingCollator(keys=["x"]), [{"x": [1], "y": [1]}, {"x": [1], "y": [1, 2]}], "keys=('y', ...)"),
        (PaddingCollator(), [{"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 4)}], "at 'x'"),
        (PaddingCollator(mask="m"), [[1], [2]], "mask='m' needs samples that are mappings"),
    ],
)
def test_samples_that_do_not_fit_are_named(collate, samples, words):
    with pytest.raises(DataError) as caught:
        collate(samples)
    assert words in str(caught.value)


@pytest.mark.parametrize("bad", [{"multiple_of": 0}, {"max_length": 0}, {"side": "top"}, {"side": {"x": "up"}}])
def test_impossible_options_are_refused(bad):
    with pytest.raises(ConfigError, match="must be"):
        PaddingCollator(**bad)


def test_it_works_in_worker_processes():
    data = [{"ids": [1] * n} for n in (1, 2, 3, 4)]
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1, collate_fn=PaddingCollator())
    assert [batch["ids"].shape for batch in loader] == [(2, 2), (2, 4)]


lengths_strategy = st.lists(st.integers(0, 20), min_size=1, max_size=60)


@given(lengths_strategy, st.integers(20, 100), st.integers(1, 64), st.sampled_from([1, 4]))
def test_every_sample_is_in_one_batch_within_the_budget(lengths, max_tokens, pool, multiple_of):
    budget = TokenBudget(max_tokens=max_tokens, multiple_of=multiple_of)
    batches = pack(torch.tensor(lengths), torch.arange(len(lengths)), budget, pool=pool)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    sizes = [len(b) * padded_length(max(lengths[i] for i in b), multiple_of=multiple_of) for b in batches]
    assert max(sizes) <= max_tokens


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 8))
def test_evening_out_reads_every_sample_once_when_there_are_enough(sizes, multiple):
    numbers = iter(range(sum(sizes)))
    batches = [[next(numbers) for _ in range(size)] for size in sizes]
    evened = even_out(batches, multiple)
    assert len(evened) % multiple == 0
    assert len(evened) < len(batches) + multiple
    flat = [i for batch in evened for i in batch]
    needed = -(-len(batches) // multiple) * multiple
    assert (flat if sum(sizes) >= needed else sorted(set(flat))) == list(range(sum(sizes)))


@given(lengths_strategy, st.integers(1, 4), st.integers(0, 5), st.booleans())
def test_shards_are_even_disjoint_and_make_up_the_plan(lengths, shards, epoch, shuffle):
    samplers = [
        TokenBudgetSampler(lengths, 40, num_shards=shards, index=index, shuffle=shuffle, pool=16)
        for index in range(shards)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    read = [list(sampler) for sampler in samplers]
    assert len({len(batches) for batches in read}) == 1
    assert [len(batches) for batches in read] == [len(sampler) for sampler in samplers]
    interleaved = [batch for step in zip(*read, strict=True) for batch in step]
    assert interleaved == samplers[0].plan(epoch)


def test_an_epoch_is_reproducible_and_unlike_the_next():
    lengths = list(range(1, 500))
    first, again = (TokenBudgetSampler(lengths, 600, seed=3) for _ in range(2))
    assert first.plan(1) == again.plan(1)
    assert first.plan(0) != first.plan(1)
    assert first.plan(0) != TokenBudgetSampler(lengths, 600, seed=4).plan(0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"budget": 10}, "sample 1 has 30 tokens"),
        ({"budget": TokenBudget(max_tokens=31, multiple_of=16)}, "multiple of 16"),
        ({"budget": 40, "num_shards": 2, "index": 2}, "index is 2"),
        ({"budget": 40, "num_shards": 2, "groups_of": 3}, "groups_of is 3"),
    ],
)
def test_impossible_budgets_are_refused(arguments, words):
    with pytest.raises(AccelError) as caught:
        TokenBudgetSampler([3, 30], **arguments)
    assert words in str(caught.value)


@pytest.fixture(scope="module")
def function_lengths():
    """Words of every function of some standard library packages: a real, skewed length distribution."""
    library = Path(sysconfig.get_paths()["stdlib"])
    lengths = []
    for package in ("asyncio", "email", "http", "json", "logging", "unittest", "xml", "concurrent", "importlib"):
        for path in sorted((library / package).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            lines = source.splitlines()
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    lengths.append(len(" ".join(lines[node.lineno - 1 : node.end_lineno]).split()))
    return [min(length, 1024) for length in lengths]


def test_budgets_and_padding_to_the_longest_save_most_of_the_padding(function_lengths):
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(function_lengths), generator=generator)
    fixed = [batch.tolist() for batch in order.split(32)]
    tokens = 32 * sum(function_lengths) // len(function_lengths) * 4
    budget = TokenBudgetSampler(function_lengths, max(tokens, 1024)).plan(0)
    shares = {
        "padded to one length": 1 - sum(function_lengths) / len(function_lengths) / max(function_lengths),
        "padded to the longest of 32": padding_share(function_lengths, fixed),
        "token budget": padding_share(function_lengths, budget),
    }
    print({name: round(share, 3) for name, share in shares.items()})
    assert shares["padded to one length"] > 0.9
    assert shares["padded to the longest of 32"] < 0.9
    assert shares["token budget"] < 0.1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"budget": 80}, "max_tokens=60.* and is 'max_tokens=80"),
        ({"groups_of": 4}, "groups_of=2.*groups_of=4"),
        ({"lengths": [*range(40, 0, -1)]}, "lengths="),
    ],
    ids=["budget", "groups", "lengths"],
)
def test_a_position_in_batches_of_another_budget_is_refused_inside_an_epoch(change, words):
    def loader(**changes):
        arguments = {"lengths": [*range(1, 41)], "budget": 60, "groups_of": 2} | changes
        batches = DataLoader(range(40), batch_sampler=TokenBudgetSampler(**arguments), collate_fn=list)
        return prepare_loader(batches, DataShard(), options=LoaderOptions(data_seed=0))

    run, same, other = loader(), loader(), loader(**change)
    passing = iter(run)
    next(passing)
    state = run.state_dict()
    with pytest.raises(DataStateError, match=words):
        other.load_state_dict(state)
    same.load_state_dict(state)
    assert list(same) == list(passing)
