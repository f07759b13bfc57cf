"""Background saves: a host snapshot now, the writes later.

The call returns once this rank's tensors are copied into a buffer, which is reused by the next save. A thread then
digests and writes the buffer in blocks of eight megabytes; both operations release the GIL. The thread has a process
group of its own, because collectives of two threads on one group could be matched wrongly.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, final

from accel_ckpt.format.tree import Json, Tree
from accel_ckpt.io.storage import Location, locate
from accel_ckpt.io.thread_pool import Seat, default_threads
from accel_ckpt.loading.checkpoint import Checkpoint, read_manifest
from accel_ckpt.rank_group import RankGroup, Ranks, host_group
from accel_ckpt.saving.failed_exit import UntoldFailure
from accel_ckpt.saving.host_snapshot import HostSnapshot
from accel_ckpt.saving.plan import Draft, RankPart, make_draft, make_part
from accel_ckpt.saving.replicas import Summary, Terms, alike
from accel_ckpt.saving.transaction import MakeDraft, SaveTransaction, open_saved
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from accel_ckpt.series.directory import CheckpointDirectory

_LOG = logging.getLogger(__name__)


@final
class SaveHandle:
    """A save in progress. ``stall`` is the time in seconds for which the call that began it blocked its caller.

    If the save fails and the failure is not raised, by ``wait``, ``raise_failure`` or the saver's next call, the
    process exits with a status other than 0, whatever the script does.
    """

    def __init__(self, path: Location, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self.stall = 0.0
        self.outcome = "no checkpoint was committed"
        """State of ``path`` after a failure."""
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._untold: UntoldFailure | None = None

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "failed" if self._error is not None else "committed"
        return f"SaveHandle({str(self.path)!r}, {state})"

    def done(self) -> bool:
        """Whether the save is committed or has failed."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> Checkpoint:
        """Waits for the commit and returns the checkpoint; ``timeout`` in seconds.

        Raises:
            CheckpointError: the save failed on a rank, or is not committed in time.
        """
        if not self._over.wait(timeout):
            raise CheckpointError(f"{self.path} is not committed after {timeout} s")
        self.raise_failure()
        return open_saved(self.path)

    def raise_failure(self, *, once: bool = False) -> None:
        """Raises the error of the save, if it failed; with ``once`` only if it was not raised before."""
        if self._error is not None and not (once and self._untold is None):
            if self._untold is not None:
                self._untold.told()
                self._untold = None
            raise CheckpointError(self._failure(self._error)) from self._error

    def _failure(self, error: BaseException) -> str:
        return f"saving {self.path} in the background failed: {error}; {self.outcome}"

    def _finish(self, error: BaseException | None) -> None:
        if error is not None:
            self._untold = UntoldFailure(self._failure(error))
        self._error = error
        self._over.set()


@final
class AsyncSaver:
    """Saves in the background, one checkpoint at a time; a context manager that waits for the last save at its end.

    Collective: every rank of the group must call this. The same holds for ``save`` and ``close``. With several ranks it
    creates a gloo group for its thread.
    """

    def __init__(self, *, group: Ranks = None) -> None:
        peers = RankGroup.of(group)
        self._peers = peers if peers.group is None else RankGroup(host_group(peers.group), peers.nodes)
        self._threads = _local_threads(self._peers)
        self._alike = self._closed = False
        self._handle: SaveHandle | None = None
        self._running: Future[None] | None = None
        # Kept for all saves: under load, starting a thread takes longer than the copy.
        self._pool = ThreadPoolExecutor(max(1, self._threads - 1), "accel-ckpt-save")
        self._snapshot = HostSnapshot(self._threads, self._pool)

    def save(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Tree],
        *,
        local: Mapping[str, Tree] | None = None,
        metadata: Mapping[str, Json] | None = None,
        overwrite: bool = True,
        series: "CheckpointDirectory | None" = None,
        terms: Terms = Terms(),  # noqa: B008 (frozen)
    ) -> SaveHandle:
        """Like ``accel_ckpt.save``, but returns once the values are copied; they may change from then on.

        Collective: every rank of the group must call this. Waits for an earlier save that is still in progress. Prunes
        ``series`` after the commit. The first time the ranks compare their states before the copy; as long as the ranks
        have the same tensors, they compare them in the background from then on. With states in ``terms.own`` they
        compare digests before each copy.

        Raises:
            CheckpointError: an earlier save failed and the error was not raised yet, or this save cannot begin, or
                the saver is closed.
        """
        start = time.perf_counter()
        if self._closed:
            raise CheckpointError("this AsyncSaver is closed; make another one")
        self.wait()
        target = locate(path)
        make: MakeDraft = partial(make_draft, state, local, metadata, self._peers, threads=self._threads)
        if self._alike and terms.own and terms.fill is None:
            make = self._compared(target, make)
        begin: _Begin
        part: RankPart | None
        if self._alike and terms.fill is None:
            begin, part = self._copy_first(target, make, overwrite, terms)
        else:
            begin, part = self._agree_first(target, make, overwrite, terms)
        handle = SaveHandle(target, 0 if part is None else part.nbytes)
        self._handle = handle
        self._running = self._pool.submit(self._run, begin, handle, series)
        handle.stall = time.perf_counter() - start
        return handle

    def wait(self) -> None:
        """Waits until no save is in progress.

        Raises:
            CheckpointError: the last save failed and the error was not raised yet.
        """
        if self._running is not None:
            self._running.result()
            self._running = None
        if self._handle is not None:
            self._handle.raise_failure(once=True)

    def close(self) -> None:
        """Waits for the last save, frees threads and buffer, and closes the group.

        Collective: every rank of the group must call this.
        """
        try:
            self.wait()
        finally:
            self._closed = True
            self._pool.shutdown()
            self._snapshot.free()
            if self._peers.group is not None:
                import torch.distributed as dist

                if dist.is_initialized():
                    dist.destroy_process_group(self._peers.group)
                self._peers = RankGroup(None)

    def __enter__(self) -> "AsyncSaver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except CheckpointError:
            if kind is None or issubclass(kind, SystemExit):  # a status of 0 would hide it
                raise
            _LOG.exception("a save under way failed too")  # the first exception is raised instead

    def _compared(self, target: Location, make: MakeDraft) -> MakeDraft:
        """Compares digests of the ranks before the copy, because states that a rank keeps as its own are copied too."""
        drafts: list[Draft] = []

        def summary() -> Summary:
            drafts.append(make(()))
            return drafts[0].structure.summary()

        self._alike = alike(self._peers.run_on_all(f"saving {target}", summary))
        return lambda apart: make(apart) if apart else drafts[0]

    def _agree_first(
        self, target: Location, make: MakeDraft, overwrite: bool, terms: Terms
    ) -> "tuple[_Begin, RankPart]":
        """Begins the save and copies; a state that cannot be saved raises now, on all ranks."""
        transaction = SaveTransaction.begin(self._peers, target, make, overwrite=overwrite, terms=terms)
        with transaction.dropped_on_error():
            self._peers.run_on_all(f"copying for {target}", lambda: self._snapshot.take(transaction.part.tensors))
        return (lambda: transaction), transaction.part

    def _copy_first(
        self, target: Location, make: MakeDraft, overwrite: bool, terms: Terms
    ) -> "tuple[_Begin, RankPart | None]":
        """Copies first and begins the save in the background, for ranks that had the same tensors at the last save.

        An error is raised in the background too, on all ranks: raising it here, on one rank, would leave that rank out
        of step.
        """
        try:
            draft = make(())
            part = make_part(draft, draft.trees, None, self._peers)
            self._snapshot.take(part.tensors)
        except Exception as error:
            return partial(SaveTransaction.begin, self._peers, target, partial(_fail, error)), None
        begin = partial(SaveTransaction.begin, self._peers, target, lambda apart: draft, overwrite=overwrite, part=part)
        return partial(begin, terms=terms), part

    def _run(self, begin: "_Begin", handle: SaveHandle, series: "CheckpointDirectory | None") -> None:
        error: BaseException | None = None
        transaction: SaveTransaction | None = None
        try:
            self._alike = False  # until all ranks have agreed again
            transaction = begin()
            self._alike = transaction.alike and self._peers.group is not None
            handle.path = transaction.target
            transaction.finish(self._peers, partial(self._file, transaction.part), threads=0)
            if series is not None:
                series.among(self._peers).prune()
        except BaseException as caught:
            error = caught
            handle.outcome = _outcome(handle.path, transaction)
            _LOG.warning("saving %s in the background failed: %s; %s", handle.path, caught, handle.outcome)
        finally:
            handle._finish(error)
            self._snapshot.pin()

    def _file(self, part: RankPart) -> Iterator[memoryview]:
        return iter([memoryview(part.header), self._snapshot.read(part.nbytes)])


_Begin = Callable[[], SaveTransaction]


def _fail(error: Exception, apart: Collection[str]) -> Draft:
    raise error


def _outcome(path: Location, transaction: SaveTransaction | None) -> str:
    """Describes whether a failed save committed its checkpoint: ranks may fail later, in pruning or at the end."""
    try:
        committed = transaction is not None and read_manifest(path).id == transaction.label.id
    except CheckpointError:
        committed = False
    return "its checkpoint is committed nevertheless" if committed else "no checkpoint was committed"


def _local_threads(peers: RankGroup) -> int:
    """Returns this rank's share of its machine's CPUs.

    Collective: every rank of the group must call this.
    """
    seats = peers.run_on_all("counting the ranks of each machine", Seat.own)
    return seats[peers.rank].threads(seats, default_threads())
