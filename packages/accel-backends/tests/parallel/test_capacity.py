"""The capacity of experts keeps the choices that come first, and counts the others."""

import math
from fractions import Fraction

import pytest
import torch

from accel_backends.parallel.capacity import Capacity


def kept_one_by_one(index: torch.Tensor, experts: int, factor: float) -> list[list[bool]]:
    """The rule as a loop: first choices of all tokens, then second ones, each as long as its expert has room."""
    tokens, choices = index.shape
    room = [math.ceil(Fraction(str(factor)) * tokens * choices / experts)] * experts
    kept = [[False] * choices for _ in range(tokens)]
    for choice in range(choices):
        for token in range(tokens):
            expert = int(index[token, choice])
            if room[expert]:
                room[expert] -= 1
                kept[token][choice] = True
    return kept


@pytest.mark.parametrize("factor", [0.3, 0.75, 1, 1.25, 4])
@pytest.mark.parametrize(("tokens", "choices", "experts"), [(13, 2, 4), (8, 1, 8), (5, 3, 3), (1, 2, 4)])
def test_first_choices_and_earlier_tokens_are_kept(factor: float, tokens: int, choices: int, experts: int) -> None:
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens)) ** 4
    index = (scores * torch.arange(experts, 0, -1)).topk(choices, dim=-1).indices  # the first experts are preferred
    capacity = Capacity(factor)
    expected = kept_one_by_one(index, experts, factor)
    assert capacity.kept(index, experts).tolist() == expected
    dropped = sum(not one for row in expected for one in row)
    assert dropped or factor >= 1 or tokens == 1
    counts = capacity.take_counts()
    assert counts is not None
    assert counts.tolist() == [dropped, tokens * choices]
    assert capacity.take_counts() is None


def test_counts_of_several_forwards_add_up() -> None:
    capacity = Capacity(0.5)
    index = torch.zeros(4, 1, dtype=torch.int64)
    for _ in range(2):
        assert capacity.kept(index, 2).flatten().tolist() == [True, False, False, False]
    counts = capacity.take_counts()
    assert counts is not None
    assert counts.tolist() == [6, 8]


def test_the_bound_is_that_of_the_number_as_it_is_written() -> None:
    """1.1 * 100 / 2 is above 55 in floating point, where an expert would compute 56."""
    assert Capacity(1.1).kept(torch.zeros(100, 1, dtype=torch.int64), 2).sum() == 55


def test_no_tokens_have_no_choices() -> None:
    capacity = Capacity(1.0)
    assert capacity.kept(torch.zeros(0, 2, dtype=torch.int64), 4).shape == (0, 2)
