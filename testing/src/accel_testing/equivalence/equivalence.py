"""Equivalence of layouts: a program trains under each layout as in one process, or its divergence is reported."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from accel_launch.notebook.pickle_by_value import dumps, loads
from accel_state.errors import did_you_mean
from accel_testing.equivalence.divergence import Departure, compare_runs, distance_of
from accel_testing.equivalence.layouts import Layout, expand
from accel_testing.equivalence.program import Program
from accel_testing.equivalence.training import Maker, TrainedStep, train_layout, train_reference
from accel_testing.errors import RankError
from accel_testing.private import DYNAMO
from accel_testing.ranks.pool import RankPool, first_failure
from accel_testing.ranks.wire import Call, ModuleSource, source_of

#: Largest distance of a tensor from the reference's, relative to its largest element, by precision.
TOLERANCES: Mapping[str, float] = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 3e-2, "fp16": 5e-3, "fp8": 1e-1}


@final
@dataclass(frozen=True, slots=True)
class Result:
    """Result of one layout: ``distance`` is the largest relative distance of any tensor after the last step.

    ``departure`` is None if it stayed within ``tolerance``; ``error`` is the reason why it could not run.
    """

    layout: Layout
    tolerance: float
    distance: float = 0.0
    departure: Departure | None = None
    error: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the layout ran and did not diverge."""
        return self.departure is None and not self.error

    def __str__(self) -> str:
        return f"{self.layout} could not run: {self.error}" if self.error else f"{self.layout} {self.departure}"


@final
@dataclass(frozen=True, slots=True)
class Report:
    """Results of all layouts."""

    steps: int
    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """Whether no layout diverged or failed."""
        return all(result.ok for result in self.results)

    def __str__(self) -> str:
        """A table of all layouts, then the failures."""
        width = max(len(str(result.layout)) for result in self.results)
        lines = [f"{self.steps} steps, compared with one process", f"{'layout':<{width}}  distance   allowed"]
        for result in self.results:
            distance = "-" if result.error else f"{result.distance:.1e}"
            verdict = "ok" if result.ok else ("could not run" if result.error else "DIFFERENT")
            lines.append(f"{result.layout!s:<{width}}  {distance:>8}  {result.tolerance:>8.0e}  {verdict}")
        return "\n".join([*lines, *(f"\n{result}" for result in self.results if not result.ok)])


def assert_equivalent(
    program: Maker,
    layouts: str | Iterable[str | Layout],
    *,
    precisions: Iterable[str] = ("fp64", "fp32"),
    tolerances: Mapping[str, float] | None = None,
    pool: RankPool | None = None,
    perturb: bool = True,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Report:
    """Fails unless ``program`` trains under every layout as in one process; the message is the report.

    Args:
        program: makes the ``Program``, anew on every rank and for every layout.
        layouts: as in ``["ddp:2", "ddp:4/acc=3"]``, see ``Layout``.
        precisions: those of layouts that name none.
        tolerances: by precision, instead of ``TOLERANCES``.
        pool: ranks to use (the ``rank_pool`` fixture); None starts some for this call.
        perturb: start ranks other than 0 from other weights, which ``prepare`` must replace.
        around: makes a context manager around the training on the layouts' ranks, not around the reference.
    """
    __tracebackhide__ = True
    wanted = expand(layouts, precisions)
    report = _check(
        program, source_of(program), wanted, tolerances=tolerances, pool=pool, perturb=perturb, around=around
    )
    if not report.ok:
        raise AssertionError(str(report))
    return report


def run_check(
    target: str,
    layouts: str | Iterable[str | Layout] = ("ddp:2",),
    *,
    precisions: Iterable[str] = ("fp64", "fp32"),
    tolerances: Mapping[str, float] | None = None,
    pool: RankPool | None = None,
    cpu: bool = True,
) -> Report:
    """Checks ``script.py:function``, where the function returns a ``Program``; implements ``accel check``.

    The script is imported (not as ``__main__``) in rank processes, never in this one. With ``cpu=False`` layouts use
    this machine's accelerators; the reference stays on the CPU.

    Raises:
        ValueError: the target or a layout is invalid, or no backend has a layout's name.
        RankError: the reference itself cannot be trained.
    """
    path, _, name = target.rpartition(":")
    file = Path(path).resolve()
    if not path or not name.isidentifier():
        raise ValueError(f"{target!r} is not a target; expected SCRIPT.py:FUNCTION, as in train.py:program")
    if not file.is_file():
        raise ValueError(f"{target!r}: there is no file {path}")
    program, wanted = ScriptProgram(str(file), name), expand(layouts, precisions)
    _refuse_unknown(wanted)
    return _check(program, None, wanted, tolerances=tolerances, pool=pool, cpu=cpu)


def _refuse_unknown(layouts: Iterable[Layout]) -> None:
    """Refuses a backend that no package provides, before any rank starts."""
    from difflib import get_close_matches

    from accel_backends import installed_backends

    known = [*installed_backends(), "auto"]
    for layout in layouts:
        if layout.backend not in known:
            near = get_close_matches(layout.backend, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"layout '{layout}': no backend {layout.backend!r}; {hint}there are: {', '.join(known)}")


@final
@dataclass(frozen=True, slots=True)
class ScriptProgram:
    """The program that a script's function makes, imported in the process that calls it."""

    file: str
    function: str

    def __call__(self) -> Program:
        from accel_testing.ranks.rewriting import import_source

        sys.path.insert(0, str(Path(self.file).parent))
        module = import_source(ModuleSource(Path(self.file).stem, self.file))
        make = getattr(module, self.function, None)
        if not callable(make):
            hint = did_you_mean(self.function, [name for name, value in vars(module).items() if callable(value)])
            raise ValueError(f"{self.file} has no function {self.function!r}{hint}")
        program: Program = make()
        return program


def _check(
    program: Maker,
    source: ModuleSource | None,
    layouts: Sequence[Layout],
    *,
    tolerances: Mapping[str, float] | None = None,
    pool: RankPool | None = None,
    cpu: bool = True,
    perturb: bool = True,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Report:
    """Trains the needed references once each, and every layout; compares them."""
    if pool is None:
        with RankPool(preload=[DYNAMO]) as own:  # imported by every optimizer
            return _check(
                program, source, layouts, tolerances=tolerances, pool=own, cpu=cpu, perturb=perturb, around=around
            )
    limits = {**TOLERANCES, **(tolerances or {})}
    references: dict[tuple[str, int | None], list[TrainedStep]] = {}
    results = []
    with ExitStack() as stack:
        ranks = _Ranks(pool, source, stack)
        for layout in layouts:
            dtype = "fp64" if layout.precision == "fp64" else "fp32"
            key = (dtype, layout.accumulate if layout.short else None)
            if key not in references:
                references[key] = ranks.reference(program, dtype, short_of=key[1])
            began = time.monotonic()
            try:
                runs = ranks.layout(program, layout, cpu=cpu, perturb=perturb, around=around)
            except RankError as error:
                results.append(Result(layout, limits[layout.precision], error=str(error)))
                continue
            departure = compare_runs(references[key], runs, tolerance=limits[layout.precision])
            distance = distance_of(references[key], runs[0])
            seconds = time.monotonic() - began
            results.append(Result(layout, limits[layout.precision], distance, departure, seconds=seconds))
    return Report(len(next(iter(references.values()))), tuple(results))


@final
class _Ranks:
    """Trains on ranks of a pool."""

    def __init__(self, pool: RankPool, source: ModuleSource | None, stack: ExitStack) -> None:
        self._pool = pool
        self._source = source
        self._stack = stack
        self._bound: dict[str, RankPool] = {}

    def reference(self, program: Maker, precision: str, *, short_of: int | None) -> list[TrainedStep]:
        options = {"precision": precision, "short_of": short_of}
        work = Call(dumps((_train_reference, (program,), options)))
        steps: list[TrainedStep] = self._run(self._pool, work, ranks=1, backend=None)[0]
        return steps

    def layout(self, program: Maker, layout: Layout, *, cpu: bool, **options: Any) -> list[list[TrainedStep]]:
        backend = None if layout.processes == 1 else "gloo" if cpu else "cpu:gloo,cuda:nccl"
        work = Call(dumps((train_layout, (program, layout), {"cpu": cpu, **options})))
        pool = self._pool_with(layout.variables)
        return self._run(pool, work, ranks=layout.processes, backend=backend, variables=layout.variables)

    def _pool_with(self, variables: Mapping[str, str]) -> RankPool:
        """The pool with these variables; other variables need other processes, which read them only once."""
        if not variables:
            return self._pool
        key = str(sorted(variables.items()))
        if key not in self._bound:
            self._bound[key] = self._stack.enter_context(
                RankPool(preload=self._pool.preload, launcher=self._pool.launcher)
            )
        return self._bound[key]

    def _run(
        self,
        pool: RankPool,
        work: Call,
        *,
        ranks: int,
        backend: str | None,
        variables: Mapping[str, str] | None = None,
    ) -> list[Any]:
        answers = pool.submit(work, self._source, ranks=ranks, backend=backend, timeout=600.0, variables=variables)
        if failed := first_failure(answers):
            answer, rank = failed
            raise RankError(f"rank {rank} raised {answer.reason}\n\n{answer.report}")
        return [loads(answer.value) for answer in answers]


def _train_reference(make: Maker, *, precision: str, short_of: int | None) -> list[TrainedStep]:
    last = None
    if short_of is not None:
        size = make().batch_size
        last = size - size // short_of
    return train_reference(make, precision, last_samples=last)
