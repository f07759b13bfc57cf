"""Batches whose sequences are shared by ranks: what each rank gets, and what its mean loss weighs."""

from collections import UserDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from accel_data import prepare_loader, split_sequences
from accel_state.errors import DataError
from accel_state.parallelism.config import DataShard


def parts(batch: Any, count: int) -> tuple[list[Any], list[float]]:
    found = [split_sequences(batch, index, count) for index in range(count)]
    return [one for one, _ in found], [weight for _, weight in found]


def joined(pieces: list[Any], name: str) -> list[list[int]]:
    return torch.cat([piece[name] for piece in pieces], 1).tolist()


def test_labels_are_those_of_the_next_token_even_across_parts() -> None:
    ids = torch.arange(10, 18)[None]
    pieces, weights = parts({"input_ids": ids, "labels": ids, "name": "a", "kind": torch.tensor([3])}, 2)
    assert joined(pieces, "input_ids") == ids.tolist()
    assert joined(pieces, "shift_labels") == [[11, 12, 13, 14, 15, 16, 17, -100]]
    assert joined(pieces, "position_ids") == [list(range(8))]
    assert weights == [8 / 7, 6 / 7]
    assert all(piece["name"] == "a" and piece["kind"].tolist() == [3] for piece in pieces)
    assert all("labels" not in piece for piece in pieces)


def test_what_the_batch_says_itself_is_kept() -> None:
    given_: dict[str, torch.Tensor] = {
        "input_ids": torch.zeros(2, 4, dtype=torch.long),
        "position_ids": torch.tensor([[5, 6, 7, 8]] * 2),
        "shift_labels": torch.tensor([[1, 2, 3, 4]] * 2),
    }
    pieces, weights = parts(UserDict(given_), 2)
    assert isinstance(pieces[0], UserDict)
    assert joined(pieces, "position_ids") == given_["position_ids"].tolist()
    assert joined(pieces, "shift_labels") == given_["shift_labels"].tolist()
    assert weights == [1.0, 1.0]


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4), st.sampled_from([1, 2, 3, 6]))
def test_weights_make_the_mean_of_means_that_of_all_tokens(counted: list[list[bool]], count: int) -> None:
    labels = torch.where(torch.tensor(counted), 1, -100)
    values = torch.arange(labels.numel()).view(labels.shape).double()
    pieces, weights = parts({"shift_labels": labels, "values": values}, count)
    kept = [piece["values"][piece["shift_labels"] != -100] for piece in pieces]
    means = [weight * one.mean() for weight, one in zip(weights, kept, strict=True) if len(one)]
    if means:
        assert torch.isclose(sum(means, torch.zeros(())) / count, values[labels != -100].mean())
    assert len(means) > 0 or weights == [1.0] * count


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.zeros(2, 4),), "a batch is a tuple; expected a mapping with one of input_ids"),
        ({"x": torch.zeros(2, 4)}, "mapping with 'x'; expected"),
        ({"input_ids": torch.zeros(2, 5)}, "pad them to 6"),
        ({"input_ids": torch.zeros(2, 4), "attention_mask": torch.tensor([[0, 1, 1, 1]] * 2)}, "pad on the right"),
    ],
)
def test_batches_that_cannot_be_shared_are_refused(batch: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        split_sequences(batch, 0, 2)


def test_sequences_of_another_length_than_was_said_are_refused() -> None:
    with pytest.raises(DataError, match="4 tokens, and sp_seq_length says that all have 8"):
        split_sequences({"input_ids": torch.zeros(2, 4)}, 0, 2, expected=8)


def test_padding_on_the_right_is_no_obstacle() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    pieces, _ = parts({"input_ids": torch.zeros(2, 4), "attention_mask": mask}, 2)
    assert joined(pieces, "attention_mask") == mask.tolist()


def test_a_loader_tells_the_weight_of_the_batch_that_it_gave_last() -> None:
    """It reads a batch ahead, whose weight is another."""
    labels = [torch.tensor([1, -100, -100, -100]), torch.tensor([1, 1, 1, 1])]
    data: Any = [{"input_ids": torch.arange(4), "shift_labels": one} for one in labels]
    loader = prepare_loader(
        DataLoader(data, batch_size=1), DataShard(0, 1), part=lambda batch: split_sequences(batch, 0, 2)
    )
    assert loader.weight == 1.0
    assert [(batch["input_ids"].tolist(), loader.weight) for batch in loader] == [([[0, 1]], 2.0), ([[0, 1]], 1.0)]
