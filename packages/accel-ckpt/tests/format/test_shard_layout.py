from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_ckpt.format.shard_layout import (
    Box,
    Split,
    boxes,
    choose_writers,
    chunk,
    is_run,
    layout_left_to_right,
    layout_of,
    local_shape,
    overlap,
    run_start,
    whole,
)

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


@st.composite
def box_in_box(draw: st.DrawFn) -> tuple[Box, Box]:
    outer = draw(shapes)
    offset = tuple(draw(st.integers(0, size - 1)) for size in outer)
    shape = tuple(draw(st.integers(1, size - begin)) for size, begin in zip(outer, offset, strict=True))
    return Box(offset, shape), Box((0,) * len(outer), outer)


@given(box_in_box())
def test_a_run_is_what_torch_calls_contiguous(pair: tuple[Box, Box]) -> None:
    inner, outer = pair
    values = torch.arange(prod(outer.shape)).reshape(outer.shape)
    cut = values[inner.within(outer)]
    flat = cut.reshape(-1).tolist()
    assert is_run(inner, outer) == (flat == list(range(flat[0], flat[0] + len(flat))))
    assert run_start(inner, outer) == flat[0]


@given(st.integers(0, 40), st.integers(1, 6))
def test_chunks_are_those_of_torch(size: int, count: int) -> None:
    expected = [piece.tolist() for piece in torch.arange(size).chunk(count)] if size else []
    expected += [[]] * (count - len(expected))
    found = [
        [i for start, stop in chunk(((0, size),), count, index) for i in range(start, stop)] for index in range(count)
    ]
    assert found == expected


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 4))
def test_two_axes_on_one_dimension_cover_each_element_once(size: int, first: int, second: int) -> None:
    for after in (1, second):
        for rule in (layout_of, layout_left_to_right):
            found = []
            for one in range(first):
                for two in range(second):
                    layout = rule((size,), [Split(0, first, one, after), Split(0, second, two)])
                    found += [i for start, stop in layout[0] for i in range(start, stop)]
            assert sorted(found) == list(range(size))


def test_a_strided_split_is_done_after_those_to_its_right() -> None:
    # 7 rows: tensor parallelism has 4 and 3, then each is cut in three; by mesh order it would be other rows.
    splits = [Split(0, 3, 2, after=2), Split(0, 2, 1)]
    assert layout_of((7,), splits) == (((6, 7),),)


def test_boxes_of_a_layout_in_pieces_lie_behind_each_other() -> None:
    layout = (((0, 2), (4, 5)), ((1, 3),))
    assert local_shape(layout) == (3, 2)
    assert boxes(layout) == [
        (Box((0, 1), (2, 2)), Box((0, 0), (2, 2))),
        (Box((4, 1), (1, 2)), Box((2, 0), (1, 2))),
    ]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 0, 2)], ids=str)
def test_an_empty_part_has_no_boxes(shape: tuple[int, ...]) -> None:
    assert boxes(whole(shape)) == []


def test_a_number_is_a_box_without_dimensions() -> None:
    assert boxes(whole(())) == [(Box((), ()), Box((), ()))]


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 1000), min_size=1), st.integers(1, 5))
def test_no_writer_has_more_than_its_share_and_one_tensor(sizes: dict[str, int], count: int) -> None:
    ranks = tuple(range(count))
    writers = choose_writers({key: (size, ranks) for key, size in sizes.items()})
    loads = [sum(size for key, size in sizes.items() if writers[key] == rank) for rank in ranks]
    assert max(loads) - min(loads) <= max(sizes.values())


def test_ranks_with_the_same_tensors_agree_without_those_of_others() -> None:
    common = {"a": (5, (0, 1)), "b": (7, (0, 1))}
    assert choose_writers(common).items() <= choose_writers({**common, "c": (9, (1, 2))}).items()


squares = st.builds(
    Box, st.tuples(st.integers(0, 4), st.integers(0, 4)), st.tuples(st.integers(1, 3), st.integers(1, 3))
)


@given(st.lists(squares, max_size=6))
def test_overlaps_are_those_of_any_two(every: list[Box]) -> None:
    pairs = [(a, b) for i, a in enumerate(every) for b in every[:i]]
    assert overlap(every) == any(a.intersect(b) is not None for a, b in pairs)
