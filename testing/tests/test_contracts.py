"""Every contract on every backend: trained as in one process, or refused by name.

The default suite runs a sample, one or two layouts for each case; the others are ``slow``.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from zlib import crc32

import pytest

from accel_testing.contracts import CASES, LAYOUTS, Case, check_case
from accel_testing.equivalence.layouts import Layout
from accel_testing.ranks.pool import RankPool


def layouts_of(case: Case) -> list[str]:
    """Those that the case is for, in an order of its own."""
    wanted = [layout for layout in LAYOUTS if case.concerns(Layout.parse(layout).backend)]
    return sorted(wanted, key=lambda layout: crc32(f"{case.name} {layout}".encode()))


def sampled(case: Case) -> list[str]:
    """The layouts of the default suite: one for each case, for a tenth of the cases two."""
    return layouts_of(case)[: 2 if crc32(case.name.encode()) % 10 == 0 else 1]


def cells() -> Iterator[Any]:
    for case in CASES:
        sample = sampled(case)
        for layout in LAYOUTS:
            if layout not in layouts_of(case):
                continue
            marks = [] if layout in sample else [pytest.mark.slow]
            if layout.startswith("ds"):
                marks.append(pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"))
            yield pytest.param(case, layout, id=f"{case.name}-{layout.partition('/')[0]}", marks=marks)


@pytest.mark.sampled(30)
@pytest.mark.fault
@pytest.mark.parametrize(("case", "layout"), list(cells()))
def test_a_contract_is_kept(rank_pool: RankPool, case: Case, layout: str) -> None:
    outcome = check_case(case, layout, rank_pool)
    assert outcome.ok, str(outcome)


def test_the_sample_is_of_all_cases_and_all_layouts() -> None:
    sample = {(case.name, layout) for case in CASES for layout in sampled(case)}
    assert {name for name, _ in sample} == {case.name for case in CASES}
    assert {layout for _, layout in sample} == set(LAYOUTS)
    cells = sum(len(layouts_of(case)) for case in CASES)
    assert cells / 8 < len(sample) < cells / 4


def test_the_names_of_cases_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
