"""In which order tests run: those that take longest first, so that in the end no worker of xdist is left with one."""

import pytest

LONGEST = (
    "packages/accel/tests/test_preemption.py",
    "packages/accel/tests/test_launch_elastic.py",
    "packages/accel/tests/test_launch_clusters.py",
    "packages/accel/tests/test_planner_measured.py",
    "benchmarks/",
    "examples/tests/test_demo.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the files above to the front; all others stay in their order, so that fixtures are shared as before."""
    items.sort(
        key=lambda item: next(
            (place for place, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST)
        )
    )
