"""An Accelerator's side towards the end of its time: saved at one step on all ranks, and taken up again."""

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
    """Listens for preemption through :class:`accel.resilience.preemption.Preemption`, and says what is done then."""

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
        """Saves and ends the run, at the same step on all ranks, when this process is told that its time is over.

        An Accelerator whose project names its checkpoints automatically listens from the start, as this method
        without arguments does; calling it replaces that. To be called on all processes. Where the run ends every
        process exits with status 75, which ``accel launch`` passes on. Ordinary steps take no part in this: the ranks
        agree through the store of the process group, in a thread.

        Args:
            action: done on all ranks instead of ``save_state()``, between two batches.
            signals: names of signals; any rank may get one.
            file: means the end once it exists; looked for by the main process.
            check: called about every ``every`` seconds, in a thread of the main process; what it returns, if true,
                is the reason. A cloud's notice is asked for here: ``accel.resilience.spot_notice.notice_at(url)``.
            every: seconds between two looks at ``file`` and ``check``.
            requeue: puts a Slurm job back into the queue once it is saved.

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
        """Loads the newest intact checkpoint of the project, if it has any, and returns its folder.

        For a script that is started the same way the first time and every time after. To be called on all processes.
        """
        saved: Any = self  # the facet of checkpoints
        saved._wait_for_save()
        series = saved._series()
        if series is not None and series.is_empty():
            return None
        folder: Location = saved.load_state()
        return folder

    def check_preemption(self) -> None:
        """A place where this run may be saved and ended, for loops without a prepared loader.

        To be called equally often on all ranks, between two steps. Does not return if this is where the run ends.
        """
        if self._preemption is not None:
            self._preemption.before_batch()

    @property
    def preempted(self) -> str | None:
        """Why this run is about to end, or None."""
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
    """What is done where the run ends. It knows the Accelerator weakly: listening keeps nothing alive."""

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
    """A connection of its own to the store of the session's group, under keys that nobody else uses."""
    if session.group is None or session.world_size == 1:
        return None
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    store = session.group.get_group_store().clone()  # type: ignore[attr-defined]
    number = store.add(f"{_STORE}/listeners/{session.rank}", 1)  # all ranks make theirs in the same order
    prefixed: Store = PrefixStore(f"{_STORE}/{number}", store)
    return prefixed
