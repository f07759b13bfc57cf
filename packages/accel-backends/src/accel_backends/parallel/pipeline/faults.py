"""Errors of pipeline stages, which all ranks learn at the end of the schedule, so that none waits for a failed one."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast, final

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from accel_backends.private import guard_shape_inference, repair_first_messages
from accel_state.collectives.objects import all_gather_object
from accel_state.errors import BackendError, CollectiveError, relayed
from accel_state.logging import get_logger
from accel_state.process_group.group import sends_from_host
from accel_state.watchdog.decorator import active, recorded

_log = get_logger(__name__)

_MOST: Final = 400
"""Characters of an error that other ranks repeat."""
_WRAPPED: Final = "Failed to run stage backward"
"""Beginning of the error that torch raises from that of a backward, with all tensors of the stage."""


@final
@dataclass(slots=True)
class Faults:
    """First error of this rank's stages in one run of a schedule.

    A failed stage computes nothing more in that run. It sends zeros, because the other ranks wait for its messages, and
    ``agree`` raises on all of them.

    Attributes:
        error: first error of this rank; None: none yet.
        place: rank, and part of the run that failed.
        immediate: whether errors are raised at once, because other ranks wait within the stage for tokens of this one
            and would never reach ``agree``. The watchdogs of these ranks find the error in the record of the call.
            Running out of memory is logged and recorded instead: ranks that all do so, in a search of a batch size, go
            on.
    """

    error: Exception | None = None
    place: str = ""
    immediate: bool = False

    def note(self, error: Exception, where: str) -> None:
        """Keeps an error of this rank, if it is the first; raises it if it is ``immediate``."""
        if self.error is not None:
            return
        self.error = error
        self.place = f"rank {dist.get_rank()} failed in the {where}"
        if not self.immediate:
            return
        if (watchdog := active()) is not None:
            watchdog.record.calls.fail(f"failed in the {where}: {type(error).__name__}: {error}")
        if isinstance(error, torch.OutOfMemoryError):
            message = "%s, and ranks among which experts are divided may wait for it: %s"
            _log.error(message, self.place, error, main_process_only=False)
            return
        error.add_note(self.place)
        raise error

    @recorded("errors of pipeline stages", shared=False)
    def agree(self, group: dist.ProcessGroup | None, *, labelled: bool | None = None) -> None:
        """Raises on every rank if a stage of any rank has failed: there its own error, elsewhere a CollectiveError.

        ``labelled``: whether this rank's call has labels, which all ranks of the group must have, or none; None: that
        is not compared.

        Collective: every rank of the group must call this. Sends three numbers from host memory where the group can, so
        that no rank waits for its device.
        """
        device = torch.device("cpu") if sends_from_host(group) else torch.accelerator.current_accelerator()
        mine = [int(self.error is not None), int(labelled is True), int(labelled is False)]
        found = torch.tensor(mine, device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        failed, with_labels, without = found.tolist()
        if not failed and not (with_labels and without):
            return
        if not failed:
            given = all_gather_object((dist.get_rank(), labelled), group=group)
            raise _different_labels({one for one, has in given if has}, {one for one, has in given if not has})
        said = f"{type(self.error).__name__}: {self.error}"[:_MOST]
        everybody = all_gather_object(None if self.error is None else f"{self.place}: {said}", group=group)
        if self.error is not None:
            self.error.add_note(self.place)
            raise self.error
        raise relayed(CollectiveError("; ".join(one for one in everybody if one is not None)))


def _different_labels(having: Collection[int], without: Collection[int]) -> BackendError:
    with_labels, none = (", ".join(map(str, sorted(ranks))) for ranks in (having, without))
    return BackendError(
        f"the model was called with labels on ranks {with_labels}, and without labels on ranks {none}, which are one "
        "pipeline; nearest: the same arguments on all ranks of a pipeline"
    )


@final
class FaultTolerantStage(PipelineStage):
    """torch's stage, whose failed backwards give zeros."""

    @property
    def faults(self) -> Faults:
        """Those of the module, which has one for each run."""
        found: Faults = cast(Any, self.submod).faults
        return found

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        guard_shape_inference(self, self._guarded)
        repair_first_messages(self)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that receive gradients; before the first ones, routers of all stages are summed.

        By then GPipe has run all forwards, and no rank waits for a gradient yet.
        """
        feed = cast(Any, self.submod).feed
        if bwd_chunk_id == 0 and self.has_backward and feed.routers is not None:
            feed.routers.sum()
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Computes a backward; after an error of this rank, zeros for the inputs."""

        def run() -> Any:
            return super(FaultTolerantStage, self).backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

        if backward_type == "weight":
            return self._guarded(run, (), None)
        return self._guarded(run, bwd_kwargs["input_values"], [] if backward_type == "input" else None)

    def _guarded(self, run: Callable[[], Any], inputs: Sequence[Any], *rest: Any) -> Any:
        """Result of a backward; if this rank has failed, zeros for inputs that have gradients, and ``rest``."""
        if self.faults.error is None:
            try:
                return run()
            except Exception as error:
                wrapped = str(error).lstrip().startswith(_WRAPPED) and isinstance(error.__cause__, Exception)
                own = error.__cause__ if wrapped else error
                self.faults.note(cast(Exception, own), f"backward of pipeline stage {self.stage_index}")
        zeros = tuple(torch.zeros_like(one) if _is_trained(one) else None for one in inputs)
        return (zeros, *rest) if rest else zeros


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
