"""The Accelerator: one object around a training loop, which delegates to its parts."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

import torch
from torch import nn

from accel.loop.accumulation import Weight
from accel.loop.accumulator import GradientAccumulationPlugin, StepClock
from accel.loop.step import MicroBatch, TrainingStep
from accel.optimizer import PreparedOptimizer
from accel.scheduler import PreparedScheduler, SchedulerSteps
from accel.views.observation import ObservationViews
from accel.views.process import ProcessViews
from accel.views.settings import SettingViews
from accel_ckpt.series.project import ProjectConfiguration
from accel_launch.preemption.preemption import DEFAULT_SIGNALS, Notice
from accel_state.errors import UNSENDABLE, ConfigError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from torch.utils.hooks import RemovableHandle

    from accel.checkpoints.state_hooks import LoadHook, SaveHook
    from accel.checkpoints.train_state import Stateful
    from accel.prepared import PreparationOptions
    from accel.setup.build import Components
    from accel_backends import ActivationCheckpointing, BackendConfig, FullyShardedDataParallelPlugin, TorchDynamoPlugin
    from accel_ckpt.io.storage import Location
    from accel_data import LoaderOptions
    from accel_deepspeed import DeepSpeedPlugin
    from accel_observe.tracking.registry import LogWith
    from accel_precision import AutocastKwargs, PrecisionPolicy
    from accel_state import ParallelismConfig, TorchTensorParallelPlugin


@final
class Accelerator(ProcessViews, SettingViews, ObservationViews):
    """Runs an ordinary PyTorch training loop on the devices and ranks that it was launched on.

    Every argument has a default, and most have a flag of ``accel launch`` and an environment variable; an argument
    given here overrides them. Two Accelerators share only the process group, of which torch has one.

    Args:
        device_placement: move prepared models and batches to this process's device.
        split_batches: a loader's batch size is the global one (also in ``dataloader_config``).
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"``, ``"fp8"``, or dtypes by role such as
            ``"params=fp32,compute=bf16,reduce=fp32,output=fp32"``, or a ``PrecisionPolicy``.
        gradient_accumulation_steps: micro-batches of one optimizer step.
        cpu: use the CPU even if there is an accelerator.
        dataloader_config: how loaders are sharded.
        rng_types: random generators that are set to the main process's state whenever a pass of a loader begins.
        log_with: trackers by name, or objects, or ``"all"`` that are installed; None: the run log.
        project_dir: the project's folder, unless ``project_config`` has one.
        project_config: names and number of checkpoints.
        gradient_accumulation_plugin: options of accumulation, instead of the number of steps.
        step_scheduler_with_optimizer: schedulers step only when their optimizer does.
        kwargs_handlers: options of the parts: ``DistributedDataParallelKwargs``, ``GradScalerKwargs``,
            ``AutocastKwargs``, ``InitProcessGroupKwargs``, fp8 recipes.
        dynamo_backend: torch.compile backend with which prepared models are compiled.
        dynamo_plugin: options of compilation.
        parallelism_config: degrees of data, tensor, context, sequence and pipeline parallelism.
        strategy: name of the backend, or its configuration; None chooses by topology and device. ``"auto"`` chooses by
            the memory that the first prepared model needs (see ``planner.AutoStrategy``).
        fsdp_plugin: options with which parameters, gradients and optimizer states are sharded.
        deepspeed_plugin: train with DeepSpeed: options, a mapping of them, or DeepSpeed's own configuration.
        deepspeed_plugins: several plugins by name; ``select_deepspeed_plugin`` selects one, initially the first.
        torch_tp_plugin: degree of tensor parallelism, where ``parallelism_config`` does not give it.
        activation_checkpointing: recompute activations in backward, with any strategy: True, or which blocks and how.
        scheduler_steps: ``"per_step"`` steps a schedule once per optimizer step, ``"per_process"`` once per process.
        debug: verify every collective on all ranks before it runs.

    Raises:
        ConfigError: a setting cannot work, alone or with the others.
        SessionError: the other processes cannot be reached.
    """

    def __init__(  # noqa: PLR0913  (the signature that users know)
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: "str | PrecisionPolicy | None" = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        dataloader_config: "LoaderOptions | None" = None,
        rng_types: Sequence[str] | None = None,
        log_with: "LogWith" = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[object] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: "TorchDynamoPlugin | None" = None,
        parallelism_config: "ParallelismConfig | None" = None,
        *,
        strategy: "str | BackendConfig | None" = None,
        fsdp_plugin: "FullyShardedDataParallelPlugin | Mapping[str, Any] | None" = None,
        deepspeed_plugin: "DeepSpeedPlugin | Mapping[str, Any] | None" = None,
        deepspeed_plugins: "Mapping[str, DeepSpeedPlugin | Mapping[str, Any]] | None" = None,
        torch_tp_plugin: "TorchTensorParallelPlugin | None" = None,
        activation_checkpointing: "bool | ActivationCheckpointing | None" = None,
        scheduler_steps: SchedulerSteps = "per_step",
        debug: bool | None = None,
    ) -> None:
        # imported here, because naming the class does not need these modules
        from accel.prepared import PreparationOptions
        from accel.setup.build import dynamo_of, open_parts

        if scheduler_steps not in ("per_step", "per_process"):
            raise ConfigError(f"scheduler_steps is {scheduler_steps!r}; expected 'per_step' or 'per_process'")
        parts = open_parts(
            {
                "mixed_precision": mixed_precision,
                "gradient_accumulation_steps": gradient_accumulation_steps,
                "cpu": cpu,
                "activation_checkpointing": activation_checkpointing,
                "debug": debug,
                "project_dir": None if project_dir is None else os.fspath(project_dir),
            },
            accumulation=gradient_accumulation_plugin,
            handlers=kwargs_handlers,
            loading=(dataloader_config, split_batches),
            parallelism=parallelism_config,
            project=project_config,
            strategy=strategy,
            plugins={
                "fsdp_plugin": fsdp_plugin,
                "deepspeed_plugin": deepspeed_plugin,
                "deepspeed_plugins": deepspeed_plugins,
                "torch_tp_plugin": torch_tp_plugin,
            },
        )
        options = PreparationOptions(
            device_placement=device_placement,
            follow_optimizer=step_scheduler_with_optimizer,
            scheduler_repeats=parts.session.world_size if scheduler_steps == "per_process" else 1,
            dynamo=dynamo_of(dynamo_backend, dynamo_plugin, parts.config),
        )
        self._assemble(parts, options, rng_types, log_with)
        self._guard.listen_by_default()

    def _assemble(
        self, opened: "Components", options: "PreparationOptions", rng_types: Sequence[str] | None, log_with: "LogWith"
    ) -> None:
        """Makes the parts; each receives the parts that it uses."""
        from accel.checkpoints.checkpointer import Checkpointer
        from accel.checkpoints.train_state import SideState
        from accel.checkpoints.weights import Weights
        from accel.loop.loaders import Loaders
        from accel.observe.monitor import Monitor
        from accel.prepared import Preparation, PreparedObjects
        from accel.resilience.guard import PreemptionGuard
        from accel.setup.run_strategy import RunStrategy
        from accel_observe.meters.observed_run import RunLog
        from accel_observe.tracking.trackers import Trackers

        self.config, self.policy = config, policy = opened.config, opened.policy
        self.session, self.project_configuration = session, project = opened.session, opened.project
        self.clock = clock = StepClock(opened.accumulation)
        self._strategy = strategy = RunStrategy(
            session, policy, opened.backend, opened.choice, opened.parallelism, opened.undecided
        )
        self._prepared, self._log = prepared, log = PreparedObjects(), RunLog()
        self._loaders = loaders = Loaders(strategy, clock, opened.loading, rng_types)
        self._preparation = Preparation(strategy, prepared, loaders, clock, log, options)
        self._monitor = monitor = Monitor(strategy, prepared, clock, config, log, opened.handlers.profile)
        self._trackers = trackers = Trackers(session, project, log, log_with, describe=monitor.describe)
        side_states = {
            "progress": SideState(monitor.run_progress.save, monitor.run_progress.load),
            "trackers": SideState(trackers.state_dict, trackers.load_state_dict),
            "counts": SideState(strategy.counts, strategy.load_counts),
        }
        self._checkpointer = Checkpointer(strategy, prepared, clock, loaders, config, project, log, side_states)
        self._weights = Weights(strategy, prepared, project)
        self._guard = PreemptionGuard(session, prepared, clock, self._checkpointer, project)
        self._step = TrainingStep(strategy, prepared, clock, loaders, self._guard)

    def __reduce__(self) -> NoReturn:
        raise TypeError(UNSENDABLE.format(kind="an Accelerator"))

    def __deepcopy__(self, memo: object) -> Self:
        """Returns self: an object that holds an Accelerator can be copied, but the process and its group exist once."""
        return self

    # Preparing

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepares models, optimizers, schedulers and loaders for the backend, and returns them in the same order.

        Pass models and their optimizers in one call. Objects of other kinds are returned unchanged, and so are
        optimizers, schedulers and loaders that are prepared already.

        Args:
            args: the objects; a single object is returned itself, not in a tuple.
            device_placement: for each object, whether to move it (None: as the Accelerator's ``device_placement``).

        Raises:
            PrepareError: a model was prepared before, an optimizer holds parameters of no prepared model, or the
                number of placements is not that of the objects.
        """
        return self._preparation.prepare(args, device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepares one model; with ``evaluation_mode``, moves it and sets its precision, without gradient reduction."""
        return self._preparation.prepare_model(model, device_placement, training=not evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Prepares one optimizer, whose model must be prepared already."""
        prepared: PreparedOptimizer = self._preparation.prepare([optimizer], [device_placement])
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepares one scheduler."""
        prepared: PreparedScheduler = self._preparation.prepare([scheduler], None)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: "DataLoader[Any]",
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepares one loader: it yields this rank's shard of the samples on its device."""
        return self._preparation.prepare_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def skip_first_batches(self, dataloader: "DataLoader[Any]", num_batches: int = 0) -> "DataLoader[Any]":
        """Returns a loader like ``dataloader`` that begins after ``num_batches`` batches; both share one position."""
        from accel_data import skip_first_batches

        return skip_first_batches(dataloader, num_batches)

    def deepspeed_ulysses_dl_adapter(self, dl: "DataLoader[Any]", model: nn.Module) -> Any:
        """Returns the loader, prepared if it is not: prepared loaders yield this rank's shard of each sequence."""
        return self._preparation.prepare_loader(dl)

    def free_memory(self, *objects: Any) -> list[None]:
        """Releases what is prepared, and ends its meter; returns Nones: ``a, b = accelerator.free_memory(a, b)``."""
        self._monitor.release()
        self._strategy.backend.release(self._prepared.models)
        self._prepared.clear()
        self.clock.reset()
        from accel_state.device.memory import release_memory

        return release_memory(*objects)

    clear = free_memory

    # A training step

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Enters the next micro-batch: gradients of ``models`` are reduced, and optimizers step, when the window ends.

        A loop with several losses (a GAN's) needs a block for each loss, with the models that the loss trains.
        """
        return MicroBatch(self._step, models)

    def backward(self, loss: torch.Tensor, *, weight: Weight | None = None, **kwargs: Any) -> None:
        """Computes gradients, scaled so that the micro-batches of all ranks add up to the gradient of one global batch.

        Without ``weight``, ``loss`` is the mean over its micro-batch. With it, ``loss`` is a sum and ``weight`` the
        number of its terms (tokens, samples; 0 is allowed): the window's gradient is then that of the sum of all losses
        divided by the sum of all weights, whatever each micro-batch and rank holds. ``kwargs`` are passed to
        ``loss.backward``.

        Raises:
            BackendError: the loss is not a scalar, or has no graph; or ``weight`` is given within
                ``join_uneven_inputs``.
            PrepareError: no model has been prepared, so gradients would not be reduced over ranks.
        """
        self._step.backward(loss, weight, kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within the block, the backward does not reduce the gradients of ``model`` over ranks."""
        return self._strategy.backend.no_sync(model)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within the block, the next backward reduces the gradients even if the forward ran under ``no_sync``."""
        return self._strategy.backend.trigger_sync(model)

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales the gradients to a global norm of at most ``max_norm``; returns the norm before clipping.

        Has an effect only when a step is due. Otherwise it returns the norm of the gradients that this process has
        accumulated so far, which are not reduced over ranks yet, with the loss scale divided out.
        """
        return self._step.clip_norm(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamps every gradient element to ``[-clip_value, clip_value]``, when a step is due."""
        self._step.clip_value(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divides the gradients by the loss scale, once, for the given optimizer or all prepared ones.

        In the block of ``accumulate(model)``, "all" means those that step for its models: the gradients that others
        have accumulated must stay scaled.
        """
        self._step.unscale(optimizer)

    def full_gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Full gradients of the next step by parameter name: averaged over ranks, with the loss scale divided out.

        They are copies, on every process, however the backend shards gradients; parameters without a gradient are left
        out. Call it after the last backward of a window. Clipping by the step itself (DeepSpeed's) is not included.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: no step is due, so the gradients have not been reduced yet.
        """
        return self._step.full_gradients(model)

    def autocast(self, autocast_handler: "AutocastKwargs | None" = None) -> AbstractContextManager[Any]:
        """Computes in the policy's dtype within the block, for computation outside of a prepared model's forward."""
        return self._strategy.backend.run.autocast_context(autocast_handler)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers predictions or labels of the current batch, without the samples that were repeated to fill it.

        Tensors (in any nesting, None beside them) are concatenated along dimension 0; other objects are gathered as
        objects, and a list of them counts as rows. Inside a prepared loader's loop the result, over a full epoch, holds
        every sample of the dataset exactly once, in the order of the samples; outside of a loop all rows are kept. With
        sequence parallelism, the shards (samples, tokens, ...) of a sequence are concatenated first.

        Raises:
            DataError: ``input_data`` is no list and has tensors beside objects other than None; or, with sequence
                parallelism, a leaf is not a tensor (samples, tokens, ...).
        """
        return self._loaders.gather_for_metrics(input_data, use_gather_object=use_gather_object)

    def join_uneven_inputs(
        self, joinables: Iterable[nn.Module], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Lets ranks with fewer batches leave the loop early while the others continue (torch's ``Join``).

        ``even_batches`` overrides the setting of prepared map-style loaders in the block; even batches are not joined.
        """
        return self._step.join_uneven_inputs(joinables, even_batches)

    def find_micro_batch_size(self, compute: Callable[[Any], torch.Tensor], batch: Any, *, smallest: int = 1) -> int:
        """Returns the largest micro-batch, of ``batch`` or a half, a quarter... of it, that fits on every rank.

        ``compute`` returns the loss of a batch with the prepared models; its forward and backward are tried with the
        first rows of ``batch`` (tensors in any nesting). Pass the result to the DataLoader, and the batch size that
        training needs to ``DataLoaderConfiguration(global_batch_size=...)``: accumulation then compensates smaller
        micro-batches, so the steps are the same whatever the memory is. Optimizer states do not exist before the first
        step; try with a batch somewhat larger than the remaining memory would hold. Call it between steps; weights,
        buffers, gradients and random state are restored.

        Collective: every rank of the group must call this.

        Raises:
            ConfigError: not even ``smallest`` rows fit, or an accumulation window is open.
        """
        return self._step.find_micro_batch_size(compute, batch, smallest=smallest)

    # Checkpoints

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
        return self._checkpointer.save_state(output_dir, metadata=metadata, metrics=metrics, asynchronous=asynchronous)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        *,
        strict: bool = True,
        parts: str | Iterable[str] | None = None,
        allow_changed_data: bool | None = None,
    ) -> "Location":
        """Restores the state that ``save_state`` saved, on any number of processes; returns the folder that was read.

        ``input_dir`` None or ``"latest"`` takes the newest intact checkpoint of the project's automatic ones. Ranks
        that did not exist at the save derive their random state from the checkpoint. ``strict=False`` tolerates missing
        and unused parameters in models and optimizers; ``last_load`` reports them.

        ``parts`` restricts loading to the parts of these names: ``"model"``, ``"optimizer"``, ``"scheduler"``,
        ``"loader"``, ``"custom"`` (the first of each kind, then ``"model_1"``, ...), ``"scaler"``, ``"clock"`` (with
        the gradients of an open window) and ``"rng"``. The rest of the run is not changed, including random state,
        clock and open windows, and the checkpoint may hold parts that the run has not prepared. Only the bytes that are
        read are verified then.

        Collective: every rank of the group must call this.

        ``allow_changed_data=True`` loads positions of loaders inside an epoch of data that has changed since, with a
        warning in numbers (see ``PreparedLoader.load_state_dict``); False refuses them; None takes the value of
        ``DataLoaderConfiguration(allow_changed_data=...)``.

        Raises:
            ConfigError: no location is given or known, or ``parts`` is empty.
            CheckpointMismatchError: the checkpoint, or the run, has no part of such a name, or a part that does not
                fit.
            CheckpointError: there is no such checkpoint, a file of it is damaged, or it belongs to other objects.
                A mismatch, and a file that is missing or has another size, are found before anything has changed. A
                block whose bytes have changed is found when it is read into the parameters: models and optimizers
                then hold a part of the checkpoint, as the error says, until another ``load_state`` succeeds.
        """
        return self._checkpointer.load_state(
            input_dir, strict=strict, parts=parts, allow_changed_data=allow_changed_data
        )

    def resume(self) -> "Location | None":
        """Loads the newest intact checkpoint of the project, if there is one, and returns its folder.

        For scripts that are started with the same command the first time and every time after.

        Collective: every rank of the group must call this.
        """
        return self._checkpointer.resume()

    def register_for_checkpointing(self, *objects: "Stateful") -> None:
        """Includes these objects in ``save_state`` and ``load_state``.

        Loading also calls their ``state_dict``, to restore it if another part refuses the checkpoint.

        Raises:
            ConfigError: an object lacks ``state_dict`` or ``load_state_dict``; no object is registered then.
        """
        self._checkpointer.register(objects)

    def register_save_state_pre_hook(self, hook: "SaveHook") -> "RemovableHandle":
        """Calls ``hook(models, weights, output_dir)`` before saving; it may remove or replace weights in the list.

        Files that it writes into ``output_dir``, also in subfolders, become part of the checkpoint: they are digested
        and committed with the rest, and a load hook finds them in ``input_dir``. ``output_dir`` is always a local
        folder: the checkpoint's own under a hidden name, or, for a checkpoint at a URL, a temporary folder of this
        process, whose files are uploaded. Processes that share a disk share the checkpoint's folder, so the last write
        of a file counts (at a URL, that of the lowest rank): write on the main process only, or name files by rank.
        """
        return self._checkpointer.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: "LoadHook") -> "RemovableHandle":
        """Calls ``hook(models, input_dir)`` before each load; models that it removes from the list are not loaded.

        ``input_dir`` is the checkpoint's folder; for a checkpoint at a URL, a temporary folder of this process that
        holds the files written by save hooks, until the load ends.
        """
        return self._checkpointer.add_load_hook(hook)

    # Weights

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Returns the user's own model inside a prepared one.

        It still computes in the policy's precision when called; with ``keep_fp32_wrapper=False`` the result is a module
        that shares all tensors with it and computes in their own dtypes (the prepared model itself is not changed).
        """
        return self._weights.unwrap_model(
            model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile
        )

    def get_state_dict(
        self, model: nn.Module, unwrap: bool = True, *, sharded: bool = False
    ) -> dict[str, torch.Tensor]:
        """Returns the model's parameters and buffers by FQN.

        If the model is sharded, the main process gets full tensors in host memory and the others an empty dict, unless
        ``sharded`` requests each rank's own shards (DTensors). With ``unwrap=False`` the result is the ``state_dict``
        of the wrapped model. Weights that are offloaded (``cpu_offload``, ...) are read into host memory.

        Collective: every rank of the group must call this.

        Raises:
            SessionError: the model is sharded and ``end_training`` was called, so the other shards cannot be gathered.
        """
        return self._weights.get_state_dict(model, unwrap=unwrap, sharded=sharded)

    def full_parameters(self, model: nn.Module, *, writeback: bool = True) -> AbstractContextManager[None]:
        """Within the block, every process has full parameters, to be read or to be changed alike on all.

        Changes are kept unless ``writeback`` is False.

        Collective: every rank of the group must call this.

        Raises:
            SessionError: the model is sharded and ``end_training`` was called, so the other shards cannot be gathered.
        """
        return self._weights.full_parameters(model, writeback=writeback)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> "list[Location]":
        """Writes the model as plain safetensors with an index, as other tools read them, and returns the files.

        Sharded parameters are gathered one at a time; the main process writes. Tied parameters are written once. Files
        of an earlier, larger save are removed. ``save_directory`` may be a URL.

        Collective: every rank of the group must call this.

        Raises:
            CheckpointError: the model cannot be written as safetensors, or the disk refuses.
            ConfigError: ``safe_serialization`` is off, which would write a pickle.
        """
        return self._weights.save_model(model, save_directory, max_shard_size, safe_serialization=safe_serialization)

    def load_model(self, model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Loads weights from safetensors files, as ``save_model`` or other tools write them, into a prepared model.

        Each process reads its own shard of a sharded model, so no process ever holds the full model, not even before
        ``prepare`` if the model was built on the meta device. ``strict=False`` tolerates missing and unknown names.

        Collective: every rank of the group must call this.

        Raises:
            CheckpointError: there are no such files, they are damaged, or they belong to another model.
        """
        self._weights.load_model(model, path, strict=strict)

    def save(self, obj: Mapping[str, torch.Tensor], f: str | os.PathLike[str], safe_serialization: bool = True) -> None:
        """Writes named tensors to the safetensors file ``f``, on the main process (or one of each node).

        ``ProjectConfiguration.save_on_each_node`` decides which. Not a collective: it may be called on any processes.

        Raises:
            CheckpointError: ``obj`` holds anything but full tensors, or the disk refuses.
            ConfigError: ``safe_serialization`` is off, or ``obj`` is not a mapping, which would need a pickle.
        """
        self._weights.save(obj, f, safe_serialization=safe_serialization)

    def import_deepspeed(
        self, folder: str | os.PathLike[str], *, tag: str | None = None, model: "nn.Module | None" = None
    ) -> None:
        """Loads a folder written by DeepSpeed's ``engine.save_checkpoint`` into a prepared model and its optimizer.

        The ZeRO stage and the number of ranks that wrote it, and the backend here, may be any. Weights, the optimizer's
        state, the loss scale and step counts are loaded; schedules, loaders and random states are not, because
        DeepSpeed stores them in another form or not at all. ``save_state`` afterwards completes the conversion. Every
        process reads all files.

        Collective: every rank of the group must call this.

        Args:
            folder: the folder that was passed to ``save_checkpoint``.
            tag: name of the checkpoint in it; None: the name in the file ``latest``.
            model: a prepared model; needed if there are several.

        Raises:
            CheckpointError: there is no such checkpoint, or it is incomplete.
            CheckpointMismatchError: it belongs to another model, or to another optimizer.
        """
        self._weights.import_deepspeed(folder, tag, model)

    def export_deepspeed(
        self, folder: str | os.PathLike[str], *, tag: str = "accel", model: "nn.Module | None" = None
    ) -> None:
        """Writes a prepared model and its optimizer for DeepSpeed's ``load_checkpoint`` and ``zero_to_fp32``.

        Only with strategy ``"deepspeed"``; a checkpoint of ``save_state`` from another strategy can be loaded into it
        first.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: another backend.
        """
        self._weights.export_deepspeed(folder, tag, model)

    # Preemption

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
        self._guard.listen(Notice(tuple(signals), file, check, every), action, requeue=requeue)

    def check_preemption(self) -> None:
        """A stop point, at which a preempted run may be saved and ended, for loops without a prepared loader.

        Call it equally often on all ranks, between two steps. Does not return if the run ends here.
        """
        self._guard.check()

    @property
    def preempted(self) -> str | None:
        """Reason for which this run is about to end; None if it is not."""
        return self._guard.preempted

    # End

    def end_training(self) -> None:
        """Finishes a running save; closes meter, trackers, backend, and an own process group, even if one fails."""
        ends = [self._guard.stop, self._checkpointer.close, self._monitor.close, self._trackers.finish]
        with ExitStack() as stack:
            for end in reversed([*ends, self._strategy.backend.close, self.session.close]):
                stack.callback(end)
