"""The Accelerator: one object around a training loop, which delegates to its parts."""

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, final
from weakref import WeakSet

import torch
from torch import nn

from accel.checkpoints.save_quorum import Attendance
from accel.checkpoints.train_state import Companion, Stateful
from accel.facets.checkpoints import LoadHook, SaveHook
from accel.facets.choosing import ChoosingFacet
from accel.facets.data import DataFacet
from accel.facets.exchange import ExchangeFacet
from accel.facets.gradients import GradientFacet
from accel.facets.loading import LoadingFacet
from accel.facets.memory import MemoryFacet
from accel.facets.mesh import MeshFacet
from accel.facets.observing import ObservingFacet, RunProgress
from accel.facets.preemption import PreemptionFacet
from accel.facets.process import ProcessFacet
from accel.facets.saving import SavingFacet
from accel.facets.settings import SettingsFacet
from accel.facets.tracking import TrackingFacet
from accel.facets.weights import WeightsFacet
from accel.loop import accumulation
from accel.loop.accumulator import GradientAccumulationPlugin, StepClock
from accel.loop.micro_batch import MicroBatch
from accel.optimizer import PreparedOptimizer
from accel.scheduler import PreparedScheduler, SchedulerSteps
from accel.setup.kwargs_handlers import ProjectConfiguration
from accel.setup.object_kinds import batch_sizes, check_driven, kind_of
from accel_state.errors import UNSENDABLE, ConfigError, PrepareError
from accel_state.watchdog.decorator import recorded

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel_backends import Backend, BackendConfig, FullyShardedDataParallelPlugin, TorchDynamoPlugin
    from accel_data import LoaderOptions
    from accel_deepspeed import DeepSpeedPlugin
    from accel_observe.tracking.registry import LogWith
    from accel_precision import PrecisionPolicy
    from accel_state import ParallelismConfig

B = TypeVar("B", bound="Backend")


@final
class Accelerator(
    ProcessFacet,
    DataFacet,
    GradientFacet,
    SettingsFacet,
    MeshFacet,
    PreemptionFacet,
    MemoryFacet,
    SavingFacet,
    LoadingFacet,
    WeightsFacet,
    ExchangeFacet,
    TrackingFacet,
    ObservingFacet,
    ChoosingFacet,
):
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
        scheduler_steps: SchedulerSteps = "per_step",
        debug: bool | None = None,
    ) -> None:
        # imported here, because naming the class does not need these modules
        from accel.setup.build import dynamo_of, open_parts
        from accel.setup.resolve_strategy import several_deepspeed

        parts = open_parts(
            {
                "mixed_precision": mixed_precision,
                "gradient_accumulation_steps": gradient_accumulation_steps,
                "cpu": cpu,
                "debug": debug,
                "project_dir": None if project_dir is None else os.fspath(project_dir),
                "backend": strategy,
            },
            accumulation=gradient_accumulation_plugin,
            handlers=kwargs_handlers,
            loading=(dataloader_config, split_batches),
            parallelism=parallelism_config,
            project=project_config,
            fsdp=fsdp_plugin,
            deepspeed=several_deepspeed(deepspeed_plugin, deepspeed_plugins),
        )
        self.config = parts.config
        self.session = parts.session
        self.policy = parts.policy
        self.backend = parts.backend
        self.choice, self._undecided = parts.choice, parts.undecided
        self.parallelism_config = parts.parallelism
        self.data_shard = parts.parallelism.data_shard(parts.session.topology)
        self.dataloader_config = parts.loading
        self.project_configuration = parts.project
        self._choose_trackers(log_with)
        self._profile_options = parts.handlers.profile
        self._progress_of_run, self._told_stragglers = RunProgress.start(), set()
        self.dynamo_plugin = dynamo_of(dynamo_backend, dynamo_plugin, parts.config)
        self.clock = StepClock(parts.accumulation)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        # "generator" stands for the order of a loader's samples, on which the ranks agree without synchronising a
        # generator.
        self.rng_types = tuple(kind for kind in map(str, rng_types or ()) if kind != "generator")
        if scheduler_steps not in ("per_step", "per_process"):
            raise ConfigError(f"scheduler_steps is {scheduler_steps!r}; expected 'per_step' or 'per_process'")
        self._scheduler_repeats = self.session.world_size if scheduler_steps == "per_process" else 1
        self._models: list[nn.Module] = []
        self._optimizers: list[PreparedOptimizer] = []
        self._schedulers: list[PreparedScheduler] = []
        self._dataloaders: list[Any] = []
        self._custom_objects: list[Stateful] = []
        self._trained_apart: WeakSet[nn.Module] = WeakSet()
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._attendance = Attendance.of(self.session)
        self._listen_by_default()

    def __reduce__(self) -> NoReturn:
        raise TypeError(UNSENDABLE.format(kind="an Accelerator"))

    def __deepcopy__(self, memo: object) -> Self:
        """Returns self: an object that holds an Accelerator can be copied, but the process and its group exist once."""
        return self

    # ------------------------------------------------------------------------------------------------ prepare

    @recorded("prepare", shared=False)
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
        if device_placement is None:
            device_placement = [None] * len(args)
        elif len(device_placement) != len(args):
            raise PrepareError(f"device_placement has {len(device_placement)} entries for {len(args)} objects")
        kinds = [kind_of(item) for item in args]
        results = list(args)
        self._prepare_bundle(results, kinds, device_placement)
        for position, (item, kind) in enumerate(zip(args, kinds, strict=True)):
            if kind == "loader":
                results[position] = self.prepare_data_loader(item, device_placement=device_placement[position])
        for item, kind in zip(results, kinds, strict=True):
            if kind == "prepared":
                self._adopt(item)
        return results[0] if len(results) == 1 else tuple(results)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepares one model; with ``evaluation_mode``, moves it and sets its precision, without gradient reduction."""
        if not evaluation_mode:
            prepared: nn.Module = self.prepare(model, device_placement=[device_placement])
            return prepared
        results: list[Any] = [model]
        self._prepare_bundle(results, ["model"], [device_placement], training=False)
        placed: nn.Module = results[0]
        return placed

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Prepares one optimizer, whose model must be prepared already."""
        prepared: PreparedOptimizer = self.prepare(optimizer, device_placement=[device_placement])
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepares one scheduler."""
        prepared: PreparedScheduler = self.prepare(scheduler)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: "DataLoader[Any]",
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepares one loader: it yields this rank's shard of the samples on its device."""
        loader = self._prepare_loader(
            data_loader, on_device=self._places(device_placement), slice_fn=slice_fn_for_dispatch
        )
        if not any(loader is other for other in self._dataloaders):
            self._dataloaders.append(loader)
        return loader

    def _prepare_bundle(
        self, results: list[Any], kinds: Sequence[str], placement: Sequence[bool | None], *, training: bool = True
    ) -> None:
        """Prepares models, their optimizers and schedulers in place, as one bundle."""
        from accel_backends import Bundle

        where = {
            kind: [position for position, one in enumerate(kinds) if one == kind]
            for kind in ("model", "optimizer", "scheduler")
        }
        if not any(where.values()):
            return
        check_driven(
            [results[position] for position in where["scheduler"]],
            [*self._optimizers, *(results[position] for position in where["optimizer"])],
        )
        if self._undecided is not None and training:
            self._decide(results, kinds, split_batches=self.split_batches)
        bundle = self.backend.prepare(
            Bundle(
                models=[results[position] for position in where["model"]],
                optimizers=[results[position] for position in where["optimizer"]],
                schedulers=[results[position] for position in where["scheduler"]],
                place=tuple(self._places(placement[position]) for position in where["model"]),
                training=training,
                batch_sizes=batch_sizes(results, kinds, 1 / self.data_shard.count if self.split_batches else 1),
            )
        )
        for position, prepared in zip(where["model"], bundle.models, strict=True):
            model = prepared if self.dynamo_plugin is None else self.backend.compile(prepared, self.dynamo_plugin)
            results[position] = model
            self._models.append(model)
        for position, optimizer in zip(where["optimizer"], bundle.optimizers, strict=True):
            results[position] = PreparedOptimizer(optimizer, self.clock, self.backend, self._note_skip)
            self._optimizers.append(results[position])
        for position, scheduler in zip(where["scheduler"], bundle.schedulers, strict=True):
            results[position] = self._wrap_scheduler(scheduler)
            self._schedulers.append(results[position])

    def _wrap_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Binds a scheduler to the prepared optimizer that it drives, or to all of them if it names none."""
        driven = getattr(scheduler, "optimizer", None)
        bound = [one for one in self._optimizers if one is driven or one.optimizer is driven]
        return PreparedScheduler(
            scheduler,
            bound or self._optimizers,
            self.clock,
            follow_optimizer=self.step_scheduler_with_optimizer,
            repeats=1 if self.split_batches else self._scheduler_repeats,
        )

    def _adopt(self, item: Any) -> None:
        """Registers an object that is prepared already, unless it is registered."""
        known: list[Any] = self._optimizers if isinstance(item, PreparedOptimizer) else self._schedulers
        if not any(item is other for other in known):
            known.append(item)

    def _companions(self) -> dict[str, Companion]:
        return {
            "progress": Companion(self._progress_of_run.save, self._progress_of_run.load),
            "trackers": Companion(self.state_dict_of_trackers, self.continue_trackers),
            "counts": Companion(self.backend.states.counts, lambda saved: self.backend.states.load_counts(saved or ())),
        }

    def _places(self, device_placement: bool | None) -> bool:
        return self.device_placement if device_placement is None else device_placement

    # --------------------------------------------------------------------------------------------------- step

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Enters the next micro-batch: gradients of ``models`` are reduced, and optimizers step, when the window ends.

        A loop with several losses (a GAN's) needs a block for each loss, with the models that the loss trains.
        """
        return MicroBatch(self, models)

    @recorded("backward", shared=False, counted=True)
    def backward(self, loss: torch.Tensor, *, weight: accumulation.Weight | None = None, **kwargs: Any) -> None:
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
        if not self._models:
            raise PrepareError("backward was called before a model was prepared; call prepare(model, ...) first")
        clock, backend = self.clock, self.backend
        if clock.unclaimed:
            clock.claim_passes()
        if self._preemption is not None:
            self._preemption.before_backward()
        clock.unstepped = clock.due or clock.unstepped
        if backend.loss_scale is not None:
            clock.settle_scale(backend.loss_scale)
        if weight is not None:
            self._weighted_backward(loss, weight, kwargs)
            return
        if clock.key:
            self._backward(loss, clock.scale, kwargs)
        else:
            backend.backward(loss, scale=clock.scale, **kwargs)
        if clock.due and clock.correction != 1.0:
            accumulation.correct_short_window(clock, self._accumulated(), backend.gradients)

    # ---------------------------------------------------------------------------------------------------- end

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Returns the user's own model inside a prepared one.

        It still computes in the policy's precision when called; with ``keep_fp32_wrapper=False`` the result is a module
        that shares all tensors with it and computes in their own dtypes (the prepared model itself is not changed).
        """
        own = self.backend.unwrap(model, keep_torch_compile=keep_torch_compile)
        if keep_fp32_wrapper:
            return own
        from accel_precision import plain_module

        return plain_module(self.backend.unwrap(own, keep_torch_compile=False))

    def native(self, kind: type[B]) -> B:
        """Returns the backend as an instance of ``kind``, with the methods that only that backend has.

        ``accelerator.native(DeepSpeedBackend).zero_init()``, for example.

        Raises:
            BackendError: another backend runs; the message names the strategy that gives this one.
        """
        from accel_backends.core.native import native

        return native(self.backend, kind)

    def free_memory(self, *objects: Any) -> list[None]:
        """Releases all prepared objects; returns a None for each argument: ``a, b = accelerator.free_memory(a, b)``."""
        for optimizer in self._optimizers:
            optimizer.release()
        self.backend.release(self._models)
        self._models.clear()
        self._optimizers.clear()
        self._schedulers.clear()
        self._dataloaders.clear()
        self.clock.reset()
        from accel_state.device.memory import release_memory

        return release_memory(*objects)

    clear = free_memory

    def end_training(self) -> None:
        """Finishes a running save; closes trackers, backend, and the process group if this Accelerator opened it."""
        self._stop_listening()
        if self._saver is not None:
            self._saver.close()
            self._saver = None
        self._end_tracking()
        self.backend.close()
        self.session.close()
