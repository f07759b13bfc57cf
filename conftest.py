"""Order and selection of tests: the longest first; samples of heavy repetitions, slow tests and tests in ranks."""

import gc
import os
import sys
from collections.abc import Iterator
from datetime import date
from itertools import groupby
from zlib import crc32

import pytest

# They run first: one that began last would keep a worker of xdist busy after all others have ended.
LONGEST = (
    "packages/accel/tests/resilience/test_preemption.py",
    "packages/accel-launch/tests/launch/test_elastic.py",
    "packages/accel-launch/tests/launch/test_clusters.py",
    "packages/accel-launch/tests/launch/test_culprit.py",
    "packages/accel-backends/tests/ops/test_inductor.py",
    "packages/accel-data/tests/test_resume.py",
    "packages/accel-planner/tests/test_measurement.py",
    "benchmarks/",
    "ci/tests/test_release.py",
    "docs/tests/test_pages.py",
    "examples/tests/test_demo.py",
)


# torch's TCPStore asks for the name of each peer that connects, as an IPv6 address that /etc/hosts hardly ever has, and
# serves nobody meanwhile: a name server that loses a query costs 5 s. No test needs one, so none is asked.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
# Idle threads of OpenMP spin before they sleep, on the cores that other processes of the tests need: a quarter of the
# processor time of tests that compute in this process.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that select tests."""
    group = parser.getgroup("selection")
    group.addoption(
        "--slow-tenth",
        metavar="N",
        help="of the tests marked slow, run tenth N (0 to 9, or 'today': another one each day) and no other test",
    )
    group.addoption(
        "--sample",
        type=int,
        metavar="N",
        help="run N tests of each package that run in ranks and are not slow, and no other test",
    )
    group.addoption("--sample-seed", type=int, default=0, metavar="N", help="draw the sample by this number (0)")


def pytest_configure(config: pytest.Config) -> None:
    """Decides once, for the workers of xdist as well, which tenth is run: they may start on the next day."""
    config.addinivalue_line("markers", "sampled(n): of the parameters of the test, all but n, drawn by name, are slow")
    config.option.slow_tenth = chosen_tenth(config.option.slow_tenth, date.today())


def pytest_report_header(config: pytest.Config) -> list[str]:
    """The tenth that is run."""
    tenth = config.option.slow_tenth
    return [] if tenth is None else [f"slow tests: tenth {tenth}; --slow-tenth={tenth} repeats it"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keeps modules whose asserts pytest rewrites, half of a collection's time, for later runs and for ranks."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = before


def pytest_collection_finish() -> None:
    """Excludes what collection made, a million objects, from the garbage collections of the tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects what the options ask for, and moves the files above to the front.

    All others stay in their order, so that fixtures are shared as before. First of all hooks, because pytest's own
    deselects by the marker ``slow``.
    """
    mark_repetitions(items)
    if (tenth := config.option.slow_tenth) is not None:
        wanted = [item for item in items if item.get_closest_marker("slow") and draw(item) % 10 == int(tenth)]
        keep(config, items, wanted)
    if (size := config.option.sample) is not None:
        keep(config, items, sampled(items, size, config.option.sample_seed))
    items.sort(
        key=lambda item: next(
            (place for place, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST)
        )
    )


def mark_repetitions(items: list[pytest.Item]) -> None:
    """Marks as slow the repetitions of tests marked ``sampled(n)``, but for n of each function's that are drawn."""
    repeated = [item for item in items if item.get_closest_marker("sampled") and not item.get_closest_marker("slow")]
    functions: dict[str, list[pytest.Item]] = {}
    for item in repeated:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for function in functions.values():
        (size,) = function[0].get_closest_marker("sampled").args
        for item in sorted(function, key=draw)[size:]:
            item.add_marker(pytest.mark.slow)


def chosen_tenth(value: str | None, day: date) -> str | None:
    """The tenth of the slow tests that an option's value stands for on a day."""
    if value == "today":
        return str(day.toordinal() % 10)
    if value is not None and value not in set("0123456789"):
        raise pytest.UsageError(f"--slow-tenth={value}: a number from 0 to 9 or 'today' is needed")
    return value


def sampled(items: list[pytest.Item], size: int, seed: int) -> list[pytest.Item]:
    """Up to ``size`` tests of each package that run in ranks with a group, none slow, no two of one test function.

    Both the functions and the parameters that they run with are drawn.
    """
    chosen: list[pytest.Item] = []
    quick = [item for item in items if not item.get_closest_marker("slow")]
    of_ranks = [item for item in quick if (mark := item.get_closest_marker("ranks")) and mark.kwargs.get("group", True)]
    for _, of_package in groupby(of_ranks, key=package_of):
        functions: dict[str, pytest.Item] = {}
        for item in sorted(of_package, key=lambda item: draw(item, seed)):
            functions.setdefault(item.nodeid.partition("[")[0], item)
        chosen += list(functions.values())[:size]
    return chosen


def package_of(item: pytest.Item) -> str:
    """The folder of the package that a test belongs to."""
    return item.nodeid.partition("/tests/")[0]


def draw(item: pytest.Item, seed: int = 0) -> int:
    """A number that depends on the name of the test and on ``seed`` only."""
    return crc32(f"{seed} {item.nodeid}".encode())


def keep(config: pytest.Config, items: list[pytest.Item], wanted: list[pytest.Item]) -> None:
    """Deselects all but the tests in ``wanted``."""
    names = {item.nodeid for item in wanted}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
    items[:] = [item for item in items if item.nodeid in names]
