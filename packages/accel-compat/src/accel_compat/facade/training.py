"""Methods of the Accelerator for a training step."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from accel_compat.data.loaders import DataLoaderDispatcher
from accel_compat.facade.backend import translate
from accel_compat.helpers import operations
from accel_state.enums import DistributedType
from accel_state.pytree.operations import recursively_apply

LOG = logging.getLogger("accelerate.accelerator")


class TrainingMethods:
    """Accumulation, backward, clipping and metrics of an Accelerator."""

    def _do_sync(self: Any) -> None:
        state = self.gradient_state
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step = 0
            state._set_sync_gradients(True)
        else:
            self.step += 1
            state._set_sync_gradients(self.step % state.num_steps == 0)

    @property
    def sync_gradients(self: Any) -> bool:
        """Whether the gradients of the current micro-batch are reduced, and optimizers step."""
        return bool(self.gradient_state.sync_gradients)

    @sync_gradients.setter
    def sync_gradients(self: Any, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self: Any) -> int:
        """Micro-batches of one optimizer step."""
        return int(self.gradient_state.num_steps)

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self: Any, steps: int) -> None:
        self.gradient_state.plugin_kwargs.update({"num_steps": steps})

    @contextmanager
    def accumulate(self: Any, *models: Any) -> Iterator[None]:
        """Enters the next micro-batch: gradients are reduced and optimizers step when the window ends."""
        self._do_sync()
        every = self.gradient_state.plugin_kwargs.get("sync_each_batch", False) and self.use_distributed
        with ExitStack() as stack:
            if not self.sync_gradients and not every:
                for model in models:
                    stack.enter_context(self.no_sync(model))
            yield

    def no_sync(self: Any, model: Any) -> AbstractContextManager[Any]:
        """Within the block, the backward does not reduce the gradients of ``model``."""
        if not self.use_distributed or model is None:
            return contextlib.nullcontext()
        held: AbstractContextManager[Any] = self._backend.no_sync(model)
        return held

    @staticmethod
    def trigger_sync_in_backward(model: Any) -> AbstractContextManager[Any]:
        """Within the block, the next backward reduces the gradients even if the forward ran under ``no_sync``."""
        from accel_compat.private import synchronising

        return synchronising(model)

    def backward(self: Any, loss: Any, **kwargs: Any) -> None:
        """Computes gradients of the loss divided by the number of accumulation steps.

        With DeepSpeed that is the number of its configuration, and ``scale_wrt_gas=False`` leaves the loss as it is.
        """
        rate = kwargs.pop("learning_rate", None)
        if rate is not None and self.has_lomo_optimizer:
            self.lomo_backward(loss, rate)
            return
        steps = self.gradient_accumulation_steps
        if self.distributed_type == DistributedType.DEEPSPEED:
            plugin = self.state.deepspeed_plugin
            scaled = kwargs.pop("scale_wrt_gas", True) and plugin is not None
            stated = plugin.get_value("gradient_accumulation_steps", 1) if scaled else 1
            steps = steps if stated == "auto" else int(stated)  # "auto" until models are prepared by ``prepare``
        self._backend.backward(loss, scale=1.0 / steps, **kwargs)

    def lomo_backward(self: Any, loss: Any, learning_rate: float) -> None:
        """Backward of optimizers that update within it.

        Raises:
            ValueError: no such optimizer is prepared.
        """
        if learning_rate is None:
            raise ValueError("A learning rate must be passed in order to call backward pass with LOMO optimizers.")
        raise ValueError(
            "Backward pass not properly called on LOMO optimizers. Are you sure you passed a LOMO optimizer?"
        )

    def unscale_gradients(self: Any, optimizer: Any = None) -> None:
        """Removes the loss scale of fp16 from the gradients."""
        if self.scaler is None:
            return
        chosen = self._optimizers if optimizer is None else optimizer
        chosen = chosen if isinstance(chosen, list | tuple) else [chosen]
        self._backend.gradients.unscale([getattr(one, "optimizer", one) for one in chosen])

    def clip_grad_norm_(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clips the norm of all gradients, and returns the norm."""
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        parameters = list(parameters)
        self.unscale_gradients()
        known = self._backend.owned.parameters
        if not parameters or any(id(p) not in known for p in parameters):
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        return self._backend.gradients.clip_norm(parameters, max_norm, norm_type, error_if_nonfinite=False)

    def clip_grad_value_(self: Any, parameters: Any, clip_value: float) -> None:
        """Clips the value of every gradient."""
        if self.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
            raise Exception("DeepSpeed and FSDP  do not support `clip_grad_value_`. Use `clip_grad_norm_` instead.")
        self.unscale_gradients()
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    @property
    def optimizer_step_was_skipped(self: Any) -> bool:
        """Whether an optimizer skipped its last step because gradients had overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def gather_for_metrics(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers results of all processes, without the samples that the last batch repeats."""
        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
            tensors = True
        except TypeError:
            tensors = False
        as_objects = use_gather_object or not tensors
        data = operations.gather_object(input_data) if as_objects else self.gather(input_data)
        try:
            if not self.gradient_state.end_of_dataloader:
                return data
            remainder = self.gradient_state.remainder
            if remainder == -1:
                LOG.info(
                    "The used dataset had no length, returning gathered tensors. You should drop the remainder yourself."
                )
                return data
            if remainder > 0:
                return data[:remainder] if as_objects else recursively_apply(lambda t: t[:remainder], data)
        except Exception:
            return data
        return data

    @contextmanager
    def join_uneven_inputs(self: Any, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Within the block, processes may have different numbers of batches."""
        if not self.multi_device:
            if self.distributed_type != DistributedType.NO:
                warnings.warn(
                    "Joining uneven inputs is only supported for multi-GPU training, as a result `join_uneven_inputs` "
                    "will have no effect.",
                    stacklevel=3,
                )
            yield
            return
        replaced = self._override_even_batches(even_batches)
        even = self.even_batches if even_batches is None else even_batches
        try:
            with torch.distributed.algorithms.join.Join(joinables, enable=not even, throw_on_early_termination=False):
                yield
        finally:
            for sampler, before in replaced:
                sampler.even_batches = before

    def _override_even_batches(self: Any, even_batches: bool | None) -> list[tuple[Any, bool]]:
        if even_batches is None:
            return []
        replaced = []
        dispatched = False
        for loader in self._dataloaders:
            if type(loader) is DataLoaderDispatcher:
                dispatched = True
                continue
            replaced.append((loader.batch_sampler, loader.batch_sampler.even_batches))
            loader.batch_sampler.even_batches = even_batches
        if dispatched:
            warnings.warn(
                "Overriding even_batches is only supported for map-style datasets, yet some dataloaders given were "
                "iterable",
                stacklevel=4,
            )
        return replaced

    def autocast(self: Any, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """Autocast context of the run's precision."""
        handler = self.autocast_handler if autocast_handler is None else autocast_handler
        context: AbstractContextManager[Any] = self._backend.run.autocast_context(
            None if handler is None else translate(handler)
        )
        return context

    @contextmanager
    def profile(self: Any, profile_handler: Any = None) -> Iterator[Any]:
        """Profiles the block with torch's profiler, and writes its trace if a folder is given."""
        from accel_compat.options.handlers import CompatProfileKwargs

        handler = profile_handler or self.profile_handler or CompatProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is None:
            return
        os.makedirs(handler.output_trace_dir, exist_ok=True)
        profiler.export_chrome_trace(os.path.join(handler.output_trace_dir, f"profile_{self.process_index}.json"))
        self.wait_for_everyone()

    def maybe_context_parallel(
        self: Any, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None
    ) -> AbstractContextManager[None]:
        """Within the block, each buffer is this rank's shard of its sequences if context parallelism is on.

        Buffers are full again afterwards, except those of ``no_restore_buffers``.
        """
        layout = self._backend.layout
        context: AbstractContextManager[None] = layout.sharded_buffers(
            buffers or (), buffer_seq_dims or (), no_restore_buffers or ()
        )
        return context
