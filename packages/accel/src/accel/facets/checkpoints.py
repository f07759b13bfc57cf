"""The state of an Accelerator that its checkpoints hold: named parts, hooks, and the project's series."""

from abc import ABC
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from accel.checkpointing.load_report import LoadOptions
from accel.checkpointing.run_facts import RunFacts
from accel.checkpointing.train_state import (
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
from accel_ckpt.io.storage import Location, locate
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_backends import Backend
    from accel_ckpt import AsyncSaver, CheckpointDirectory, PerNode
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
    """What saving and loading have in common: the run's state under stable names, and where it lies."""

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
        with the rest, and a load hook finds it in ``input_dir``. ``output_dir`` is always a folder of this machine: the
        checkpoint's own under a hidden name, or, where that lies behind a URL, a temporary one of this process, whose
        files are uploaded. Processes that share a disk share the checkpoint's folder, so of one file the last writer's
        is kept (behind a URL the lowest rank's): let the main process write, or name files by rank.
        """
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Calls ``hook(models, input_dir)`` before each load; models it drops from the list are not loaded.

        ``input_dir`` is the checkpoint's folder; of a checkpoint behind a URL a temporary folder of this process, which
        holds the files that save hooks had written, until the load is over.
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
        state.add("scaler", self.backend.loss_scales)
        state.add("clock", [self.clock])
        return state.add("custom", self._custom_objects)

    def _run_facts(self) -> RunFacts:
        return RunFacts(
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
        """The project's automatic checkpoints, when it has them."""
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            return None
        if project.project_dir is None:
            raise ConfigError("automatic_checkpoint_naming needs a project_dir to put the checkpoints in")
        from accel_ckpt import Best, CheckpointDirectory, keep_for_run

        best = None
        if project.keep_best is not None and project.metric is not None:
            best = Best(project.metric, project.keep_best, project.mode)
        retention = keep_for_run(last=project.total_limit, best=best)
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

    def _continue_numbering(self, path: Location) -> None:
        """The next automatic checkpoint follows the one that was saved or loaded."""
        prefix, _, number = path.name.rpartition("_")
        if self.project_configuration.automatic_checkpoint_naming and prefix == "checkpoint" and number.isdigit():
            self.project_configuration.iteration = int(number) + 1
