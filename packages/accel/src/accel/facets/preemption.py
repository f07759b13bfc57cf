"""Preemption of a run: all ranks save at the same step and exit, and the run can be resumed."""

import atexit
import logging
import os
import sys
import weakref
from abc import ABC
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from accel.resilience.preemption import DEFAULT_SIGNALS, Ballot, Notice, Preemption
from accel.setup.kwargs_handlers import ProjectConfiguration
from accel_launch.launch.exit_status import PREEMPTED_STATUS
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from accel_ckpt.io.storage import Location
    from accel_state.session import Session

_LOG = logging.getLogger(__name__)
_STORE = "accel/preemption"


class PreemptionFacet(ABC):
    """Listens for preemption through :class:`accel.resilience.preemption.Preemption`, and saves the run."""

    session: "Session"
    project_configuration: ProjectConfiguration
    _dataloaders: list[Any]
    _preemption: Preemption | None = None

    def on_preemption(
        self,
        action: Callable[[], object] | None = None,
        *,
        signals: Sequence[str] = DEFAULT_SIGNALS,
        file: str | os.PathLike[str] | None = None,
        check: Callable[[], object] | None = None,
        every: float = 5.0,
        requeue: bool = False,
    ) -> None:
        """On a preemption of this process, saves and ends the run at the same step on all ranks.

        An Accelerator whose project names its checkpoints automatically listens from the start, with the defaults of
        this method; a call replaces these. Every process exits with status 75, which ``accel launch`` returns. Ordinary
        steps have no overhead: the ranks agree through the store of the process group, in a thread. Call it on all
        processes.

        Args:
            action: called on all ranks instead of ``save_state()``, between two batches.
            signals: names of signals; any rank may receive one.
            file: path whose existence means preemption; checked by the main process.
            check: called about every ``every`` seconds, in a thread of the main process; a true result means
                preemption, and is its reason. For a cloud's notices: ``accel.resilience.spot_notice.notice_at(url)``.
            every: seconds between two checks of ``file`` and ``check``.
            requeue: requeues a Slurm job after the save.

        Raises:
            ConfigError: no such signal, or neither an ``action`` nor automatic checkpoint naming.
        """
        notice = Notice(tuple(signals), file, check, every)
        if action is None and not self._names_checkpoints():
            raise ConfigError(
                "on_preemption has nowhere to save: give an action, or "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
            )
        self._listen(notice, _Farewell(self, action, requeue=requeue), replace=True)

    def resume(self) -> "Location | None":
        """Loads the newest intact checkpoint of the project, if there is one, and returns its folder.

        For scripts that are started with the same command the first time and every time after.

        Collective: every rank of the group must call this.
        """
        saved: Any = self  # the mixin of checkpoints
        saved._wait_for_save()
        series = saved._series()
        if series is not None and series.is_empty():
            return None
        folder: Location = saved.load_state()
        return folder

    def check_preemption(self) -> None:
        """A stop point, at which a preempted run may be saved and ended, for loops without a prepared loader.

        Call it equally often on all ranks, between two steps. Does not return if the run ends here.
        """
        if self._preemption is not None:
            self._preemption.before_batch()

    @property
    def preempted(self) -> str | None:
        """Reason for which this run is about to end; None if it is not."""
        return None if self._preemption is None else self._preemption.noticed

    def _names_checkpoints(self) -> bool:
        project = self.project_configuration
        return project.automatic_checkpoint_naming and project.project_dir is not None

    def _listen_by_default(self) -> None:
        if self._names_checkpoints():
            self._listen(Notice(), _Farewell(self, None, requeue=False), replace=False)

    def _listen(self, notice: Notice, farewell: "_Farewell", *, replace: bool) -> None:
        self._stop_listening()
        store = _store_of(self.session)
        ballot = Ballot(store, self.session.rank, self.session.world_size)
        listening = Preemption(notice, ballot, farewell, is_main=self.session.is_main_process)
        listening.start(replace=replace)
        self._preemption = listening
        for loader in self._dataloaders:
            loader.gate = listening.reading
        atexit.register(listening.close)
        weakref.finalize(self, _forget, listening).atexit = False

    def _stop_listening(self) -> None:
        listening, self._preemption = self._preemption, None
        if listening is None:
            return
        for loader in self._dataloaders:
            loader.gate = None
        _forget(listening)


class _Farewell:
    """Action at the end of a preempted run. Holds the Accelerator weakly, so that listening does not keep it alive."""

    def __init__(self, accelerator: PreemptionFacet, action: Callable[[], object] | None, *, requeue: bool) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._action = action
        self._requeue = requeue

    def __call__(self, reason: str) -> None:
        accelerator: Any = self._accelerator()
        if accelerator is None:
            return
        listening = accelerator._preemption
        assert listening is not None
        listening.rewind_evaluations()
        if accelerator.clock.unstepped:
            accelerator.clock.unstepped = False
            _LOG.warning("the run ends between backward and optimizer.step(): these gradients are not saved")
        done = "did what the run asked for"
        if self._action is not None:
            self._action()
        else:
            done = f"saved {accelerator.save_state()}"
        if accelerator.session.is_main_process:
            again = " and put the job back into the queue" if self._requeue and _requeued() else ""
            print(f"accel: {reason}; {done}{again}, ending with status {PREEMPTED_STATUS}", file=sys.stderr, flush=True)


def _requeued() -> bool:
    from accel.resilience.slurm_requeue import requeue

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
