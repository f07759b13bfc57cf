"""Guard against preemption: all ranks save at the same step and exit, and the run can be resumed."""

import atexit
import logging
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from accel_launch.preemption.exit_status import PREEMPTED_STATUS
from accel_launch.preemption.preemption import Notice, Preemption, StopConsensus
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from accel.checkpoints.checkpointer import Checkpointer
    from accel.loop.accumulator import StepClock
    from accel.prepared import PreparedObjects
    from accel_ckpt.series.project import ProjectConfiguration
    from accel_state.session import Session

_LOG = logging.getLogger(__name__)
_STORE = "accel/preemption"


@final
class PreemptionGuard:
    """Listens for preemption of this process, and saves and ends the run on all ranks.

    Attributes:
        listening: the listener; None while nothing listens.
    """

    def __init__(
        self,
        session: "Session",
        prepared: "PreparedObjects",
        clock: "StepClock",
        checkpointer: "Checkpointer",
        project: "ProjectConfiguration",
    ) -> None:
        self._session = session
        self._prepared = prepared
        self._clock = clock
        self._checkpointer = checkpointer
        self._project = project
        self.listening: Preemption | None = None

    @property
    def preempted(self) -> str | None:
        """See ``Accelerator.preempted``."""
        return None if self.listening is None else self.listening.noticed

    def listen(self, notice: Notice, action: Callable[[], object] | None, *, requeue: bool) -> None:
        """See ``Accelerator.on_preemption``."""
        if action is None and not self._names_checkpoints():
            raise ConfigError(
                "on_preemption has nowhere to save: give an action, or "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
            )
        self._listen(notice, action, requeue=requeue, replace=True)

    def listen_by_default(self) -> None:
        """Listens with the defaults of ``Accelerator.on_preemption`` if the project names its checkpoints."""
        if self._names_checkpoints():
            self._listen(Notice(), None, requeue=False, replace=False)

    def check(self) -> None:
        """See ``Accelerator.check_preemption``."""
        if self.listening is not None:
            self.listening.before_batch()

    def stop(self) -> None:
        """Stops listening."""
        listening, self.listening = self.listening, None
        if listening is not None:
            self._prepared.set_gate(None)
            _forget(listening)

    def leave(self, reason: str, action: Callable[[], object] | None, *, requeue: bool) -> None:
        """Saves the run, or calls ``action``, at the end of a preempted run; all ranks do so at the same position."""
        assert self.listening is not None
        self.listening.rewind_evaluations()
        if self._clock.unstepped:
            self._clock.unstepped = False
            _LOG.warning("the run ends between backward and optimizer.step(): these gradients are not saved")
        done = "did what the run asked for"
        if action is not None:
            action()
        else:
            done = f"saved {self._checkpointer.save_state()}"
        if self._session.is_main_process:
            again = " and put the job back into the queue" if requeue and _requeued() else ""
            print(f"accel: {reason}; {done}{again}, ending with status {PREEMPTED_STATUS}", file=sys.stderr, flush=True)

    def _names_checkpoints(self) -> bool:
        return self._project.automatic_checkpoint_naming and self._project.project_dir is not None

    def _listen(self, notice: Notice, action: Callable[[], object] | None, *, requeue: bool, replace: bool) -> None:
        self.stop()
        session, guard = self._session, weakref.ref(self)

        def leave(reason: str) -> None:  # holds the guard weakly, so that listening does not keep the Accelerator alive
            if (alive := guard()) is not None:
                alive.leave(reason, action, requeue=requeue)

        consensus = StopConsensus(_store_of(session), session.rank, session.world_size)
        listening = Preemption(notice, consensus, leave, is_main=session.is_main_process)
        listening.start(replace=replace)
        self.listening = listening
        self._prepared.set_gate(listening.reading)
        atexit.register(listening.close)
        weakref.finalize(self, _forget, listening).atexit = False


def _requeued() -> bool:
    from accel_launch.preemption.slurm_requeue import requeue

    return requeue()


def _forget(listening: Preemption) -> None:
    listening.close()
    atexit.unregister(listening.close)


def _store_of(session: "Session") -> "Store | None":
    """Own connection to the store of the session's group, under own keys."""
    if session.group is None or session.world_size == 1:
        return None
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    store = session.group.get_group_store().clone()  # type: ignore[attr-defined]
    number = store.add(f"{_STORE}/listeners/{session.rank}", 1)  # all ranks make their listeners in the same order
    prefixed: Store = PrefixStore(f"{_STORE}/{number}", store)
    return prefixed
