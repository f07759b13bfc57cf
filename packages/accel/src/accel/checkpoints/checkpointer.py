"""Saving and loading of a run: its state under stable names, hooks, and background saves."""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils.hooks import RemovableHandle

from accel.checkpoints.gradients import (
    collected_gradients,
    data_shards,
    has_gradients_of_later_steps,
    uncleared_optimizers,
    zero_gradients,
)
from accel.checkpoints.load_report import RNG, LoadOptions, LoadReport
from accel.checkpoints.requests import LoadRequest, SaveRequest
from accel.checkpoints.restore import Restoration
from accel.checkpoints.run_facts import COMPANIONS_KEY, SEED_KEY, UNKNOWN_KEY, USER_KEY, RunDescription, section
from accel.checkpoints.state_hooks import LoadHook, SaveHook, run_load_hooks, run_save_hooks
from accel.checkpoints.train_state import (
    ClockState,
    LoaderState,
    SideState,
    Stateful,
    TrainState,
    check_stateful,
)
from accel_backends.roles import unreduced_gradients
from accel_backends.roles.prepared_states import ModelState, OptimizerState
from accel_ckpt.saving.save_quorum import SaveQuorum
from accel_ckpt.series.project import ProjectCheckpoints
from accel_state.errors import CheckpointCorruptError, CheckpointError, ConfigError
from accel_state.watchdog.decorator import Recording, recorded

if TYPE_CHECKING:
    from accel.loop.accumulator import StepClock
    from accel.loop.loaders import Loaders
    from accel.prepared import PreparedObjects
    from accel.setup.run_strategy import RunStrategy
    from accel_ckpt import AsyncSaver, Checkpoint, SaveHandle
    from accel_ckpt.io.storage import Location
    from accel_ckpt.series.project import ProjectConfiguration
    from accel_ckpt.series.save_metrics import SaveMetrics
    from accel_launch.config.model import AccelConfig
    from accel_observe.meters.observed_run import RunLog

_LOG = logging.getLogger(__name__)


@final
class Checkpointer:
    """Collects the run's state and passes it to accel_ckpt, and restores it from there.

    Args:
        side_states: optional states of a checkpoint, by name.

    Attributes:
        last_save: handle of the last asynchronous save.
        last_load: report of the last load.
    """

    def __init__(
        self,
        strategy: "RunStrategy",
        prepared: "PreparedObjects",
        clock: "StepClock",
        loaders: "Loaders",
        config: "AccelConfig",
        project: "ProjectConfiguration",
        log: "RunLog",
        side_states: Mapping[str, SideState],
    ) -> None:
        self._strategy = strategy
        self._prepared = prepared
        self._clock = clock
        self._loaders = loaders
        self._config = config
        self._project = project
        self._log = log
        self._side_states = {**side_states, "uncleared": uncleared_optimizers(prepared, clock)}
        self._places = ProjectCheckpoints(strategy.session, project)
        self._quorum = SaveQuorum.of(strategy.session)
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._saver: AsyncSaver | None = None
        self._warned_of_absence = self._warned_unmeasured = False
        self.last_save: SaveHandle | None = None
        self.last_load: LoadReport | None = None

    def register(self, objects: tuple[Stateful, ...]) -> None:
        """See ``Accelerator.register_for_checkpointing``."""
        check_stateful(objects)
        self._prepared.custom.extend(objects)

    def add_save_hook(self, hook: SaveHook) -> RemovableHandle:
        """See ``Accelerator.register_save_state_pre_hook``."""
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def add_load_hook(self, hook: LoadHook) -> RemovableHandle:
        """See ``Accelerator.register_load_state_pre_hook``."""
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def wait(self) -> None:
        """Waits for a background save, and raises its failure."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Finishes a background save."""
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()

    # Saving

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
    ) -> "Location":
        """See ``Accelerator.save_state``."""
        import accel_ckpt
        from accel_ckpt.series.save_metrics import SaveMetrics

        with self._log.checkpointing("saved") as tell:
            self.wait()
            notes = SaveMetrics({} if metadata is None else metadata, metrics, self._places.best)
            alone = bool(self._missing())
            if alone and not self._strategy.session.is_main_process:
                self._check_place(output_dir)
                location = self._where_others_save(output_dir)
                tell(location)
                return location
            with nullcontext() if alone else Recording("save_state"):
                state: dict[str, Any] = {}
                about: dict[str, Any] = {}

                def collect() -> SaveRequest:
                    self._check_place(output_dir)
                    notes.check()
                    about.update(self._described(notes))
                    parts, unstepped = self.train_state(), self._clock.unstepped and bool(self._prepared.optimizers)
                    state.update(parts.collect())
                    return SaveRequest(
                        tuple(parts),
                        asynchronous,
                        hooked=bool(self._save_hooks),
                        unstepped=unstepped,
                        gradients=has_gradients_of_later_steps(self._strategy.backend, self._prepared),
                        zeros=zero_gradients(self._prepared),
                    )

                request, local = self._collect(collect, alone=alone)
                if self._strategy.session.is_main_process:
                    self._warn_of_metrics(notes)
                series, target = self._places.next(output_dir, alone=alone)
                options: dict[str, Any] = {
                    "local": local,
                    "metadata": about,
                    # If two runs save into one project at the same time, one takes the number, the other gets an error.
                    "overwrite": series is None,
                    "terms": self.train_state().terms(
                        partial(self._run_save_hooks, state) if request.hooked else None,
                        apart=self._prepared.trained_apart,
                        sharded=self._strategy.backend.capabilities.sharded,
                    ),
                }
                if asynchronous and not alone:
                    if self._saver is None:
                        self._saver = accel_ckpt.AsyncSaver(group=self._places.ranks())
                    self.last_save = self._saver.save(target, state, series=series, **options)
                    target = self.last_save.path
                else:
                    group = None if alone else self._places.ranks()
                    target = accel_ckpt.save(target, state, group=group, alone=alone, **options).path
                    if series is not None:
                        series.prune()
            self._places.continue_after(target, saved=True)
            tell(target)
            return target

    def _where_others_save(self, output_dir: str | os.PathLike[str] | None) -> "Location":
        from accel_ckpt.io.storage import locate

        series = self._places.series()
        return series.path if series is not None else locate(output_dir or "")

    def _missing(self) -> tuple[int, ...]:
        """Ranks that are absent from this save, which does not need them.

        Raises:
            CheckpointError: the save needs the absent ranks.
        """
        if self._quorum is None:
            return ()
        backend = self._strategy.backend
        reasons = {
            f"each rank holds a part only ({backend.name})": backend.capabilities.sharded,
            "a window is open": self._clock.open,
            "a later step uses gradients": has_gradients_of_later_steps(backend, self._prepared),
            "each machine keeps a copy (save_on_each_node)": self._places.keeps_copies,
        }
        missing = self._quorum.missing_but_for(next((text for text, holds in reasons.items() if holds), None))
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
        from accel_ckpt.io.storage import locate

        if self._project.automatic_checkpoint_naming:
            return
        if output_dir is not None:
            locate(output_dir)
        else:
            raise ConfigError(
                "save_state needs a folder: give output_dir, or "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
            )

    def _collect(self, collect: Callable[[], SaveRequest], *, alone: bool) -> tuple[SaveRequest, dict[str, Any]]:
        """Collects the state common to all ranks, by ``collect``, and returns this rank's own.

        Collective: every rank of the group must call this. With ``alone``, it is local. A user's object may fail on one
        rank only, which becomes an error on all ranks before the next collective.
        """
        from accel_ckpt.rank_group import RankGroup
        from accel_state import rng

        backend, models, clock = self._strategy.backend, self._prepared.models, self._clock
        if backend.loss_scale is not None:
            backend.loss_scale.update(hold=clock.open)
        if not alone:
            backend.states.sync_buffers(models)
        peers = RankGroup(None) if alone else RankGroup.of(self._places.ranks())
        request = SaveRequest.agreed(peers.run_on_all("collecting the state to save", collect))
        if request.unstepped:
            held = unreduced_gradients.collect(backend, models)
            peers.run_on_all("looking for gradients", lambda: unreduced_gradients.refuse(held))
        local: dict[str, Any] = {RNG: rng.rng_state()}
        positions = {name: part.private() for name, part in self.train_state().items() if isinstance(part, LoaderState)}
        local.update({name: own for name, own in positions.items() if own is not None})
        local.update(collected_gradients(backend, self._prepared, clock, request))
        return request, local

    def _warn_of_metrics(self, notes: "SaveMetrics") -> None:
        warning = notes.warning()
        if warning is not None and not (notes.metrics is None and self._warned_unmeasured):
            self._warned_unmeasured = self._warned_unmeasured or notes.metrics is None
            _LOG.warning("%s", warning)

    def _described(self, notes: "SaveMetrics") -> dict[str, Any]:
        """Metadata that describes the run in its checkpoint."""
        return {
            **self._run_facts().document(),
            SEED_KEY: torch.initial_seed(),
            USER_KEY: dict(notes.metadata),
            **notes.document(),
            COMPANIONS_KEY: {name: one.save() for name, one in self._side_states.items()},
        }

    def _run_save_hooks(self, state: dict[str, Any], target: "Location") -> None:
        names = [name for name, part in self.train_state().items() if isinstance(part, ModelState)]
        run_save_hooks(list(self._save_hooks.values()), self._prepared.models, names, state, str(target))

    # Loading

    @recorded("load_state")
    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        *,
        strict: bool = True,
        parts: str | Iterable[str] | None = None,
        allow_changed_data: bool | None = None,
    ) -> "Location":
        """See ``Accelerator.load_state``."""
        with self._log.checkpointing("loaded") as tell, _outside_inference_mode():
            self.wait()
            request = self._agreed_request(input_dir, strict, parts, allow_changed_data)
            options = request.options
            checkpoint, restoration = self._loaded(request)
            if options.parts is None:
                noted = section(checkpoint.metadata, COMPANIONS_KEY)
                for name, companion in self._side_states.items():
                    companion.load(noted.get(name))
                self._places.continue_after(checkpoint.path, saved=False)
            self.last_load = restoration.report(self._run_facts())
            tell(checkpoint.path)
            return checkpoint.path

    def resume(self) -> "Location | None":
        """See ``Accelerator.resume``."""
        self.wait()
        series = self._places.series()
        return None if series is not None and series.is_empty() else self.load_state()

    def _agreed_request(
        self,
        input_dir: str | os.PathLike[str] | None,
        strict: bool,
        parts: str | Iterable[str] | None,
        allow_changed_data: bool | None,
    ) -> LoadRequest:
        """Verifies that the arguments are valid, and decide the same collectives, on all ranks."""
        from accel_ckpt.rank_group import RankGroup

        def mine() -> LoadRequest:
            options = LoadOptions.of(strict=strict, parts=parts, allow_changed_data=allow_changed_data)
            return LoadRequest(options, self._places.given(input_dir), bool(self._load_hooks))

        told = RankGroup.of(self._places.ranks()).run_on_all("load_state", mine)
        return LoadRequest.agreed(told, self._strategy.session.rank)

    def _loaded(self, request: LoadRequest) -> "tuple[Checkpoint, Restoration]":
        """Loads the checkpoint that is asked for, or the newest intact one.

        Hooks must not see a damaged checkpoint, so if there are hooks, every byte is verified before they are called.
        A checkpoint that another save replaces meanwhile is loaded anew.
        """
        from accel_ckpt.loading.checkpoint import with_checkpoint

        verify = request.hooked
        damaged: list[str] = []
        restorations: list[Restoration] = []

        def load(checkpoint: "Checkpoint") -> "tuple[Checkpoint, Restoration]":
            with ExitStack() as failing, ExitStack() as files:
                failing.callback(checkpoint.close)
                restoration = self._read(checkpoint, request, files)
                try:
                    restoration.apply(self._strategy.backend, self._prepared, self._clock)
                except CheckpointCorruptError as error:
                    damaged.append(str(error))
                    raise
                failing.pop_all()
            restorations.append(restoration)
            return checkpoint, restoration

        if request.place is not None:
            return with_checkpoint(request.place, load, verify=verify, group=self._places.ranks())
        series = self._places.series()
        assert series is not None
        try:
            latest = series.latest(None if verify else load)
        except Exception as error:
            for text in damaged[-1:]:
                error.add_note(f"before that, a damaged checkpoint was loaded in part: {text}")
            raise
        if latest is None:
            from accel_ckpt.loading.foreign import advice_on_series

            text = f"there is no intact checkpoint in {series.path}{advice_on_series(series.path)}"
            raise CheckpointError("; ".join([text, *damaged[-1:]]))
        return load(latest) if verify else (latest, restorations[-1])

    def _read(self, checkpoint: "Checkpoint", request: LoadRequest, files: ExitStack) -> Restoration:
        """Reads the checkpoint's parts after the hooks, and compares them; ``files`` closes the hooks' files."""
        from accel_ckpt.rank_group import RankGroup

        models, options = self._prepared.models, request.options
        kept = list(models)
        if request.hooked:
            peers = RankGroup.of(self._places.ranks())
            kept = run_load_hooks(list(self._load_hooks.values()), kept, checkpoint, peers, files)
        dropped = [model for model in models if not any(model is one for one in kept)]
        parts = self.train_state(options)
        ignored = {name for name, part in parts.items() if isinstance(part, ModelState) and part.model in dropped}
        unknown = checkpoint.metadata.get(UNKNOWN_KEY)
        kinds = unknown if isinstance(unknown, list | tuple) else ()
        ignored |= {name for name in parts if name.split("_")[0] in kinds and name not in checkpoint.names}
        # Without strict, a checkpoint may lack parameters, which would keep the values of a damaged one that was read
        # before.
        strategy = self._strategy
        in_place = options.strict and strategy.backend.capabilities.loads_in_place
        ranks = self._places.ranks()
        return Restoration.read(
            checkpoint,
            parts,
            strategy.session,
            ranks,
            backend=strategy.backend,
            options=options,
            ignored=ignored,
            in_place=in_place,
        )

    # Both

    def train_state(self, options: LoadOptions = LoadOptions()) -> TrainState:  # noqa: B008 (frozen)
        backend, known, strict = self._strategy.backend, self._prepared, options.strict
        state = TrainState()
        state.add("model", [ModelState(backend, model, strict) for model in known.models])
        state.add("optimizer", [OptimizerState(backend, one, known.models, strict) for one in known.inner_optimizers])
        state.add("scheduler", known.schedulers)
        state.add("loader", [LoaderState(loader, options.allow_changed_data) for loader in known.loaders])
        state.add("scaler", backend.states.loss_scales)
        state.add("clock", [ClockState(self._clock, backend.gradients.ranks / data_shards(backend))])
        return state.add("custom", known.custom)

    def _run_facts(self) -> RunDescription:
        strategy = self._strategy
        return RunDescription(
            session=strategy.session,
            backend=strategy.backend,
            policy=strategy.policy,
            clock=self._clock,
            config=self._config,
            loading=self._loaders.options,
            parallelism=strategy.parallelism,
            data_shards=strategy.data_shard.count,
        )


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Suspends the caller's ``torch.inference_mode``, whose tensors no later step could change."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
