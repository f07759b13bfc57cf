"""Meter of a run: throughput, time by phase, and anomalies of the loss, step by step."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, final

from accel_observe.meters.gradients import StepGradients
from accel_observe.meters.health import KINDS, Kind, LossWatch, Trouble, worst_of_others
from accel_observe.meters.late_loss import LateLoss, LossFacts, Place
from accel_observe.meters.observed_run import ObservedRun
from accel_observe.meters.phases import COMPUTE, DATA, GradientWait, PhaseClock, shares
from accel_observe.meters.stragglers import Straggler, find_stragglers

if TYPE_CHECKING:
    from torch import Tensor

_LOG = logging.getLogger("accel_observe.meters")


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """Measurements between two readings; times in seconds, memory in bytes, rates of all ranks together.

    Attributes:
        step: optimizer steps since the run began; steps that a restart repeats count once.
        shares: fractions of this rank's time, by phase; they add up to 1.
        mfu: model FLOPs utilization, as a fraction of the devices' peak; None if unknown.
        goodput: fraction of the time since the run's first start that was spent on steps that still count.
        memory: peak memory of tensors on the device, since the process began or ``torch.accelerator`` was last told to
            reset its peak; on a CPU, memory of the process.
        dropped_choices: fraction of the choices of experts, by the tokens of all ranks, that exceeded the capacity of
            the experts; None without a capacity.
    """

    step: int
    loss: float | None
    seconds_per_step: float
    samples_per_second: float
    tokens_per_second: float | None
    mfu: float | None
    shares: dict[str, float]
    goodput: float
    memory: int
    host_memory: int
    dropped_choices: float | None = None

    def flat(self) -> dict[str, float]:
        """Returns the numbers for a tracker, under ``meter/``."""
        values = asdict(self)
        parts = values.pop("shares")
        values.pop("step")
        values.pop("loss")
        named = {**values, **{f"share_{phase}": part for phase, part in parts.items()}}
        return {f"meter/{name}": value for name, value in named.items() if value is not None}


@final
class Meter:
    """Meter made by ``accelerator.meter()``: iterate ``watch(loader)``, and call ``step(loss)`` after each step.

    Attributes:
        steps: optimizer steps of the run; steps that a restart repeats count once.
        troubles: anomalies of the loss; on the main rank also those of other ranks, as of the last reading.
        stragglers: result of the last comparison of ranks.
    """

    def __init__(
        self,
        run: ObservedRun,
        *,
        every: int,
        tokens: Callable[[Any], int] | None,
        flops_per_sample: float | None,
        peak: float | None,
        watch_loss: LossWatch | None,
    ) -> None:
        self._run = run
        self._every = every
        self._tokens_of = tokens
        self._flops_per_sample = flops_per_sample
        self._peak = peak
        self._loss_watch = watch_loss
        self.clock = PhaseClock()
        on_host = run.session.device.type == "cpu"  # elsewhere backward returns before the device has computed
        self._waits = GradientWait(self.clock, run.models if on_host else ())
        watched = run.optimizers if watch_loss is not None else ()
        self._gradients = StepGradients(run.backend, run.session, names=_parameters_of(run), optimizers=watched)
        self._ranks, self._shards = run.session.world_size, run.data_shards
        self.steps = run.progress.steps
        self.troubles: list[Trouble] = []
        self._untold: list[Trouble] = []
        self.stragglers: tuple[Straggler, ...] = ()
        self.last: Reading | None = None
        self._losses: list[Any] = []
        # On an accelerator of torch's, as XLA is not, the loss of a step is looked at after the next one.
        self._late = not on_host and not run.session.device.kind.together
        self._pending: LateLoss | None = None
        self._samples = self._tokens = 0
        self._place: Place | None = None
        self._first: tuple[int, int] | None = None
        self._mark = (self.clock.now(), self.clock.read(), self.steps)

    def watch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yields the loader's batches; the time until each batch arrives counts as waiting for data."""
        clock = self.clock
        iterator = iter(loader)
        position = getattr(loader, "position", None)
        before = 0 if position is None else position.samples
        try:
            while True:
                clock.enter(DATA)
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                finally:
                    clock.enter(COMPUTE)
                before = self._count(loader, batch, before)
                yield batch
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
            self._settle_alone()

    def _count(self, loader: Any, batch: Any, before: int) -> int:
        """Adds a batch to the counts, by the loader's position (samples of all ranks) if it has one."""
        if self._tokens_of is not None:
            self._tokens += int(self._tokens_of(batch))
        position = getattr(loader, "position", None)
        if position is None:
            from accel_state.pytree.operations import ignorant_find_batch_size

            self._samples += (ignorant_find_batch_size(batch) or 0) * self._shards
            return before
        after = position.samples
        total = getattr(loader, "total_batch_size", 0)
        first = before if after > before else (self._place[2] if self._place else 0)
        last = after if after > before else first + total
        self._samples += last - first
        epoch = position.epoch if after > before else position.epoch - 1
        if self._first is None or self._first[0] != epoch:
            self._first = (epoch, first)
        self._place = (epoch, self._first[1], last)
        return int(after)

    def step(self, loss: Any = None) -> Reading | None:
        """Ends a step. Every few steps, makes and logs a reading, and compares the ranks.

        Checks ``loss`` if it is given: an anomaly is reported with the step, the samples and the parameters; anomalies
        of other ranks are reported with the next reading. On an accelerator, a loss is looked at after the step that
        follows it, or with the next reading, so that the loop does not wait for the device.

        Collective: every rank of the group must call this.
        """
        self.steps += 1
        self._run.progress.steps = self.steps
        if loss is not None:
            # A copy, because the next run of a CUDA graph overwrites a loss that is one of its outputs.
            value = loss.detach().clone() if hasattr(loss, "detach") else loss
            # The mean of a reading would round in bfloat16, and overflow in float16.
            is_half = hasattr(value, "detach") and value.dtype.itemsize < 4
            self._losses.append(value.float() if is_half else value)
            if self._loss_watch is not None:
                self._watch(value)
        self._first = None
        reading = None if self.steps % self._every else self.read()
        self._gradients.forget()
        return reading

    def _watch(self, loss: Any) -> None:
        """Looks at a loss that is on the host, or at the previous one while this one is copied."""
        if not self._late or not hasattr(loss, "detach"):
            self._look_at(float(loss), LossFacts(self.steps, self._place))
            return
        self._settle()
        self._pending = LateLoss(loss, LossFacts(self.steps, self._place, self._gradients.squares()))

    def _settle(self) -> None:
        """Looks at the loss that is being copied, if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._look_at(pending.read(), pending.facts)

    def _settle_alone(self) -> None:
        """Settles at the end of a loop or meter, where other ranks may not be; with sharded gradients they need to."""
        if not self._gradients.spread:
            self._settle()

    def _look_at(self, loss: float, facts: LossFacts) -> None:
        assert self._loss_watch is not None
        found = self._loss_watch.check(loss)
        kinds = self._kinds(found)
        squares = facts.squares
        if not kinds and facts.step % self._every == 0:
            self._gradients.note(squares)
        looks = {"nonfinite": self._gradients.nonfinite, "spike": self._gradients.grown}
        named = {kind: looks[kind](squares) for kind in kinds}
        if found is None:
            return
        kind, usual = found
        parameters = named[kind]
        epoch, samples = (None, None) if facts.place is None else (facts.place[0], facts.place[1:])
        rank = self._run.session.rank
        trouble = Trouble(kind, facts.step, loss, usual, parameters, epoch, samples, rank)
        self._untold.append(trouble)
        self._tell(trouble)

    def _kinds(self, found: "tuple[Kind, float] | None") -> "list[Kind]":
        """Kinds of anomaly for which gradients are examined: any rank's if gradients are sharded; if not, this rank's.

        Sharded gradients cost one small all-reduce in each step, of host memory if losses are looked at late and the
        group reduces host memory.
        """
        own = [kind for kind in KINDS if found is not None and found[0] == kind]
        if not self._gradients.spread:
            return own
        import torch

        from accel_state.process_group.group import sends_from_host

        session = self._run.session
        on_host = self._late and sends_from_host(session.group)
        device = torch.device("cpu") if on_host else session.device.torch
        flags = torch.tensor([float(kind in own) for kind in KINDS], device=device)
        return [kind for kind, any_of in zip(KINDS, session.reduce(flags).tolist(), strict=True) if any_of]

    def _tell(self, trouble: Trouble) -> None:
        self.troubles.append(trouble)
        _LOG.warning("%s: %s", trouble.kind, trouble)
        self._run.log.event("trouble", step=trouble.step, text=str(trouble), trouble=trouble.kind)

    def read(self) -> Reading:
        """Returns the measurements since the previous reading.

        Collective: every rank of the group must call this.
        """
        self._settle()
        then, seconds_then, steps_then = self._mark
        seconds = self.clock.read()
        now, steps = self.clock.now(), self.steps
        spent = {phase: seconds[phase] - seconds_then[phase] for phase in seconds}
        elapsed, count = max(now - then, 1e-9), max(steps - steps_then, 1)
        table, tokens = self._gather(spent)
        self.stragglers = find_stragglers(table, steps=count)
        self._mark = (self.clock.now(), self.clock.read(), steps)
        samples, self._samples = self._samples, 0
        losses, self._losses = self._losses, []
        peak = None if self._peak is None else self._peak * self._ranks
        flops = None if self._flops_per_sample is None else self._flops_per_sample * samples / elapsed
        self.last = Reading(
            step=steps,
            loss=float(sum(losses) / len(losses)) if losses else None,
            seconds_per_step=elapsed / count,
            samples_per_second=samples / elapsed,
            tokens_per_second=None if self._tokens_of is None else tokens / elapsed,
            mfu=None if peak is None or flops is None else flops / peak,
            shares=shares(spent),
            goodput=self._run.progress.goodput(time.time()),
            memory=device_memory(self._run.session.device.torch),
            host_memory=host_memory(),
            dropped_choices=self._dropped_choices(),
        )
        self._note(table)
        return self.last

    def _dropped_choices(self) -> float | None:
        """Fraction of dropped choices of experts on all ranks since the previous reading."""
        counts = self._run.backend.layout.take_choices()
        if counts is None:
            return None
        dropped, made = self._run.session.reduce(counts, "sum").tolist()
        return float(dropped / max(made, 1))

    def _gather(self, spent: dict[str, float]) -> tuple[list[dict[str, float]], float]:
        """All-gathers the seconds by phase of every rank; the main rank also receives the others' anomalies.

        Returns the tokens of all ranks, too; ranks that read the same samples count once.
        """
        untold, self._untold = self._untold, []
        tokens, self._tokens = self._tokens, 0
        if self._ranks == 1:
            return [spent], tokens
        import torch

        session = self._run.session
        device = session.device.own_numbers
        own = torch.tensor([[*spent.values(), tokens, len(untold)]], dtype=torch.float32, device=device)
        rows = session.gather(own).tolist()
        if any(row[-1] for row in rows[1:]):
            everyones = session.gather_object(untold)
            for trouble in worst_of_others(everyones) if session.rank == 0 else ():
                self._tell(trouble)
        everywhere = sum(row[-2] for row in rows) * self._shards / self._ranks
        return [dict(zip(spent, row, strict=False)) for row in rows], everywhere

    def _note(self, table: Sequence[dict[str, float]]) -> None:
        """Logs the reading; reports each pair of straggler and phase once."""
        assert self.last is not None
        run = self._run
        run.log.event("reading", step=self.last.step, values=asdict(self.last), ranks=list(table))
        for one in self.stragglers:
            if (one.rank, one.phase) not in run.told_stragglers:
                run.told_stragglers.add((one.rank, one.phase))
                if run.session.is_main_process:
                    _LOG.warning("%s", one)
                run.log.event("straggler", step=self.last.step, rank=one.rank, phase=one.phase, text=str(one))

    def close(self) -> None:
        """Looks at the last loss, unless gradients are sharded (``read`` does, on all ranks); removes its hooks."""
        self._settle_alone()
        self._waits.remove()
        self._gradients.remove()


def _parameters_of(run: ObservedRun) -> "dict[str, Tensor]":
    """Parameters by the FQNs of the user's own models; with several models, prefixed with the model's number."""
    own = [run.backend.unwrap(model, keep_torch_compile=False) for model in run.models]
    return {
        (name if len(own) == 1 else f"model {number}: {name}"): parameter
        for number, model in enumerate(own)
        for name, parameter in model.named_parameters()
    }


def host_memory() -> int:
    """Resident memory of this process in bytes."""
    import os
    from pathlib import Path

    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_memory(device: Any) -> int:
    """Peak bytes of tensors on an accelerator, as torch counts it; on a CPU, memory of the process.

    The peak is not reset here, because the user's own measurements would lose theirs. 0 for devices whose allocator
    torch does not observe (mps, some plugins).
    """
    if device.type == "cpu":
        return host_memory()
    import torch

    try:
        return int(torch.accelerator.max_memory_allocated(device))
    except (RuntimeError, AssertionError):
        return 0
