"""What tests of several files share."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from accel_testing import RankPool
from accel_testing.equivalence.layouts import Layout


@pytest.fixture(scope="session")
def device_pool() -> Iterator[Callable[[int], RankPool]]:
    """The process for so many XLA devices, as a pool: ``device_pool(4)``.

    Each number has one for all tests, as torch_xla takes long to start and decides only once what there is. It
    remembers what it has compiled, too: a test that counts compilations needs shapes of its own. Nothing else may be
    trained there first: a process that has computed gradients knows of no devices that come later.
    """
    with ExitStack() as stack:
        pools: dict[int, RankPool] = {}

        def pool(count: int) -> RankPool:
            if count not in pools:
                pools[count] = stack.enter_context(RankPool(1, timeout=300))
            return pools[count]

        yield pool


@pytest.fixture(scope="session")
def on_devices(device_pool: Callable[[int], RankPool]) -> Callable[..., Any]:
    """Calls a function in the process that has so many XLA devices: ``on_devices(4, fn, ...)``."""

    def call(count: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return device_pool(count).run(fn, *args, group=None, variables=Layout("xla", count).variables, **kwargs)[0]

    return call
