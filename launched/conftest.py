"""The installed wheels: these tests run on them, and not on the sources beside them."""

from pathlib import Path

import pytest

import accel

ROOT = Path(__file__).parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses to run on the sources of this checkout."""
    place = Path(accel.__file__)
    if place.is_relative_to(ROOT / "packages") and any(item.nodeid.startswith("launched/") for item in items):
        raise pytest.UsageError(f"accel is imported from {place}; run: hatch run test-launched")
