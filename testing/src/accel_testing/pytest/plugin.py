"""Pytest plugin: tests on ranks, tests that need a device, tests that must not leak.

Loaded in every pytest run of an environment with accel-testing, so it imports neither torch nor accel.
"""

import os
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

from accel_testing.ranks import hash_seeds

if TYPE_CHECKING:
    from accel_testing.pytest.items import RankRunner
    from accel_testing.ranks.pool import RankPool

_MARKERS = (
    "ranks(n, group=True, timeout=60, backend='gloo', env={}): run the test in n processes with a process group; the "
    "arguments rank and world_size say which one it is",
    "gpu: needs an accelerator (cuda, xpu, ...); skipped without one, see --require",
    "gpu_ranks: several ranks on one CUDA device, over NCCL or gloo; skipped without one, see --require",
    "multigpu(n=2): needs n accelerators; skipped without them, see --require",
    "tpu: needs a TPU and torch_xla; skipped without them, see --require",
    "fault: kills, stops or corrupts something on purpose; temporary files of processes that were killed are removed",
    "slow: takes long, or repeats heavily",
    "executed: start the programs of the test by exec under --programs=fork, too",
    "leaks(*checks): fails when the test leaves something behind; no arguments: every check",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--require`` and the ini options."""
    group = parser.getgroup("accel")
    group.addoption(
        "--require",
        action="append",
        default=[],
        metavar="KIND",
        choices=["gpu", "gpu_ranks", "multigpu", "tpu"],
        help="fail, instead of skipping, tests marked KIND when the machine has none (may be repeated)",
    )
    group.addoption(
        "--hash-seed",
        metavar="N",
        help="give all ranks and programs that tests start hash seeds derived from N ('random': drawn and shown), so "
        "that an order which depends on them can be repeated; Python draws them otherwise",
    )
    group.addoption(
        "--launcher",
        choices=["accel", "torchrun"],
        help="run the ranks of tests in processes that this launcher has started; they are forked otherwise",
    )
    parser.addini(
        "accel_leaks", "leak checks for every test: all, or names from accel_testing.faults.leaks", "args", []
    )
    # Free of cost if all of these end at once.
    parser.addini("accel_leaks_grace", "seconds that what a test started may still take to end", default="30")
    parser.addini("accel_preload", "modules that ranks import once, before they are forked", "args", [])
    parser.addini("accel_ranks_timeout", "seconds a test may take in its ranks", default="60")
    group.addoption(
        "--programs",
        choices=["exec", "fork"],
        help="how the scripts and launchers that tests run begin: by exec, or forked from a process that has imported "
        "torch and the modules of accel_preload, in a tenth of the time (default: the ini option accel_programs)",
    )
    parser.addini("accel_programs", "how the scripts that tests run begin: exec or fork", default="exec")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    config.stash[_RUNNER] = None
    if (value := config.option.hash_seed) is not None and not hasattr(config, "workerinput"):
        try:
            os.environ[hash_seeds.VARIABLE] = str(hash_seeds.choose(value))
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Forks the programs of all tests if that is asked for."""
    config = session.config
    if (config.option.programs or config.getini("accel_programs")) == "exec":
        return (yield)
    from accel_testing.programs.runs import forked_programs

    with forked_programs(config.getini("accel_preload")):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Starts the programs of a test marked ``executed``, and of its fixtures, by exec."""
    if item.get_closest_marker("executed") is None:
        return (yield)
    from accel_testing.programs.runs import started_programs

    with started_programs():
        return (yield)


def pytest_report_header() -> list[str]:
    """Report line with the hash seeds of this run, which repeats them."""
    run = os.environ.get(hash_seeds.VARIABLE)
    return [] if run is None else [f"hash seeds: derived from {run}; --hash-seed={run} repeats them"]


@pytest.fixture
def rank() -> int:
    """The rank of this process; 0 in a test that is not marked ``ranks``."""
    return 0


@pytest.fixture
def world_size() -> int:
    """The number of ranks; 1 in a test that is not marked ``ranks``."""
    return 1


@pytest.fixture(scope="session")
def rank_pool(request: pytest.FixtureRequest) -> "RankPool":
    """Pool of the tests marked ``ranks``, for tests that pass functions to it: ``rank_pool.run(fn, *args)``."""
    return _runner(request.config).pool


_RUNNER = pytest.StashKey["RankRunner | None"]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts importing torch for the ranks while earlier tests run."""
    if session.config.option.collectonly:
        return
    from accel_testing.faults import children as offspring
    from accel_testing.faults import leaks

    if any({"processes", "ports", "temporary"} & {*leaks.leak_checks(item)} for item in session.items):
        offspring.mark()
    if any(item.get_closest_marker("ranks") for item in session.items):
        _runner(session.config).prepare()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the ranks."""
    from accel_testing.faults import children as offspring

    offspring.unmark()
    if runner := config.stash.get(_RUNNER, None):
        runner.close()


def _runner(config: pytest.Config) -> "RankRunner":
    runner = config.stash[_RUNNER]
    if runner is None:
        from accel_testing.pytest.items import RankRunner

        runner = config.stash[_RUNNER] = RankRunner(config)
    return runner


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips, or fails under ``--require``, a test whose device is missing."""
    if item.get_closest_marker("ranks") and type(item) is not pytest.Function:
        pytest.fail(f"@pytest.mark.ranks works on test functions and plain classes, not on a {type(item).__name__}")
    for kind in ("gpu", "gpu_ranks", "multigpu", "tpu"):
        if marker := item.get_closest_marker(kind):
            from accel_testing.pytest.hardware import what_is_missing

            if missing := what_is_missing(kind, *marker.args, **marker.kwargs):
                if kind in item.config.option.require:
                    pytest.fail(f"--require={kind}: {missing}", pytrace=False)
                pytest.skip(missing)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test marked ``ranks`` on its ranks."""
    if not pyfuncitem.get_closest_marker("ranks"):
        return None
    __tracebackhide__ = True
    _runner(pyfuncitem.config).run(pyfuncitem)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: "pytest.CallInfo[None]"
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports a rank's failure as if it had happened here, with the output of the ranks."""
    report = yield
    if call.excinfo is not None and item.get_closest_marker("ranks"):
        from accel_testing.pytest.reporting import show_ranks

        show_ranks(report, call.excinfo.value)
    return report


@pytest.fixture(autouse=True, scope="session")
def _accel_lasting_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks, after the last test, for leaks of fixtures that serve many tests, if every test is checked."""
    from accel_testing.faults import leaks

    wanted = leaks.parse_checks(request.config.getini("accel_leaks"))
    yield from _watched(request, [name for name in wanted if name in leaks.LASTING], "fixtures")


@pytest.fixture(autouse=True)
def _accel_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks for leaks of the test and its fixtures, if leak checks are on."""
    from accel_testing.faults import children as offspring
    from accel_testing.faults import leaks

    checks, before = leaks.leak_checks(request.node), offspring.files()
    try:
        yield from _watched(request, checks, request.node.name)
    finally:
        if request.node.get_closest_marker("fault"):
            offspring.sweep(before)


def _watched(request: pytest.FixtureRequest, checks: Sequence[str], who: str) -> Iterator[None]:
    from accel_testing.faults import leaks

    if not checks:
        yield
        return
    before = leaks.snapshot(checks)
    yield
    grace = float(request.config.getini("accel_leaks_grace"))
    if found := leaks.settled_differences(before, grace=grace):
        pytest.fail("\n  ".join([f"{who} left behind:", *found]), pytrace=False)
