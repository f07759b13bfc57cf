"""Saving of checkpoints of an Accelerator, by all ranks or by the main rank alone."""

import logging
import os
from abc import ABC
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel.checkpoints import partial_accumulation as open_window
from accel.checkpoints.load_report import RNG
from accel.checkpoints.metrics_of_saves import SaveMetrics
from accel.checkpoints.run_facts import COMPANIONS_KEY, SEED_KEY, USER_KEY
from accel.checkpoints.save_quorum import Attendance
from accel.checkpoints.train_state import LoaderState, ModelState
from accel.facets.checkpoints import CheckpointFacet
from accel_observe.meters.phases import observed
from accel_state.errors import ConfigError
from accel_state.watchdog.decorator import recorded

if TYPE_CHECKING:
    from weakref import WeakSet

    from accel_ckpt import CheckpointDirectory, SaveHandle, Terms
    from accel_ckpt.io.storage import Location

_LOG = logging.getLogger(__name__)


class SavingFacet(CheckpointFacet, ABC):
    """Collects the run's state and passes it to accel_ckpt, which commits it."""

    _trained_apart: "WeakSet[nn.Module]"
    _attendance: Attendance | None = None
    _warned_of_absence: bool = False
    _warned_unmeasured: bool = False
    _swept: bool = False
    last_save: "SaveHandle | None" = None
    """Handle of the last asynchronous save: whether it is done, and how long it blocked the loop."""

    @observed("saved")
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
    ) -> "Location":
        """Saves all state that resuming needs, and returns the folder, which exists only once it is complete.

        Saved are models, optimizers, schedulers, loss scaler, positions of the loaders, accumulation clock, registered
        objects and the random state of every rank; ``metadata`` is the caller's own JSON. With automatic checkpoint
        naming ``output_dir`` is ignored, and old checkpoints are pruned after the commit. Locations are folders on a
        disk that all processes share, or URLs of any file system that fsspec knows (``accel-ckpt[remote]``). With
        ``ProjectConfiguration.save_on_each_node`` they are folders on each node's own disk, which receives a full copy.

        ``metrics`` are numbers by name, measured on the saved state; those of the main process count. ``accel ckpt ls``
        shows them, and ``ProjectConfiguration(keep_best=..., metric=...)`` keeps the best checkpoints by one of them.

        Collective: every rank of the group must call this. If every process holds the full state, the main process may
        also call it alone: the first time it waits until the others have evidently gone past, warns that it saves
        without them, and does not save their random state.

        With ``asynchronous`` the call returns once the values are copied, and they are written while training
        continues. One save runs at a time, a failure is raised by the next call, and leaving waits (see ``last_save``).
        A failure that no call has raised makes the process end with a status other than 0.

        Raises:
            CheckpointError: the checkpoint cannot be written, or an earlier asynchronous save failed (committed
                checkpoints are intact); or other processes are absent whose state the save needs; or gradients of a
                full window have not been stepped yet, which the checkpoint would lose.
            ConfigError: neither ``output_dir`` nor automatic checkpoint naming is given, or ``metrics`` are not
                numbers, or lack the metric by which the best are kept.
        """
        self._wait_for_save()
        self._check_place(output_dir)
        notes = SaveMetrics(metadata or {}, metrics, self.project_configuration)
        if not self._missing():
            target = self._save_together(output_dir, notes, asynchronous=asynchronous)
        elif self.session.is_main_process:
            target = self._save_alone(output_dir, notes)
        else:
            series = self._series()
            from accel_ckpt.io.storage import locate

            return series.path if series is not None else locate(output_dir or "")
        self._continue_numbering(target)
        return target

    @recorded("save_state")
    def _save_together(
        self, output_dir: str | os.PathLike[str] | None, notes: SaveMetrics, *, asynchronous: bool
    ) -> "Location":
        import accel_ckpt

        series, target = self._place(output_dir, alone=False)
        if self.backend.loss_scale is not None:
            self.backend.loss_scale.update(hold=self.clock.open)
        self.backend.states.sync_buffers(self._models)
        state, local = self._collect(notes, alone=False)
        described = self._described(notes)
        # If two runs save into one project at the same time, one takes the number, and the other gets an error.
        overwrite, terms = series is None, self._terms(state)
        if asynchronous:
            if self._saver is None:
                self._saver = accel_ckpt.AsyncSaver(group=self._ranks())
            self.last_save = self._saver.save(
                target,
                state,
                local=local,
                metadata=described,
                overwrite=overwrite,
                series=series,
                terms=terms,
            )
            return self.last_save.path
        group = self._ranks()
        target = accel_ckpt.save(
            target,
            state,
            local=local,
            metadata=described,
            group=group,
            overwrite=overwrite,
            terms=terms,
        ).path
        if series is not None:
            series.prune()
        return target

    def _save_alone(self, output_dir: str | os.PathLike[str] | None, notes: SaveMetrics) -> "Location":
        """Saves on the main process only, after the others were found absent; waits for no other rank."""
        import accel_ckpt

        series, target = self._place(output_dir, alone=True)
        if self.backend.loss_scale is not None:
            self.backend.loss_scale.update(hold=self.clock.open)
        state, local = self._collect(notes, alone=True)
        described = self._described(notes)
        target = accel_ckpt.save(
            target,
            state,
            local=local,
            metadata=described,
            group=None,
            overwrite=series is None,
            alone=True,
            terms=self._terms(state),
        ).path
        if series is not None:
            series.prune()
        return target

    def _missing(self) -> tuple[int, ...]:
        """Ranks that are absent from this save, which does not need them.

        Raises:
            CheckpointError: the save needs the absent ranks.
        """
        if self._attendance is None:
            return ()
        reasons = {
            f"each rank holds a part only ({self.backend.name})": self.backend.capabilities.sharded,
            "a window is open": self.clock.open,
            "each machine keeps a copy (save_on_each_node)": self._keeps_copies(),
        }
        missing = self._attendance.missing_but_for(next((text for text, holds in reasons.items() if holds), None))
        if missing and not self._warned_of_absence:
            self._warned_of_absence = True
            _LOG.warning(
                "%s did not come to save_state, so rank 0 saves alone: the random state of the others is not in the "
                "checkpoint, and nothing is written in the background. Call it on all processes, not under "
                "`if accelerator.is_main_process:`",
                ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing)),
            )
        return missing

    def _check_place(self, output_dir: str | os.PathLike[str] | None) -> None:
        if output_dir is None and not self.project_configuration.automatic_checkpoint_naming:
            raise ConfigError(
                "save_state needs a folder: give output_dir, or "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
            )

    def _place(
        self, output_dir: str | os.PathLike[str] | None, *, alone: bool
    ) -> "tuple[CheckpointDirectory | None, Location]":
        """Location of the save: the next free number of the series, if there is one, otherwise the given location."""
        series = self._series()
        if series is None:
            assert output_dir is not None
            from accel_ckpt.io.storage import locate

            return None, locate(output_dir)
        if alone:
            series = series.alone()
        if not self._swept:
            self._swept = True
            for leftover in series.sweep():
                _LOG.info("removed what a killed save had left: %s", leftover)
        return series, series.next_path(at_least=self.project_configuration.iteration)

    def _collect(self, notes: SaveMetrics, *, alone: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Collects the state common to all ranks, and this rank's own.

        Collective: every rank of the group must call this. With ``alone``, it is local. A user's object may fail on one
        rank only, which becomes an error on all ranks before the next collective.
        """
        from accel_ckpt.rank_group import RankGroup
        from accel_state import rng

        parts, peers = self._train_state(), RankGroup(None) if alone else RankGroup.of(self._ranks())
        state: dict[str, Any] = {}

        def collect() -> bool:
            notes.check()
            state.update(parts.collect())
            return self.clock.unstepped and bool(self._optimizers)

        if any(peers.together("collecting the state to save", collect)):
            held = open_window.collect(self.backend, self._models)
            peers.together("looking for gradients", lambda: open_window.refuse(held))
        if self.session.is_main_process:
            self._warn_of_metrics(notes)
        local: dict[str, Any] = {RNG: rng.rng_state()}
        positions = {name: part.private() for name, part in parts.items() if isinstance(part, LoaderState)}
        local.update({name: own for name, own in positions.items() if own is not None})
        if self.clock.open:
            local[open_window.GRADIENTS] = open_window.collect(self.backend, self._models)
        return state, local

    def _warn_of_metrics(self, notes: SaveMetrics) -> None:
        warning = notes.warning()
        if warning is not None and not (notes.metrics is None and self._warned_unmeasured):
            self._warned_unmeasured = self._warned_unmeasured or notes.metrics is None
            _LOG.warning("%s", warning)

    def _described(self, notes: SaveMetrics) -> dict[str, Any]:
        """Metadata that describes the run in its checkpoint."""
        return {
            **self._run_facts().document(),
            SEED_KEY: torch.initial_seed(),
            USER_KEY: dict(notes.metadata),
            **notes.document(),
            COMPANIONS_KEY: {name: one.save() for name, one in self._companions().items()},
        }

    def _terms(self, state: dict[str, Any]) -> "Terms":
        """Options of a save that differ between ranks; user hooks run once there is a folder for their files."""
        fill = partial(self._run_save_hooks, state) if self._save_hooks else None
        return self._train_state().terms(fill, apart=self._trained_apart)

    def _run_save_hooks(self, state: dict[str, Any], target: "Location") -> None:
        """Runs the save hooks; weights that they remove from their list are left out of the checkpoint."""
        names = [name for name, part in self._train_state().items() if isinstance(part, ModelState)]
        weights = [state[name] for name in names]
        kept = list(weights)
        for hook in list(self._save_hooks.values()):
            hook(self._models, kept, str(target))
        for name, one in zip(names, weights, strict=True):
            if not any(one is other for other in kept):
                del state[name]
