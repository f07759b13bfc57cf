"""Methods of the Accelerator that prepare models, optimizers, schedulers and loaders."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accel.utils.enums import DynamoBackend
from accel_backends import Bundle
from accel_compat.data.prepare import prepare_data_loader
from accel_compat.facade.deepspeed import complete, note_engine
from accel_compat.facade.optimizer import AcceleratedOptimizer
from accel_compat.facade.scheduler import AcceleratedScheduler
from accel_compat.facade.sequences import split_sequences
from accel_compat.private import publish_sequence_group
from accel_inference.quantization.bnb_layers import load_scales
from accel_state.enums import DistributedType


def is_scheduler(item: Any) -> bool:
    """Whether an object is a learning-rate scheduler."""
    return isinstance(item, torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau)


def check_quantized(item: Any) -> None:
    """Refuses models with weights of 4 or 8 bits that cannot be trained where they are.

    Raises:
        ValueError: a part of such a model is offloaded.
    """
    places = getattr(item, "hf_device_map", None)
    if not places or not (getattr(item, "is_loaded_in_8bit", False) or getattr(item, "is_loaded_in_4bit", False)):
        return
    from accel.utils.imports import is_bitsandbytes_multi_backend_available

    names = {str(place) for place in places.values()}
    if "disk" in names or ("cpu" in names and not is_bitsandbytes_multi_backend_available()):
        raise ValueError(
            "You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk offload."
        )


class PreparingMethods:
    """Preparation of an Accelerator's objects."""

    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]
    _schedulers: list[AcceleratedScheduler]
    _dataloaders: list[Any]
    _withdraw_group: Callable[[], None] | None = None
    """Withdraws the sequence-parallel group from DeepSpeed's functions."""

    def prepare(self: Any, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Prepares models, optimizers, schedulers and loaders, and returns them in the same order.

        Raises:
            ValueError: placements that do not fit the objects, or objects that the strategy needs together.
        """
        if device_placement is None:
            device_placement = [None] * len(args)
        elif self.distributed_type == DistributedType.DEEPSPEED:
            raise ValueError("You can't customize device placements with DeepSpeed.")
        elif len(device_placement) != len(args):
            raise ValueError(
                f"`device_placement` should be a list with {len(args)} elements (the number of objects passed)."
            )
        self._check_arguments(args)
        for item in args:
            check_quantized(item)
        results = list(args)
        engines = self.distributed_type == DistributedType.DEEPSPEED and any(isinstance(one, nn.Module) for one in args)
        if self.distributed_type == DistributedType.DEEPSPEED:
            self._complete_deepspeed(args)
        elif self.distributed_type == DistributedType.FSDP:
            self._complete_fsdp()
        self._prepare_bundle(results, device_placement)
        for position, item in enumerate(results):
            if isinstance(item, torch.utils.data.DataLoader):
                loader = self.prepare_data_loader(item, device_placement=device_placement[position])
                results[position] = self.deepspeed_ulysses_dl_adapter(loader, None) if engines else loader
        for position, item in enumerate(results):
            if is_scheduler(item) or isinstance(item, AcceleratedScheduler):
                results[position] = self.prepare_scheduler(item)
        return results[0] if len(results) == 1 else tuple(results)

    def _check_arguments(self: Any, args: tuple[Any, ...]) -> None:
        mapped = [one for one in args if isinstance(one, nn.Module) and self.verify_device_map(one)]
        bypass = os.environ.get("ACCELERATE_BYPASS_DEVICE_MAP", "false") == "true"
        if mapped and self.distributed_type != DistributedType.NO and not bypass:
            raise ValueError(
                "You can't train a model that has been loaded with `device_map='auto'` in any distributed mode. Please "
                "rerun your script specifying `--num_processes=1` or by launching with `python {{myscript.py}}`."
            )
        models = [one for one in args if isinstance(one, nn.Module)]
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]
        if self.distributed_type == DistributedType.DEEPSPEED and len(models) > 1:
            raise AssertionError(
                "You can't use same `Accelerator()` instance with multiple models when using DeepSpeed"
            )
        if self.is_fsdp2 and (len(models) > 1 or (optimizers and not models)):
            if len(models) > 1:
                raise ValueError("Only one model is supported when using FSDP2")
            raise ValueError(
                "When using FSDP2, a model and optimizer must be passed together to `Accelerator.prepare()`."
            )

    def _prepare_bundle(self: Any, results: list[Any], placement: list[bool | None]) -> None:
        """Prepares the models and the optimizers in place, with accel's backend."""
        fresh = [
            position
            for position, item in enumerate(results)
            if isinstance(item, nn.Module) and not self._known(item, self._models)
        ]
        wanted = [
            position
            for position, item in enumerate(results)
            if isinstance(item, torch.optim.Optimizer | _dummy_optimizer())
            and not isinstance(item, AcceleratedOptimizer)
        ]
        for item in results:
            if isinstance(item, AcceleratedOptimizer) and not any(item is one for one in self._optimizers):
                self._optimizers.append(item)
        parameters = {id(p) for n in fresh for p in results[n].parameters()}
        together = [n for n in wanted if self._belongs(results[n], parameters)] if fresh else []
        schedulers = [n for n, one in enumerate(results) if is_scheduler(one) or isinstance(one, _dummy_scheduler())]
        for n in fresh:
            load_scales(results[n])
        if fresh:
            bundle = self._backend.prepare(
                Bundle(
                    models=[results[n] for n in fresh],
                    optimizers=[results[n] for n in together],
                    schedulers=[results[n] for n in schedulers] if self._drives_schedulers else [],
                    place=tuple(self._placed(results[n], placement[n]) for n in fresh),
                    batch_sizes=self._batch_sizes(results),
                )
            )
            for n, model in zip(fresh, bundle.models, strict=True):
                results[n] = self._finished(model, results[n])
                if self._drives_schedulers:
                    note_engine(self, results[n])
            for n, optimizer in zip(together, bundle.optimizers, strict=True):
                results[n] = self._wrapped(optimizer, placement[n])
            if self._drives_schedulers:
                for n, scheduler in zip(schedulers, bundle.schedulers, strict=True):
                    dummy = isinstance(results[n], _dummy_scheduler())
                    results[n] = self._engine_scheduler(scheduler) if dummy else scheduler
        for n in wanted:
            if n not in together:
                results[n] = self.prepare_optimizer(results[n], device_placement=placement[n])

    def _complete_deepspeed(self: Any, items: tuple[Any, ...]) -> None:
        """Completes DeepSpeed's configuration, which is that of engines made from now on."""

        from accel_compat.options.deepspeed import translate_deepspeed

        plugin = self.state.deepspeed_plugin
        if plugin is None or not any(isinstance(one, nn.Module) for one in items):
            return
        complete(plugin, items, self)
        before = self._backend.config
        config = translate_deepspeed(plugin, on_cpu=self.device.type == "cpu")
        config.set_axis_sizes(
            sequences=before.sequence_parallel_size,
            layers=before.tensor_parallel_size,
            attention=before.sequence_attention,
        )
        self._backend.reconfigure(config)

    def _complete_fsdp(self: Any) -> None:
        """Takes what a script has set on the plugin since, before its first model, as ``auto_wrap_policy`` with PEFT."""
        from accel_compat.options.fsdp_translation import translate_fsdp

        if not self._models and translate_fsdp(self.state.__dict__.get("fsdp_plugin")) != self._fsdp_options:
            self._open(cpu=False, parallelism=self.state.parallelism_config)

    @property
    def _drives_schedulers(self: Any) -> bool:
        return bool(self.distributed_type == DistributedType.DEEPSPEED)

    def _belongs(self: Any, optimizer: Any, parameters: set[int]) -> bool:
        if not isinstance(optimizer, torch.optim.Optimizer):
            return True
        known = parameters | set(self._backend.owned.parameters)
        return all(id(p) in known for group in optimizer.param_groups for p in group["params"])

    def _batch_sizes(self: Any, results: list[Any]) -> tuple[int, ...]:
        sizes = [
            one.batch_size if one.batch_size is not None else getattr(one.batch_sampler, "batch_size", None)
            for one in results
            if isinstance(one, torch.utils.data.DataLoader)
        ]
        return tuple(size for size in sizes if size is not None)

    def _known(self: Any, item: Any, prepared: list[Any]) -> bool:
        if getattr(item, "_is_accelerate_prepared", False):
            if not any(item is one for one in prepared):
                prepared.append(item)
            return True
        return False

    def _placed(self: Any, model: nn.Module, placement: bool | None) -> bool:
        if placement is not None:
            return placement
        return bool(self.device_placement and not self.verify_device_map(model))

    def _finished(self: Any, model: nn.Module, original: nn.Module) -> nn.Module:
        plugin = self.state.dynamo_plugin
        if plugin is not None and plugin.backend != DynamoBackend.NO and not _is_compiled(model):
            from accel_backends import TorchDynamoPlugin

            fields = plugin.to_dict()
            mode = None if fields["mode"] == "default" else fields["mode"]
            model = self._backend.compile(model, TorchDynamoPlugin(**{**fields, "mode": mode}))
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        self._models.append(model)
        return model

    def _wrapped(self: Any, optimizer: Any, placement: bool | None) -> AcceleratedOptimizer:
        placed = self.device_placement if placement is None else placement
        wrapped = AcceleratedOptimizer(optimizer, device_placement=placed, scaler=self.scaler, backend=self._backend)
        wrapped._is_accelerate_prepared = True
        self._optimizers.append(wrapped)
        return wrapped

    def prepare_model(
        self: Any, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepares one model; with ``evaluation_mode`` it is not wrapped for training."""
        if self._known(model, self._models):
            return model
        if not evaluation_mode:
            check_quantized(model)
        load_scales(model)
        bundle = self._backend.prepare(
            Bundle(models=[model], place=(self._placed(model, device_placement),), training=not evaluation_mode)
        )
        prepared: nn.Module = self._finished(bundle.models[0], model)
        return prepared

    def prepare_optimizer(self: Any, optimizer: Any, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Prepares one optimizer."""
        if self._known(optimizer, self._optimizers):
            return optimizer  # type: ignore[no-any-return]
        wrapped: AcceleratedOptimizer = self._wrapped(optimizer, device_placement)
        return wrapped

    def prepare_scheduler(self: Any, scheduler: Any) -> AcceleratedScheduler:
        """Prepares one scheduler; it follows the optimizer that it moves, or all of them."""
        if self._known(scheduler, self._schedulers):
            return scheduler  # type: ignore[no-any-return]
        driven = getattr(scheduler, "optimizer", None)
        own = [one for one in self._optimizers if driven is one or driven is one.optimizer]
        prepared = AcceleratedScheduler(
            scheduler,
            own[:1] or self._optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
        )
        prepared._is_accelerate_prepared = True  # type: ignore[attr-defined]
        self._schedulers.append(prepared)
        return prepared

    def _engine_scheduler(self: Any, scheduler: Any) -> AcceleratedScheduler:
        """Prepares the scheduler in place of a ``DummyScheduler``: DeepSpeed counts optimizer steps, not processes."""
        prepared = AcceleratedScheduler(scheduler, self._optimizers, split_batches=True)
        prepared._is_accelerate_prepared = True  # type: ignore[attr-defined]
        self._schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self: Any,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepares one loader: it yields this process's batches on its device."""
        if self._known(data_loader, self._dataloaders):
            return data_loader
        placed = self.device_placement if device_placement is None else device_placement
        config = self.dataloader_config
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.num_processes,
            process_index=self.process_index,
            split_batches=config.split_batches,
            put_on_device=placed,
            rng_types=list(self.rng_types),
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            torch_device_mesh=self.torch_device_mesh,
        )
        prepared._is_accelerate_prepared = True
        self._dataloaders.append(prepared)
        return prepared

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a module of the model was dispatched to several devices."""
        return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Returns a loader like ``dataloader`` whose pass begins after ``num_batches`` batches."""
        from accel_compat.data.prepare import skip_first_batches

        return skip_first_batches(dataloader, num_batches=num_batches)

    def deepspeed_ulysses_dl_adapter(self: Any, dl: Any, model: nn.Module | None) -> Any:
        """Returns a loader that splits the sequences of ``dl``; ``dl`` itself without sequence parallelism.

        ``prepare`` does this itself for a loader that is prepared together with the model.
        """
        group = self._backend.layout.sequence_group
        if group is None:
            return dl
        if self._withdraw_group is None:
            self._withdraw_group = publish_sequence_group(group)
        return split_sequences(dl, group, self.device)

    def free_memory(self: Any, *objects: Any) -> list[None]:
        """Releases all prepared objects; returns a None for each argument."""
        from accel_state.device.memory import release_memory

        self._backend.release(self._models)
        for model in self._models:
            model._is_accelerate_prepared = False  # its forward is the user's own again
        if self._withdraw_group is not None:
            self._withdraw_group()
            self._withdraw_group = None
        for held in (self._schedulers, self._optimizers, self._models, self._dataloaders):
            held.clear()
        self.step = 0
        self.deepspeed_engine_wrapped = None
        return release_memory(*objects)

    def clear(self: Any, *objects: Any) -> list[None]:
        """Releases all prepared objects; returns a None for each argument."""
        released: list[None] = self.free_memory(*objects)
        return released


def _is_compiled(model: Any) -> bool:
    from accel_compat.helpers.models import has_compiled_regions, is_compiled_module

    return is_compiled_module(model) or has_compiled_regions(model)


def _dummy_optimizer() -> type:
    from accel.utils.deepspeed import DummyOptim

    return DummyOptim


def _dummy_scheduler() -> type:
    from accel.utils.deepspeed import DummyScheduler

    return DummyScheduler
