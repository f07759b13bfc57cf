"""Layouts are read from text, and errors name what cannot be read."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_testing.equivalence.layouts import DEGREES, PRECISIONS, Layout, expand


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("single", Layout("single")),
        ("ddp:2", Layout("ddp", 2)),
        ("ddp:4/bf16/acc=3", Layout("ddp", 4, precision="bf16", accumulate=3)),
        ("ddp:2/acc=2/short", Layout("ddp", 2, accumulate=2, short=True)),
        ("fsdp:4/fp32/weighted/tp=2", Layout("fsdp", 4, precision="fp32", weighted=True, degrees=(("tp", 2),))),
        ("tp:2", Layout("fsdp", 2, degrees=(("tp", 2),))),
        ("cp:2/fp64/acc=2", Layout("fsdp", 2, precision="fp64", accumulate=2, degrees=(("cp", 2),))),
        ("sp:2/dp_shard:2", Layout("fsdp", 4, degrees=(("sp", 2), ("dp_shard", 2)))),
        ("tp:2/dp_shard=3", Layout("fsdp", 6, degrees=(("tp", 2), ("dp_shard", 3)))),
        ("pp:2/tp:2/acc=2", Layout("pipeline", 4, accumulate=2, degrees=(("pp", 2), ("tp", 2)))),
        ("tp:2/pp:2/dp_shard=2", Layout("pipeline", 8, degrees=(("tp", 2), ("pp", 2), ("dp_shard", 2)))),
        ("pp:4", Layout("pipeline", 4, degrees=(("pp", 4),))),
        (
            "hsdp:2x3/bf16/cpu_offload=true",
            Layout(
                "fsdp",
                6,
                precision="bf16",
                degrees=(("dp_replicate", 2), ("dp_shard", 3)),
                options=(("cpu_offload", "true"),),
            ),
        ),
    ],
)
def test_layouts_are_read(text: str, layout: Layout) -> None:
    assert Layout.parse(text) == layout


@given(
    st.builds(
        Layout,
        st.sampled_from(["ddp", "single", "fsdp2"]),
        st.integers(1, 99),
        precision=st.sampled_from(["", *PRECISIONS]),
        accumulate=st.integers(2, 9),
        weighted=st.booleans(),
        degrees=st.dictionaries(st.sampled_from(DEGREES), st.integers(1, 8)).map(lambda found: tuple(found.items())),
        options=st.dictionaries(st.sampled_from(["cpu_offload", "comm_hook"]), st.sampled_from(["true", "2"])).map(
            lambda found: tuple(found.items())
        ),
    )
)
def test_a_layout_is_what_it_prints(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (":2", "names no backend"),
        ("ddp:0", "'0' is not a number of at least 1"),
        ("tp:0", "'0' is not a number of at least 1"),
        ("tp:2/cp=x", "'x' is not a number of at least 1"),
        ("ddp:two", "'two' is not a number"),
        ("ddp:2/acc=", "'' is not a number"),
        ("ddp:2/bf61", "'bf61' means nothing here; did you mean 'bf16'?"),
        ("ddp:2/weigthed", "did you mean 'weighted'?"),
        ("ddp:2/bf16/fp32", "'fp32' means nothing here"),
        ("ddp:2/short", "a window of one micro-batch cannot be short"),
        ("ddp:2/acc=2/short/weighted", "use one of both"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Layout.parse(text)


def test_layouts_without_precision_come_in_each() -> None:
    assert [str(one) for one in expand("ddp:2,ddp:4/bf16,ddp:2/fp32")] == [
        "ddp:2/fp64",
        "ddp:2/fp32",
        "ddp:4/bf16",
    ]


def test_no_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="no layouts were given"):
        expand([])


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="no precision 'fp65'; there are: fp64, fp32"):
        expand(["ddp:2"], precisions=["fp65"])
