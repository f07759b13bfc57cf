"""Whether a program trains under every layout as in one process; if not, what left first, when, and by how much."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from accel_testing.compare import Difference, compare_trees
from accel_testing.errors import RankError
from accel_testing.layouts import Layout, expand
from accel_testing.pool import RankPool, first_failure
from accel_testing.program import Program
from accel_testing.training import Maker, Step, train_layout, train_reference
from accel_testing.wire import Call, Source, pack, source_of, unpack

#: How far a tensor may be from the reference's, relative to its largest element, by precision.
TOLERANCES: Mapping[str, float] = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 3e-2, "fp16": 5e-3, "fp8": 1e-1}
# Losses and norms subtract nearly equal numbers, so their last digits go first.
_SCALAR_SLACK = 10.0


@final
@dataclass(frozen=True, slots=True)
class Departure:
    """Where a layout left the reference: the step (from 0), and one sentence for each thing that is different there.

    ``tensors`` differ at that step, the farthest first.
    """

    step: int
    reasons: tuple[str, ...]
    tensors: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        lines = [f"leaves the one-process reference at step {self.step}:", *(f"  {reason}" for reason in self.reasons)]
        if self.tensors:
            lines.append(f"  {self.tensors[0]}")
            if more := len(self.tensors) - 1:
                lines.append(f"  and {more} more tensor{'s' if more > 1 else ''}")
        return "\n".join(lines)


@final
@dataclass(frozen=True, slots=True)
class Result:
    """How one layout did: ``distance`` is the largest relative distance of any tensor after the last step.

    ``departure`` is None where it stayed within ``tolerance``; ``error`` says why it could not run at all.
    """

    layout: Layout
    tolerance: float
    distance: float = 0.0
    departure: Departure | None = None
    error: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it ran, and stayed with the reference."""
        return self.departure is None and not self.error

    def __str__(self) -> str:
        return f"{self.layout} could not run: {self.error}" if self.error else f"{self.layout} {self.departure}"


@final
@dataclass(frozen=True, slots=True)
class Report:
    """How all layouts did."""

    steps: int
    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """Whether every layout stayed with the reference."""
        return all(result.ok for result in self.results)

    def __str__(self) -> str:
        """A table of all layouts, then what went wrong."""
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
    """Fails unless ``program`` trains under every layout as it does in one process; the message is the report.

    Args:
        program: makes the :class:`Program`, on every rank and for every layout anew.
        layouts: as in ``["ddp:2", "ddp:4/acc=3"]``, see :class:`Layout`.
        precisions: those of layouts that name none.
        tolerances: by precision, instead of :data:`TOLERANCES`.
        pool: ranks to use (the ``rank_pool`` fixture); None starts some for this call.
        perturb: start ranks other than 0 from other weights, which preparing must replace.
        around: makes a context that training runs in, on the ranks of the layouts and not in the reference.
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
    """Checks ``script.py:function``, where the function returns a :class:`Program`; what ``accel check`` runs.

    The script is imported (not as ``__main__``) in rank processes, never in this one. With ``cpu=False`` layouts use
    this machine's accelerators; the reference stays on the CPU.

    Raises:
        ValueError: the target or a layout cannot be read.
        RankError: the reference itself cannot be trained.
    """
    path, _, name = target.rpartition(":")
    file = Path(path).resolve()
    if not path or not name.isidentifier():
        raise ValueError(f"{target!r} is not a target; expected SCRIPT.py:FUNCTION, as in train.py:program")
    if not file.is_file():
        raise ValueError(f"{target!r}: there is no file {path}")
    program = ScriptProgram(str(file), name)
    return _check(program, None, expand(layouts, precisions), tolerances=tolerances, pool=pool, cpu=cpu)


@final
@dataclass(frozen=True, slots=True)
class ScriptProgram:
    """The program that a function of a script makes, found where it is called."""

    file: str
    function: str

    def __call__(self) -> Program:
        from difflib import get_close_matches

        from accel_testing.rewriting import import_source

        sys.path.insert(0, str(Path(self.file).parent))
        module = import_source(Source(Path(self.file).stem, self.file))
        make = getattr(module, self.function, None)
        if not callable(make):
            near = get_close_matches(
                self.function, [name for name, value in vars(module).items() if callable(value)], 1
            )
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{self.file} has no function {self.function!r}{hint}")
        program: Program = make()
        return program


def _check(
    program: Maker,
    source: Source | None,
    layouts: Sequence[Layout],
    *,
    tolerances: Mapping[str, float] | None = None,
    pool: RankPool | None = None,
    cpu: bool = True,
    perturb: bool = True,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Report:
    """Trains the references that are needed, once each, and every layout; compares."""
    if pool is None:
        with RankPool(max(layout.world_size for layout in layouts)) as own:
            return _check(
                program, source, layouts, tolerances=tolerances, pool=own, cpu=cpu, perturb=perturb, around=around
            )
    limits = {**TOLERANCES, **(tolerances or {})}
    ranks = _Ranks(pool, source)
    references: dict[tuple[str, int | None], list[Step]] = {}
    results = []
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
        distance = _distance(references[key][-1], runs[0][-1]) if runs[0] else 0.0
        seconds = time.monotonic() - began
        results.append(Result(layout, limits[layout.precision], distance, departure, seconds=seconds))
    return Report(len(next(iter(references.values()))), tuple(results))


@final
class _Ranks:
    """Trains on ranks of a pool."""

    def __init__(self, pool: RankPool, source: Source | None) -> None:
        self._pool = pool
        self._source = source

    def reference(self, program: Maker, precision: str, *, short_of: int | None) -> list[Step]:
        options = {"precision": precision, "short_of": short_of}
        steps: list[Step] = self._run(_train_reference, (program,), options, ranks=1, backend=None)[0]
        return steps

    def layout(self, program: Maker, layout: Layout, *, cpu: bool, **options: Any) -> list[list[Step]]:
        backend = None if layout.world_size == 1 else "gloo" if cpu else "cpu:gloo,cuda:nccl"
        return self._run(
            train_layout, (program, layout), {"cpu": cpu, **options}, ranks=layout.world_size, backend=backend
        )

    def _run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], *, ranks: int, backend: str | None
    ) -> list[Any]:
        call = Call(pack((fn, args, options)))
        answers = self._pool.submit(call, self._source, ranks=ranks, backend=backend, timeout=600.0)
        if failed := first_failure(answers):
            answer, rank = failed
            raise RankError(f"rank {rank} raised {answer.reason}\n\n{answer.report}")
        return [unpack(answer.value) for answer in answers]


def _train_reference(make: Maker, *, precision: str, short_of: int | None) -> list[Step]:
    last = None
    if short_of is not None:
        size = make().batch_size
        last = size - size // short_of
    return train_reference(make, precision, last_samples=last)


def compare_runs(reference: Sequence[Step], runs: Sequence[Sequence[Step]], *, tolerance: float) -> Departure | None:
    """The first step at which the ranks' runs are not the reference's, or None; ``runs`` are by rank."""
    for position, expected in enumerate(reference):
        steps = [run[position] for run in runs if position < len(run)]
        if len(steps) < len(runs):
            counts = ", ".join(str(len(run)) for run in runs)
            return Departure(position, (f"the ranks took {counts} optimizer steps, the reference {len(reference)}",))
        if departure := _compare_step(position, expected, steps, tolerance=tolerance, reference=reference):
            return departure
    if any(len(run) > len(reference) for run in runs):
        counts = ", ".join(str(len(run)) for run in runs)
        return Departure(len(reference), (f"the ranks took {counts} optimizer steps, the reference {len(reference)}",))
    return None


def _compare_step(
    position: int, expected: Step, steps: Sequence[Step], *, tolerance: float, reference: Sequence[Step]
) -> Departure | None:
    reasons = []
    if skipped := [rank for rank, step in enumerate(steps) if step.skipped]:
        reasons.append(f"the optimizer step was skipped on ranks {skipped}, because gradients overflowed")
    weight = sum(step.weight for step in steps)
    shards = round(weight / expected.weight) or 1
    # Peers of tensor, context or pipeline parallelism see the same samples, so each is counted that many times.
    loss, was = sum(step.loss for step in steps) / weight, expected.loss / expected.weight
    floor = max(abs(step.loss / step.weight) for step in reference) * 1e-2
    slack = tolerance * _SCALAR_SLACK
    if abs(loss - was) > slack * max(abs(was), floor) or loss != loss:
        reasons.append(f"the loss is {loss:.10g} instead of {was:.10g}")
    if abs(weight - expected.weight * shards) > 1e-9 * weight:
        reasons.append(f"the ranks saw samples of weight {weight:g} instead of {expected.weight:g}")
    norm, floor = steps[0].norm, max(step.norm for step in reference) * 1e-2
    if abs(norm - expected.norm) > slack * max(expected.norm, floor) or norm != norm:
        reasons.append(f"the gradient norm is {norm:.10g} instead of {expected.norm:.10g}{_ratio(norm, expected.norm)}")
    if steps[0].rates != expected.rates:
        reasons.append(f"the learning rates are {list(steps[0].rates)} instead of {list(expected.rates)}")
    reasons += _disagreements(steps)
    tensors = compare_trees(steps[0].tensors, expected.tensors, rtol=tolerance)
    if not reasons and not tensors:
        return None
    return Departure(position, tuple(reasons), tuple(sorted(tensors, key=lambda one: (not one.reason, -one.relative))))


def _ratio(value: float, expected: float) -> str:
    """A multiple that is nearly whole, or a whole part, is the trace of a wrong divisor."""
    if not value or not expected:
        return ""
    for whole in range(2, 65):
        for factor, text in ((float(whole), f"{whole} times"), (1.0 / whole, f"1/{whole} of")):
            if abs(value / expected / factor - 1) < 1e-3:
                return f" ({text} it)"
    return ""


def _disagreements(steps: Sequence[Step]) -> list[str]:
    """Parameters that ranks other than 0 hold with other bits: replicas that have come apart."""
    first = steps[0].digests
    found = []
    for rank, step in enumerate(steps[1:], 1):
        if apart := [name for name, digest in step.digests.items() if first.get(name) != digest]:
            more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
            found.append(f"rank {rank} has another {apart[0]}{more} than rank 0")
    return found


def _distance(expected: Step, actual: Step) -> float:
    return max((one.relative for one in compare_trees(actual.tensors, expected.tensors, rtol=0.0)), default=0.0)
