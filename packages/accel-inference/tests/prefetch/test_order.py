"""Predictions of the next blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_inference.prefetch.order import BlockOrder, next_uses


def after(visits, *, blocks=0):
    order = BlockOrder()
    for block in range(blocks):
        order.expect(block)
    hits = [order.visit(block) for block in visits]
    return order, hits


def test_the_first_forward_is_predicted_by_the_order_of_the_modules():
    order, hits = after([0, 1, 2], blocks=4)
    assert hits == [False, True, True]
    assert list(order.upcoming())[:1] == [3]


def test_a_second_forward_repeats_the_first():
    order, hits = after([0, 2, 1, 0, 2, 1], blocks=3)
    assert hits[4:] == [True, True]
    assert list(order.upcoming()) == [0, 2, 1]


def test_nothing_is_predicted_after_a_block_that_was_never_seen():
    order, _ = after([7])
    assert list(order.upcoming()) == []


def test_a_decoder_repeats_its_own_step_and_not_the_encoder():
    encoder, step = [0, 1, 2], [3, 4, 5]
    order, hits = after([*encoder, *step, *step, *step], blocks=6)
    assert hits[-2:] == [True, True]
    assert list(order.upcoming())[:3] == step


def test_a_block_that_computes_three_times_is_told_apart_by_those_before():
    forward = [0, 1, 1, 1, 2]
    _, hits = after(forward * 4)
    assert hits[-5:] == [True] * 5


def test_old_history_is_forgotten(monkeypatch):
    monkeypatch.setattr("accel_inference.prefetch.order._KEPT", 16)
    order, hits = after([0, 1, 2, 3] * 50)
    assert len(order._history) <= 32
    assert all(hits[8:])


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30, unique=True), st.integers(2, 4))
def test_any_order_without_repetition_is_learned_in_one_forward(forward, times):
    order, hits = after(forward * times)
    assert all(hits[len(forward) + 1 :])
    assert list(order.upcoming()) == forward


@pytest.mark.parametrize(("upcoming", "uses"), [([], {}), ([3, 1, 3, 2], {3: 0, 1: 1, 2: 3})])
def test_the_next_use_is_the_nearest(upcoming, uses):
    assert next_uses(upcoming) == uses
