"""Pytest test functions as work for ranks, and the ranks' answers as the test's outcome."""

import inspect
from typing import Any, final

import pytest

from accel_launch.notebook.pickle_by_value import dumps
from accel_testing.errors import RankError
from accel_testing.faults.leaks import leak_checks
from accel_testing.pytest.reporting import attach
from accel_testing.ranks.pool import RankPool, first_failure, name_ranks, rebuilt
from accel_testing.ranks.wire import Answer, ModuleSource, TestCall

#: Arguments that each rank makes itself, because their values belong to one process.
MADE_IN_RANK = ("rank", "world_size", "monkeypatch")


@final
class RankRunner:
    """Runs tests on the pool of one pytest process (one xdist worker)."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._pool = RankPool(preload=config.getini("accel_preload"), launcher=config.option.launcher)

    @property
    def pool(self) -> RankPool:
        """The pool itself."""
        return self._pool

    def prepare(self) -> None:
        """Starts the slow parts of the pool in the background."""
        self._pool.prepare()

    def close(self) -> None:
        """Ends the ranks."""
        self._pool.close()

    def run(self, item: pytest.Function) -> None:
        """Runs the test on its ranks; raises their errors, skips and xfails."""
        __tracebackhide__ = True
        marker = item.get_closest_marker("ranks")
        assert marker is not None
        if inspect.iscoroutinefunction(item.function):
            raise pytest.UsageError("@pytest.mark.ranks runs plain functions; await inside with asyncio.run(...)")
        if _draws_at_random(item.function):
            raise pytest.UsageError(
                "every rank would draw other examples; add @settings(derandomize=True, database=None, deadline=None)"
            )
        options = read_marker(*marker.args, **marker.kwargs)
        timeout = options["timeout"] or float(self._config.getini("accel_ranks_timeout"))
        try:
            answers = self._pool.submit(
                self._call(item),
                ModuleSource(item.module.__name__, item.module.__file__),
                ranks=options["n"],
                backend=options["backend"] if options["group"] else None,
                timeout=timeout,
                checks=leak_checks(item),
                variables=options["env"],
            )
        except (RankError, AssertionError) as error:
            raise attach(error, self._outputs(options["n"])) from None
        outputs = self._outputs(options["n"])
        if self._config.option.capture == "no":
            print("".join(f"[rank {rank}] {line}\n" for rank, text in outputs for line in text.splitlines()), end="")
        _conclude(answers, outputs)

    def _outputs(self, size: int) -> list[tuple[int, str]]:
        return [(rank, text) for rank in range(size) if (text := self._pool.output(rank))]

    def _call(self, item: pytest.Function) -> TestCall:
        names = item._fixtureinfo.argnames
        arguments = {name: item.funcargs[name] for name in names if name not in MADE_IN_RANK}
        owner = f"{item.cls.__qualname__}." if item.cls else ""
        return TestCall(
            qualname=f"{owner}{item.originalname}",
            payload=_pack_arguments(arguments),
            made_in_rank=tuple(name for name in names if name in MADE_IN_RANK),
            style=self._config.option.tbstyle,
            show_locals=self._config.option.showlocals,
            warning_filters=(
                *self._config.getini("filterwarnings"),
                *(text for mark in item.iter_markers("filterwarnings") for text in mark.args),
            ),
        )


def read_marker(
    n: int = 2,
    *,
    group: bool = True,
    timeout: float | None = None,
    backend: str = "gloo",
    env: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Checked arguments of ``@pytest.mark.ranks``."""
    if not isinstance(n, int) or n < 1:
        raise pytest.UsageError(f"@pytest.mark.ranks({n!r}): the number of ranks is a whole number of at least 1")
    return {"n": n, "group": group, "timeout": timeout, "backend": backend, "env": env or {}}


def _draws_at_random(function: Any) -> bool:
    """Whether this is a hypothesis test whose examples differ between processes."""
    if not getattr(function, "is_hypothesis_test", False):
        return False
    settings = getattr(function, "_hypothesis_internal_use_settings", None)
    return not (settings and settings.derandomize and settings.database is None)


def _pack_arguments(arguments: dict[str, Any]) -> bytes:
    try:
        return dumps(arguments)
    except Exception as error:
        for name, value in arguments.items():
            try:
                dumps(value)
            except Exception:
                text = (
                    f"argument {name!r} is a {type(value).__name__}, which cannot be sent to another process; "
                    f"make it inside the test (in every rank there are only: {', '.join(MADE_IN_RANK)})"
                )
                raise pytest.UsageError(text) from error
        raise


def _conclude(answers: list[Answer], outputs: list[tuple[int, str]]) -> None:
    """Combines the answers of all ranks into the outcome of the test."""
    __tracebackhide__ = True
    xfailed = [answer for answer in answers if answer.outcome == "xfailed"]
    failed = first_failure(answers)
    if failed is None:
        return
    answer, rank = failed
    # A rank that ends first makes the others fail in their next collective, so the earliest answer counts.
    if xfailed and min(xfailed, key=lambda one: one.at).at <= answer.at:
        pytest.xfail(xfailed[0].reason)
    if answer.outcome == "failed":
        others = [one for one in enumerate(answers) if one[1].outcome == "failed" and one[0] != rank]
        raise attach(rebuilt(answer, rank), outputs, first=(rank, answer), others=others)
    ranks = [one for one, other in enumerate(answers) if other.outcome == "skipped"]
    if len(ranks) < len(answers):
        raise RankError(f"{name_ranks(ranks)} skipped ({answer.reason}), the others passed; all must skip, or none")
    pytest.skip(answer.reason)
