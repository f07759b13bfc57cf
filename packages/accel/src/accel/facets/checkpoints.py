"""Checkpointed state of an Accelerator: named parts, hooks, and the project's series of checkpoints."""

from abc import ABC
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from accel.checkpoints.load_report import LoadOptions
from accel.checkpoints.run_facts import RunDescription
from accel.checkpoints.train_state import (
    Companion,
    LoaderState,
    ModelState,
    OptimizerState,
    Stateful,
    TrainState,
    check_stateful,
)
from accel.loop.accumulator import StepClock
from accel.optimizer import PreparedOptimizer
from accel.scheduler import PreparedScheduler
from accel.setup.kwargs_handlers import ProjectConfiguration
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_backends import Backend
    from accel_ckpt import AsyncSaver, CheckpointDirectory, PerNode
    from accel_ckpt.io.storage import Location
    from accel_ckpt.rank_group import Ranks
    from accel_data import LoaderOptions
    from accel_launch.config.model import AccelConfig
    from accel_precision import PrecisionPolicy
    from accel_state import DataShard, ParallelismConfig
    from accel_state.session import Session

SaveHook = Callable[[list[nn.Module], list[Any], str], object]
LoadHook = Callable[[list[nn.Module], str], object]
FOLDER = "checkpoints"


class CheckpointFacet(ABC):
    """Common base of saving and loading: the run's state under stable names, and its location."""

    session: "Session"
    clock: StepClock
    backend: "Backend"
    policy: "PrecisionPolicy"
    config: "AccelConfig"
    parallelism_config: "ParallelismConfig"
    data_shard: "DataShard"
    dataloader_config: "LoaderOptions"
    project_configuration: ProjectConfiguration
    _models: list[nn.Module]
    _optimizers: list[PreparedOptimizer]
    _schedulers: list[PreparedScheduler]
    _dataloaders: list[Any]
    _custom_objects: list[Stateful]
    _save_hooks: "OrderedDict[int, SaveHook]"
    _load_hooks: "OrderedDict[int, LoadHook]"
    _saver: "AsyncSaver | None" = None
    _machines: "PerNode | None" = None

    def _companions(self) -> Mapping[str, Companion]:
        """Optional parts of a checkpoint, by name; made anew at each call, because they refer to the Accelerator."""
        return {}

    def register_for_checkpointing(self, *objects: Stateful) -> None:
        """Includes these objects in ``save_state`` and ``load_state``.

        Loading also calls their ``state_dict``, to restore it if another part refuses the checkpoint.

        Raises:
            ConfigError: an object lacks ``state_dict`` or ``load_state_dict``; no object is registered then.
        """
        check_stateful(objects)
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Calls ``hook(models, weights, output_dir)`` before saving; weights that it removes from the list are skipped.

        Files that it writes into ``output_dir``, also in subfolders, become part of the checkpoint: they are digested
        and committed with the rest, and a load hook finds them in ``input_dir``. ``output_dir`` is always a local
        folder: the checkpoint's own under a hidden name, or, for a checkpoint at a URL, a temporary folder of this
        process, whose files are uploaded. Processes that share a disk share the checkpoint's folder, so the last write
        of a file counts (at a URL, that of the lowest rank): write on the main process only, or name files by rank.
        """
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Calls ``hook(models, input_dir)`` before each load; models that it removes from the list are not loaded.

        ``input_dir`` is the checkpoint's folder; for a checkpoint at a URL, a temporary folder of this process that
        holds the files written by save hooks, until the load ends.
        """
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def _wait_for_save(self) -> None:
        if self._saver is not None:
            self._saver.wait()

    def _train_state(self, options: LoadOptions = LoadOptions()) -> TrainState:  # noqa: B008 (frozen)
        models, strict = self._models, options.strict
        state = TrainState()
        state.add("model", [ModelState(self.backend, model, strict) for model in models])
        state.add("optimizer", [OptimizerState(self.backend, o.optimizer, models, strict) for o in self._optimizers])
        state.add("scheduler", self._schedulers)
        state.add("loader", [LoaderState(loader, options.allow_changed_data) for loader in self._dataloaders])
        state.add("scaler", self.backend.states.loss_scales)
        state.add("clock", [self.clock])
        return state.add("custom", self._custom_objects)

    def _run_facts(self) -> RunDescription:
        return RunDescription(
            session=self.session,
            backend=self.backend,
            policy=self.policy,
            clock=self.clock,
            config=self.config,
            loading=self.dataloader_config,
            parallelism=self.parallelism_config,
            data_shards=self.data_shard.count,
        )

    def _series(self) -> "CheckpointDirectory | None":
        """Series of the project's automatic checkpoints; None without automatic naming."""
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            return None
        if project.project_dir is None:
            raise ConfigError("automatic_checkpoint_naming needs a project_dir to put the checkpoints in")
        from accel_ckpt import Best, CheckpointDirectory, keep_for_run
        from accel_ckpt.io.storage import locate

        best = None
        if project.keep_best is not None and project.metric is not None:
            best = Best(project.metric, project.keep_best, project.mode)
        retention = keep_for_run(last=project.total_limit, best=best)
        return CheckpointDirectory(locate(project.project_dir) / FOLDER, retention=retention, group=self._ranks())

    def _keeps_copies(self) -> bool:
        """Whether each of several nodes keeps a copy of every checkpoint."""
        return self.project_configuration.save_on_each_node and self.session.topology.num_nodes > 1

    def _ranks(self) -> "Ranks":
        """The ranks that save and load together, and their disks.

        Collective: every rank of the group must call this. Later calls are local.
        """
        if not self._keeps_copies():
            return self.session.live_group()
        if self._machines is None:
            from accel_ckpt import PerNode

            self._machines = PerNode(self.session.live_group(), node=self.session.topology.node_rank)
        return self._machines

    def _continue_numbering(self, path: "Location") -> None:
        """Sets the number of the next automatic checkpoint to follow the one that was saved or loaded."""
        prefix, _, number = path.name.rpartition("_")
        if self.project_configuration.automatic_checkpoint_naming and prefix == "checkpoint" and number.isdigit():
            self.project_configuration.iteration = int(number) + 1
