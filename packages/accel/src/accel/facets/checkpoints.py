"""An Accelerator's checkpoints: saving and loading everything that must resume."""

import json
import logging
import os
from abc import ABC
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accel import open_window
from accel.attendance import Attendance
from accel.clock import StepClock
from accel.handlers import ProjectConfiguration
from accel.meters.phases import observed
from accel.optimizer import PreparedOptimizer
from accel.restoring import RNG, SEED_KEY, Restoration, restore_local
from accel.scheduler import PreparedScheduler
from accel.train_state import Companion, LoaderState, ModelState, OptimizerState, Stateful, TrainState, check_stateful
from accel_ckpt.storage import Location, locate
from accel_state.doctor.active import recorded
from accel_state.errors import CheckpointCorruptError, CheckpointError, ConfigError

if TYPE_CHECKING:
    from weakref import WeakSet

    from accel.config.model import AccelConfig
    from accel_backends import Backend
    from accel_ckpt import AsyncSaver, Checkpoint, CheckpointDirectory, PerNode, SaveHandle, Terms
    from accel_ckpt.peers import Ranks
    from accel_state.session import Session

_LOG = logging.getLogger(__name__)

SaveHook = Callable[[list[nn.Module], list[Any], str], object]
LoadHook = Callable[[list[nn.Module], str], object]
MODEL, FOLDER, LATEST = "model", "checkpoints", "latest"
VERSION_KEY, USER_KEY, COMPANIONS_KEY = "accel", "user", "companions"
CONFIG_KEY, TOPOLOGY_KEY, STRATEGY_KEY = "config", "topology", "strategy"
_TOPOLOGY = ("world_size", "local_world_size", "num_nodes", "launcher")


class CheckpointFacet(ABC):
    """Collects the run's state under stable names and hands it to accel_ckpt, which knows how to commit it."""

    session: "Session"
    clock: StepClock
    backend: "Backend"
    config: "AccelConfig"
    project_configuration: ProjectConfiguration
    _models: list[nn.Module]
    _optimizers: list[PreparedOptimizer]
    _schedulers: list[PreparedScheduler]
    _dataloaders: list[Any]
    _custom_objects: list[Stateful]
    _trained_apart: "WeakSet[nn.Module]"
    _save_hooks: "OrderedDict[int, SaveHook]"
    _load_hooks: "OrderedDict[int, LoadHook]"
    _saver: "AsyncSaver | None" = None
    _machines: "PerNode | None" = None
    _attendance: Attendance | None = None
    _warned_of_absence: bool = False
    _swept: bool = False
    last_save: "SaveHandle | None" = None
    """The last asynchronous save: whether it is done, how long it held up the loop."""

    def _companions(self) -> Mapping[str, Companion]:
        """What goes with a checkpoint, by name; made anew each time, as it refers to the Accelerator."""
        return {}

    def register_for_checkpointing(self, *objects: Stateful) -> None:
        """Makes ``save_state`` and ``load_state`` include these objects.

        Loading asks for their ``state_dict`` as well: it is put back if another part refuses what was saved.

        Raises:
            ConfigError: an object has no ``state_dict`` and ``load_state_dict``; none of them is registered then.
        """
        check_stateful(objects)
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Calls ``hook(models, weights, output_dir)`` before saving; weights it takes off the list are not saved.

        What it writes into ``output_dir``, in subfolders too, becomes part of the checkpoint: it is digested, committed
        with the rest by one rename, and a load hook finds it in ``input_dir``. Until then the folder has a hidden
        name. Processes that share a disk share the folder, so of one file the last writer's is kept: let the main
        process write, or name files by rank. A URL is given as it is, and what is written there is not covered.
        """
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Calls ``hook(models, input_dir)`` before each load; models it drops from the list are not loaded."""
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    @observed("saved")
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
    ) -> Location:
        """Saves everything that must resume, and returns the folder, which exists only once it is complete.

        Models, optimizers, schedulers, loss scaler, positions of the loaders, accumulation clock, registered objects
        and the random state of every rank; ``metadata`` is the caller's own JSON. To be called on all processes. With
        automatic checkpoint naming ``output_dir`` is ignored, and old checkpoints are pruned after the commit. Places
        are folders that all processes see, or URLs of any file system that fsspec knows (``accel-ckpt[remote]``). With
        ``ProjectConfiguration.save_on_each_node`` they are folders on each machine's own disk, which gets all of it.

        Where every process holds all of the state, the main one alone may call too: it waits the first time until
        the others have evidently gone past, warns that it saves without them, and their random state is not saved.

        With ``asynchronous`` the call returns once the values are copied, and they are written while training goes
        on: one save at a time, a failure is raised by the next call, and leaving waits (``last_save`` tells more).

        Raises:
            CheckpointError: it cannot be written, or an earlier asynchronous save failed; checkpoints committed
                before are intact; or other processes did not come, and it cannot do without them.
            ConfigError: neither ``output_dir`` nor automatic checkpoint naming is given.
        """
        self._wait_for_save()
        self._check_place(output_dir)
        if not self._missing():
            target = self._save_together(output_dir, metadata, asynchronous=asynchronous)
        elif self.session.is_main_process:
            target = self._save_alone(output_dir, metadata)
        else:
            series = self._series()
            return series.path if series is not None else locate(output_dir or "")
        self._continue_numbering(target)
        return target

    @recorded("save_state")
    def _save_together(
        self, output_dir: str | os.PathLike[str] | None, metadata: Mapping[str, Any] | None, *, asynchronous: bool
    ) -> Location:
        import accel_ckpt

        series, target = self._place(output_dir, alone=False)
        self.backend.update_scaler(hold=self.clock.open)
        self.backend.settle_buffers(self._models)
        state, local = self._collect(alone=False)
        described = self._described(metadata)
        # Of two runs that save in one project at the same time, one takes the number, and the other gets an error.
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

    def _save_alone(self, output_dir: str | os.PathLike[str] | None, metadata: Mapping[str, Any] | None) -> Location:
        """Saves on the main process only, after the others did not come; nothing here waits for them."""
        import accel_ckpt

        series, target = self._place(output_dir, alone=True)
        self.backend.update_scaler(hold=self.clock.open)
        state, local = self._collect(alone=True)
        described = self._described(metadata)
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
        """The ranks that did not come to this save, if those that did can do without them.

        Raises:
            CheckpointError: they cannot.
        """
        if self._attendance is None:
            return ()
        reasons = {
            f"each rank holds a part only ({self.backend.name})": self.backend.capabilities.sharded,
            "a window is open": self.clock.open,
            "each machine keeps a copy (save_on_each_node)": self._keeps_copies(),
        }
        reason = next((text for text, holds in reasons.items() if holds), None)
        missing = self._attendance.missing(all_needed=reason is not None)
        if not missing:
            return ()
        absent = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
        if reason is not None:
            places = "".join(f"\n  {place.text}" for rank, place in self._attendance.places.items() if rank in missing)
            raise CheckpointError(
                f"{absent} did not come to save_state, and it cannot do without them: {reason}. Call it on all "
                f"processes, not under `if accelerator.is_main_process:`{places}"
            )
        if not self._warned_of_absence:
            self._warned_of_absence = True
            _LOG.warning(
                "%s did not come to save_state, so rank 0 saves alone: the random state of the others is not in the "
                "checkpoint, and nothing is written in the background. Call it on all processes, not under "
                "`if accelerator.is_main_process:`",
                absent,
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
        """Where to save: the next free number of the series, if there is one, else what was given."""
        series = self._series()
        if series is None:
            assert output_dir is not None
            return None, locate(output_dir)
        if alone:
            series = series.alone()
        if not self._swept:
            self._swept = True
            for leftover in series.sweep():
                _LOG.info("removed what a killed save had left: %s", leftover)
        return series, series.next_path(at_least=self.project_configuration.iteration)

    def _collect(self, *, alone: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the ranks have in common, and this one's own. Collective unless ``alone``.

        Objects of the user may fail on one rank only, which is an error on all before the next collective.
        """
        from accel_ckpt.peers import Peers
        from accel_state import rng

        parts, peers = self._train_state(), Peers(None) if alone else Peers.of(self._ranks())
        state: dict[str, Any] = {}
        peers.together("collecting the state to save", lambda: state.update(parts.collect()))
        local: dict[str, Any] = {RNG: rng.rng_state()}
        positions = {name: part.private() for name, part in parts.items() if isinstance(part, LoaderState)}
        local.update({name: own for name, own in positions.items() if own is not None})
        if self.clock.open:
            local[open_window.GRADIENTS] = open_window.collect(self.backend, self._models)
        return state, local

    def _described(self, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        """What a checkpoint says of the run that saved it."""
        return {
            VERSION_KEY: _version(),
            SEED_KEY: _seed(),
            USER_KEY: dict(metadata or {}),
            CONFIG_KEY: json.loads(self.config.to_document()),
            TOPOLOGY_KEY: {name: getattr(self.session.topology, name) for name in _TOPOLOGY},
            STRATEGY_KEY: self.backend.name,
            COMPANIONS_KEY: {name: one.save() for name, one in self._companions().items()},
        }

    def _wait_for_save(self) -> None:
        if self._saver is not None:
            self._saver.wait()

    @observed("loaded")
    @recorded("load_state")
    def load_state(self, input_dir: str | os.PathLike[str] | None = None, *, strict: bool = True) -> Location:
        """Puts everything back as ``save_state`` found it, on any number of processes, and returns the folder read.

        ``input_dir`` None or ``"latest"`` takes the newest intact checkpoint of the project's automatic ones. Ranks
        that did not exist when it was saved derive their random state from it. ``strict=False`` tolerates parameters
        that are missing or left over.

        Raises:
            CheckpointError: there is no such checkpoint, a file of it is damaged, or it belongs to other objects.
                A mismatch, and a file that is missing or of another size, are found before anything has changed. A
                block whose bytes have changed is found when it is read into the parameters: models and optimizers
                hold a part of the checkpoint then, as the error says, until another ``load_state`` succeeds.
        """
        self._wait_for_save()
        with self._loaded(input_dir, strict=strict) as checkpoint:
            restore_local(checkpoint, self.session, self.backend, self._models, self.clock)
            noted = checkpoint.metadata.get(COMPANIONS_KEY) or {}
            for name, companion in self._companions().items():
                companion.load(noted.get(name))
        self._continue_numbering(checkpoint.path)
        return checkpoint.path

    def _read(self, checkpoint: "Checkpoint", *, strict: bool) -> Restoration:
        models = list(self._models)
        for hook in list(self._load_hooks.values()):
            hook(models, str(checkpoint.path))
        dropped = [model for model in self._models if not any(model is kept for kept in models)]
        parts = self._train_state(strict=strict)
        ignored = {name for name, part in parts.items() if isinstance(part, ModelState) and part.model in dropped}
        # Without strict a checkpoint may lack parameters, which would keep the values of a damaged one read before.
        in_place = strict and self.backend.capabilities.loads_in_place
        return Restoration.read(checkpoint, parts, self.session, self._ranks(), ignored=ignored, in_place=in_place)

    def _train_state(self, *, strict: bool = True) -> TrainState:
        state = TrainState()
        state.add(MODEL, [ModelState(self.backend, model, strict) for model in self._models])
        state.add("optimizer", [OptimizerState(self.backend, o.optimizer, self._models) for o in self._optimizers])
        state.add("scheduler", self._schedulers)
        state.add("loader", [LoaderState(loader) for loader in self._dataloaders])
        state.add("scaler", self.backend.loss_scales)
        state.add("clock", [self.clock])
        return state.add("custom", self._custom_objects)

    def _terms(self, state: dict[str, Any]) -> "Terms":
        """What a save does where ranks differ; hooks of the user run once there is a folder for their files."""
        fill = partial(self._run_save_hooks, state) if self._save_hooks else None
        return self._train_state().terms(fill, apart=self._trained_apart)

    def _run_save_hooks(self, state: dict[str, Any], target: Location) -> None:
        """Lets hooks take weights out; what is gone from their list is gone from the checkpoint."""
        names = [name for name, part in self._train_state().items() if isinstance(part, ModelState)]
        weights = [state[name] for name in names]
        kept = list(weights)
        for hook in list(self._save_hooks.values()):
            hook(self._models, kept, str(target))
        for name, one in zip(names, weights, strict=True):
            if not any(one is other for other in kept):
                del state[name]

    def _series(self) -> "CheckpointDirectory | None":
        """The project's automatic checkpoints, when it has them."""
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            return None
        if project.project_dir is None:
            raise ConfigError("automatic_checkpoint_naming needs a project_dir to put the checkpoints in")
        from accel_ckpt import CheckpointDirectory, keep_all, keep_last

        retention = keep_all() if project.total_limit is None else keep_last(project.total_limit)
        return CheckpointDirectory(locate(project.project_dir) / FOLDER, retention=retention, group=self._ranks())

    def _keeps_copies(self) -> bool:
        """Whether each of several machines keeps a copy of every checkpoint."""
        return self.project_configuration.save_on_each_node and self.session.topology.num_nodes > 1

    def _ranks(self) -> "Ranks":
        """Who saves and loads together, and on which disks. Collective the first time."""
        if not self._keeps_copies():
            return self.session.live_group()
        if self._machines is None:
            from accel_ckpt import PerNode

            self._machines = PerNode(self.session.live_group(), node=self.session.topology.node_rank)
        return self._machines

    def _loaded(self, input_dir: str | os.PathLike[str] | None, *, strict: bool) -> "Checkpoint":
        """The checkpoint that ``input_dir`` names, or the newest intact one, loaded.

        Hooks are shown none that is damaged, so where there are any every byte is compared before they are called.
        """
        from accel_ckpt import open_checkpoint

        verify = bool(self._load_hooks)
        damaged: list[str] = []

        def load(checkpoint: "Checkpoint") -> "Checkpoint":
            with ExitStack() as failing:
                failing.callback(checkpoint.close)
                restoration = self._read(checkpoint, strict=strict)
                try:
                    restoration.apply()
                except CheckpointCorruptError as error:
                    damaged.append(str(error))
                    raise
                failing.pop_all()
            return checkpoint

        if input_dir is not None and os.fspath(input_dir) != LATEST:
            return load(open_checkpoint(locate(input_dir), verify=verify, group=self._ranks()))
        series = self._series()
        if series is None:
            raise ConfigError(
                "No input_dir provided and automatic checkpoint naming is disabled; give the checkpoint's folder"
            )
        try:
            latest = series.latest(None if verify else load)
        except Exception as error:
            for text in damaged[-1:]:
                error.add_note(f"before that, a damaged checkpoint was loaded in part: {text}")
            raise
        if latest is None:
            from accel_ckpt.foreign import advice_on_series

            text = f"there is no intact checkpoint in {series.path}{advice_on_series(series.path)}"
            raise CheckpointError("; ".join([text, *damaged[-1:]]))
        if verify:
            load(latest)
        return latest

    def _continue_numbering(self, path: Location) -> None:
        """The next automatic checkpoint follows the one that was saved or loaded."""
        prefix, _, number = path.name.rpartition("_")
        if self.project_configuration.automatic_checkpoint_naming and prefix == "checkpoint" and number.isdigit():
            self.project_configuration.iteration = int(number) + 1


def _seed() -> int:
    return torch.initial_seed()


def _version() -> str:
    from accel._version import __version__

    return __version__
