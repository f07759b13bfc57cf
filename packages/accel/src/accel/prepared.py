"""Prepared objects of a run, and the preparation that makes them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final
from weakref import WeakSet

import torch
from torch import nn

from accel.optimizer import PreparedOptimizer
from accel.scheduler import PreparedScheduler
from accel.setup.object_kinds import batch_sizes, check_driven, kind_of
from accel_state.errors import ConfigError, PrepareError
from accel_state.watchdog.decorator import recorded

if TYPE_CHECKING:
    from accel.checkpoints.train_state import Stateful
    from accel.loop.accumulator import StepClock
    from accel.loop.loaders import Loaders
    from accel.setup.run_strategy import RunStrategy
    from accel_backends import TorchDynamoPlugin
    from accel_observe.meters.observed_run import RunLog

Gate = Callable[[Any, Any], Any]
"""Function of a loader and its batches that yields the batches, with a stop point before each."""


@final
class PreparedObjects:
    """Models, optimizers, schedulers and loaders that one Accelerator prepared, and objects that were registered.

    Objects of one kind are numbered in the order in which they were prepared; a checkpoint names them by these
    numbers. An optimizer belongs to the models whose parameters it updates, whatever its number is.

    Attributes:
        trained_apart: models whose replicas differ between ranks for now (local SGD).
    """

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[Any] = []
        self.custom: list[Stateful] = []
        self.trained_apart: WeakSet[nn.Module] = WeakSet()
        self._models_of: dict[int, tuple[nn.Module, ...]] = {}
        self._gate: Gate | None = None

    @property
    def inner_optimizers(self) -> list[torch.optim.Optimizer]:
        """The users' optimizers inside the prepared ones."""
        return [one.optimizer for one in self.optimizers]

    def add_optimizer(self, optimizer: PreparedOptimizer, models: Sequence[nn.Module]) -> None:
        """Adds an optimizer that updates parameters of ``models``."""
        self.optimizers.append(optimizer)
        self._models_of[id(optimizer)] = tuple(models)

    def add_loader(self, loader: Any) -> None:
        """Adds a loader, unless it is known; the gate, if there is one, is called before each of its batches."""
        if self._gate is not None:
            loader.gate = self._gate
        if not any(loader is other for other in self.loaders):
            self.loaders.append(loader)

    def prepared(self, item: Any) -> Any:
        """The prepared optimizer or scheduler around ``item``, if there is one; otherwise ``item`` itself.

        Of one that ``clear`` has released, the user's own is looked up, which can be prepared again.
        """
        if isinstance(item, PreparedOptimizer | PreparedScheduler) and item.released:
            item = item.unprepared
        around: list[Any] = [one for one in self.optimizers if one.optimizer is item]
        around += [one for one in self.schedulers if one.scheduler is item]
        return around[0] if around else item

    def adopt(self, item: PreparedOptimizer | PreparedScheduler) -> None:
        """Adds an object that is prepared already, unless it is known."""
        known: list[Any] = self.optimizers if isinstance(item, PreparedOptimizer) else self.schedulers
        if not any(item is other for other in known):
            known.append(item)

    def set_gate(self, gate: Gate | None) -> None:
        """Sets the gate of all loaders, also of those that are added later."""
        self._gate = gate
        for loader in self.loaders:
            loader.gate = gate

    def position(self, model: nn.Module) -> int:
        """Position of a prepared model among all of them.

        Raises:
            PrepareError: ``prepare`` did not return this model.
        """
        for position, prepared in enumerate(self.models):
            if prepared is model:
                return position
        compiled = model._modules.get("_orig_mod")
        if compiled is not None:
            return self.position(compiled)
        raise PrepareError(
            f"accumulate was given a {type(model).__name__} that prepare did not return; give it the model that "
            "prepare returned"
        )

    def only_model(self, model: nn.Module | None) -> nn.Module:
        """Returns the given prepared model, or for None the only one that there is.

        Raises:
            ConfigError: there are several models, or the given one is not prepared.
        """
        if model is None and len(self.models) == 1:
            return self.models[0]
        for prepared in self.models:
            if prepared is model:
                return prepared
        raise ConfigError(
            f"a folder of DeepSpeed holds one model, and {len(self.models)} are prepared; give the one that it is of"
        )

    def optimizers_of(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """The users' optimizers that update parameters of this model."""
        ids = set(map(id, model.parameters()))
        return [
            one.optimizer
            for one in self.optimizers
            if any(model is other for other in self._models_of.get(id(one), ())) or _updates(one, ids)
        ]

    def holding(self, parameters: Iterable[torch.Tensor]) -> list[torch.optim.Optimizer]:
        """The users' optimizers that update some of these parameters; the only optimizer updates all."""
        if len(self.optimizers) < 2:
            return self.inner_optimizers
        ids = set(map(id, parameters))
        return [one.optimizer for one in self.optimizers if _updates(one, ids)]

    def clear(self) -> None:
        """Forgets everything that was prepared; registered objects stay."""
        for optimizer in self.optimizers:
            optimizer.release()
        for kind in (self.models, self.optimizers, self.schedulers, self.loaders):
            kind.clear()
        self._models_of.clear()


@final
@dataclass(slots=True)
class PreparationOptions:
    """Options of objects that are prepared from now on.

    Attributes:
        device_placement: models and batches are moved to the device, unless a call says otherwise.
        follow_optimizer: schedulers step only when their optimizer does.
        scheduler_repeats: steps of a schedule for each optimizer step.
        dynamo: options of compilation; None: models are not compiled.
    """

    device_placement: bool = True
    follow_optimizer: bool = True
    scheduler_repeats: int = 1
    dynamo: "TorchDynamoPlugin | None" = None


@final
class Preparation:
    """Prepares objects for the backend, and adds them to the prepared ones."""

    def __init__(
        self,
        strategy: "RunStrategy",
        prepared: PreparedObjects,
        loaders: "Loaders",
        clock: "StepClock",
        log: "RunLog",
        options: PreparationOptions,
    ) -> None:
        self._strategy = strategy
        self._prepared = prepared
        self._loaders = loaders
        self._clock = clock
        self._log = log
        self.options = options

    @recorded("prepare", shared=False)
    def prepare(self, items: Sequence[Any], placement: Sequence[bool | None] | None) -> Any:
        """See ``Accelerator.prepare``."""
        if placement is None:
            placement = [None] * len(items)
        elif len(placement) != len(items):
            raise PrepareError(f"device_placement has {len(placement)} entries for {len(items)} objects")
        items = [self._prepared.prepared(item) for item in items]
        kinds = [kind_of(item) for item in items]
        results = list(items)
        self._prepare_bundle(results, kinds, placement)
        for position, kind in enumerate(kinds):
            if kind == "loader":
                results[position] = self.prepare_loader(items[position], placement[position])
            elif kind == "prepared":
                self._prepared.adopt(items[position])
        return results[0] if len(results) == 1 else tuple(results)

    def prepare_model(self, model: nn.Module, placed: bool | None, *, training: bool) -> nn.Module:
        """See ``Accelerator.prepare_model``."""
        if training:
            prepared: nn.Module = self.prepare([model], [placed])
            return prepared
        results: list[Any] = [model]
        self._prepare_bundle(results, ["model"], [placed], training=False)
        placed_model: nn.Module = results[0]
        return placed_model

    def prepare_loader(
        self, loader: Any, placed: bool | None = None, slice_fn: Callable[..., Any] | None = None
    ) -> Any:
        """See ``Accelerator.prepare_data_loader``."""
        made = self._loaders.prepare(loader, on_device=self._places(placed), slice_fn=slice_fn)
        self._prepared.add_loader(made)
        return made

    def _prepare_bundle(
        self, results: list[Any], kinds: Sequence[str], placement: Sequence[bool | None], *, training: bool = True
    ) -> None:
        """Prepares models, their optimizers and schedulers in place, as one bundle."""
        where = {
            kind: [position for position, one in enumerate(kinds) if one == kind]
            for kind in ("model", "optimizer", "scheduler")
        }
        if not any(where.values()):
            return
        self._strategy.session.live_group()  # raises after end_training, before a backend meets torch's own error
        from accel_backends import Bundle
        from accel_inference.quantization.bnb_layers import load_scales

        known, split = self._prepared, self._loaders.options.split_batches
        models, optimizers, schedulers = ([results[position] for position in where[kind]] for kind in where)
        check_driven(schedulers, [*known.optimizers, *optimizers])
        for model in models:
            load_scales(model)
        if training:
            self._strategy.decide(results, kinds, split_batches=split, in_use=bool(known.models))
        trained = [_indices_trained(optimizer, [*known.models, *models]) for optimizer in optimizers]
        share = 1 / self._strategy.data_shard.count if split else 1
        backend = self._strategy.backend
        bundle = backend.prepare(
            Bundle(
                models=models,
                optimizers=optimizers,
                schedulers=schedulers,
                place=tuple(self._places(placement[position]) for position in where["model"]),
                training=training,
                batch_sizes=batch_sizes(results, kinds, share),
            )
        )
        for position, model in zip(where["model"], bundle.models, strict=True):
            results[position] = model if self.options.dynamo is None else backend.compile(model, self.options.dynamo)
            known.models.append(results[position])
        for position, optimizer, indices in zip(where["optimizer"], bundle.optimizers, trained, strict=True):
            results[position] = PreparedOptimizer(optimizer, self._clock, backend, self._note_skip)
            known.add_optimizer(results[position], [known.models[index] for index in indices])
        for one in known.schedulers:  # some were prepared before their optimizer
            one.optimizers = self._followed(one.scheduler)
        for position, scheduler in zip(where["scheduler"], bundle.schedulers, strict=True):
            results[position] = self._wrap_scheduler(scheduler)
            known.schedulers.append(results[position])

    def _wrap_scheduler(self, scheduler: Any) -> PreparedScheduler:
        return PreparedScheduler(
            scheduler,
            self._followed(scheduler),
            self._clock,
            follow_optimizer=self.options.follow_optimizer,
            repeats=1 if self._loaders.options.split_batches else self.options.scheduler_repeats,
        )

    def _followed(self, scheduler: Any) -> tuple[PreparedOptimizer, ...]:
        """The prepared optimizer that a scheduler drives, or all of them if it names none."""
        driven = getattr(scheduler, "optimizer", None)
        optimizers = self._prepared.optimizers
        return tuple(one for one in optimizers if one is driven or one.optimizer is driven) or tuple(optimizers)

    def _note_skip(self) -> None:
        """Called after an optimizer step was skipped on all ranks."""
        scaler = self._strategy.backend.loss_scale
        scale = "" if scaler is None else f" at a loss scale of {scaler.current:g}"
        self._log.event("skipped", text=f"an optimizer step was left out, as gradients had overflowed{scale}")

    def _places(self, placed: bool | None) -> bool:
        return self.options.device_placement if placed is None else placed


def _updates(optimizer: torch.optim.Optimizer, ids: set[int]) -> bool:
    return any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"])


def _indices_trained(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> list[int]:
    """Indices of the models whose parameters the optimizer updates, before a backend replaces parameters."""
    return [n for n, model in enumerate(models) if _updates(optimizer, set(map(id, model.parameters())))]
