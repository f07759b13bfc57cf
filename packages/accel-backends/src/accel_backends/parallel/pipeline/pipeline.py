"""Pipeline parallelism: consecutive blocks of a model are on different ranks of one mesh axis.

Micro-batches flow through the stages by a schedule of ``torch.distributed.pipelining``. torch splits what it is given
along its first dim, and cannot know which tensors have a row for each sample; here it is given the numbers of the
micro-batches, by which the stages find their inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final, NoReturn, final

import torch
import torch.distributed as dist
from torch.distributed.pipelining import ScheduleGPipe

from accel_backends.parallel.pipeline.faults import Faults, FaultTolerantStage
from accel_backends.parallel.pipeline.schedules import ScheduleKind
from accel_backends.parallel.pipeline.stages import Feed, Stage
from accel_backends.private import leave_out_backwards, trust_known_shapes
from accel_state.collectives.group_argument import is_fake

ARGUMENTS: Final = "arguments of the call"
"""Place of errors of a rank that cannot run its batch."""
_FORWARD = frozenset({"FORWARD", "SEND_F", "RECV_F", "WAIT_SEND_F"})  # the last one since torch 2.15
# torch 2.9 has no such option, and joins the outputs, which are one number for each micro-batch.
_NO_OUTPUTS: Final = {"return_outputs": False} if "return_outputs" in signature(ScheduleGPipe.step).parameters else {}


@final
@dataclass(frozen=True, slots=True)
class StagePlan:
    """Where the stages of a pipeline are: ``held`` by this rank, ``num_stages`` on all ranks of ``group``.

    ``together``: ranks that train together, of all replicas of the pipeline; None: torch's default group.
    ``exchanging``: whether ranks with the same stages send each other tokens within these, as expert parallelism does.
    """

    held: Sequence[int]
    num_stages: int
    group: dist.ProcessGroup
    kind: ScheduleKind
    device: torch.device
    together: dist.ProcessGroup | None = None
    exchanging: bool = False

    @property
    def last_rank(self) -> int:
        """Rank in ``group`` of the last stage."""
        return 0 if self.kind.v_shaped else dist.get_world_size(self.group) - 1

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.num_stages - 1 in self.held


@final
class Pipeline:
    """The stages of one rank, and the schedules that run them together with those of the other ranks.

    Args:
        stages: stages of this rank.
        plan: where all stages are.
    """

    def __init__(self, stages: Sequence[Stage], plan: StagePlan) -> None:
        self.stages, self.plan = stages, plan
        # By whether there is a backward: the shape of the micro-batches, and the schedule with buffers of that shape.
        self._schedules: dict[bool, tuple[object, Any]] = {}

    def run(self, feed: Feed, *, backward: bool, error: Exception | None = None) -> None:
        """Computes the forwards of all micro-batches, and with ``backward`` the gradients of the sum of their losses.

        Gradients are added to those that are there. With ``error``, one of the arguments of the call, this rank raises
        it at the end; before, it computes with the other ranks, which wait for its messages and its collectives.

        Collective: every rank of the group must call this, and with ``backward`` those of all replicas.

        Raises:
            Exception: that of a stage of this rank.
            CollectiveError: a stage of another rank failed; names the rank and the stage. An error of a stage that is
                ``exchanging`` is raised on its own rank only, at once.
            BackendError: without ``backward``, only some ranks of the pipeline have labels.
        """
        faults = Faults(immediate=self.plan.exchanging)
        for stage in self.stages:
            stage.feed, stage.faults = feed, faults
        schedule = self._schedule(feed, backward)
        numbers = torch.arange(len(feed.inputs))
        given = (numbers,) if any(stage.first for stage in self.stages) else ()
        target = numbers if backward and self.plan.has_last else None
        try:
            with torch.set_grad_enabled(backward):
                schedule.step(*given, target=target, number=numbers, **_NO_OUTPUTS)
            if error is not None:
                faults.note(error, ARGUMENTS)
            if backward:
                faults.agree(self.plan.together)
            else:
                faults.agree(self.plan.group, labelled=feed.labelled)
        except BaseException as raised:
            self._schedules.clear()  # a schedule that was interrupted has received only some of its messages
            if faults.error is not None and isinstance(raised, Exception):
                raise faults.error from None  # torch raises another one from it
            raise
        finally:
            for stage in self.stages:
                stage.feed = stage.faults = None

    def from_last(self, value: torch.Tensor) -> torch.Tensor:
        """Broadcasts the tensor of the last stage's rank into those of the other ranks, and returns it.

        Collective: every rank of the pipeline must call this.
        """
        dist.broadcast(value, group=self.plan.group, group_src=self.plan.last_rank)
        return value

    def agree_on_labels(self, labelled: bool) -> None:
        """Raises on every rank of the pipeline if only some have labels.

        Collective: every rank of the pipeline must call this.

        Raises:
            BackendError: names the ranks.
        """
        Faults().agree(self.plan.group, labelled=labelled)

    def agree(self, error: Exception | None = None, where: str = "backward of the loss") -> None:
        """Raises on every rank if one has an error, or cannot run its batch and calls ``fail``.

        Collective: every rank of all replicas must call this, or ``fail``.

        Raises:
            Exception: the error of this rank.
            CollectiveError: names the other ranks that fail, and their errors.
        """
        faults = Faults()
        if error is not None:
            faults.note(error, where)
        faults.agree(self.plan.together)

    def fail(self, error: Exception) -> NoReturn:
        """Raises an error of a rank that cannot run its batch, in place of ``agree`` or of ``run`` with ``backward``.

        Collective: every rank of the group must call this, those of other replicas of the pipeline one of the three.

        Raises:
            Exception: the error.
        """
        faults = Faults()
        faults.note(error, ARGUMENTS)
        faults.agree(self.plan.together)
        raise error  # ``agree`` has raised it

    def _schedule(self, feed: Feed, backward: bool) -> Any:
        """The schedule of the last run if shapes are the same, because its buffers have these shapes."""
        key = (len(feed.inputs), feed.shape)
        known = self._schedules.get(backward)
        if known is not None and known[0] == key:
            return known[1]
        plan = self.plan
        parts: list[FaultTolerantStage] = []
        alone = is_fake(plan.group)  # no rank would answer a message about shapes
        for stage, index in zip(self.stages, plan.held, strict=True):
            examples: dict[str, Any] = stage.example_tensors(feed.shape, backward=backward, alone=alone)
            parts.append(FaultTolerantStage(stage, index, plan.num_stages, plan.device, group=plan.group, **examples))
        for part in parts if alone else ():
            trust_known_shapes(part)
        several = plan.num_stages > dist.get_world_size(plan.group)
        made_by: type[Any] = plan.kind.made_by if backward or several else ScheduleGPipe
        # torch's own scaling would divide the gradients of earlier micro-batches of an accumulation window again.
        schedule = made_by(
            parts if several else parts[0],
            len(feed.inputs),
            loss_fn=_as_computed if backward else None,
            scale_grads=False,
        )
        if several and not backward:
            leave_out_backwards(schedule, _FORWARD)
        self._schedules[backward] = key, schedule
        return schedule


def _as_computed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Loss of a micro-batch, which the last stage has computed."""
    return output.sum()
