"""Preparation of models for DeepSpeed as Accelerate does it: every "auto" of the configuration receives a value."""

import logging
from collections.abc import Sequence
from math import ceil
from typing import Any, final

import torch
from torch import nn

from accel.utils.deepspeed import DummyOptim, DummyScheduler
from accel_compat.options.deepspeed import AUTO, GATHER, CompatDeepSpeedPlugin
from accel_deepspeed.config.resolve_auto import bucket_sizes, width_of

LOG = logging.getLogger("accelerate.accelerator")
_MICRO, _STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@final
class DeepSpeedEngineWrapper:
    """The engine that an Accelerator prepared first."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def get_global_grad_norm(self) -> float | None:
        """Norm of all gradients of the last step."""
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)


def complete(plugin: CompatDeepSpeedPlugin, items: Sequence[Any], accelerator: Any) -> None:
    """Replaces each "auto" of the plugin's configuration, in place, for the objects that are prepared together.

    Raises:
        ValueError: an "auto" that the objects do not determine.
    """
    models = [one for one in items if isinstance(one, nn.Module)]
    if not models:
        return
    if plugin.is_auto(_STEPS):
        plugin.fill_match(_STEPS, must_match=False, **{_STEPS: accelerator.gradient_accumulation_steps})
    steps = int(plugin.get_value(_STEPS, 1))
    if steps != accelerator.gradient_accumulation_steps:
        LOG.warning("gradient_accumulation_steps is %d, as in the DeepSpeed config", steps)
        accelerator.gradient_accumulation_steps = steps
    micro = _micro_batch(plugin, items, accelerator)
    values: dict[str, Any] = {
        _MICRO: micro,
        "train_batch_size": micro * steps * accelerator.num_processes,
        "gradient_clipping": 1.0,
        GATHER: False,
        **_widths(plugin, models[0]),
        **_dummies(items, 1 if accelerator.split_batches else accelerator.num_processes),
    }
    plugin.deepspeed_config_process(must_match=False, **values)
    if accelerator.device.type == "cpu" and plugin.get_value("fp16.enabled") is True:
        raise ValueError("Type fp16 is not supported on your device.")


def note_engine(accelerator: Any, model: Any) -> None:
    """Keeps the first engine as ``deepspeed_engine_wrapped``, and warns about further ones."""
    if accelerator.deepspeed_engine_wrapped is None:
        accelerator.deepspeed_engine_wrapped = DeepSpeedEngineWrapper(model)
        return
    LOG.warning(
        "A wrapped DeepSpeed engine reference is currently tied for this `Accelerator()` instance. "
        "`deepspeed_engine_wrapped` stays the first one; `accelerator.backward()` works for each of them."
    )


def _micro_batch(plugin: CompatDeepSpeedPlugin, items: Sequence[Any], accelerator: Any) -> int:
    if not plugin.is_auto(_MICRO):
        return int(plugin.get_value(_MICRO, 1))
    advice = (
        "set an integer value in `train_micro_batch_size_per_gpu` in the deepspeed config file or assign integer value "
        "to `AcceleratorState().deepspeed_plugin.deepspeed_config['train_micro_batch_size_per_gpu']`."
    )
    sizes: list[Any] = [one.batch_size for one in items if isinstance(one, torch.utils.data.DataLoader)]
    if not sizes:
        raise ValueError(
            "When using DeepSpeed, `accelerate.prepare()` requires you to pass at least one of training or evaluation "
            f"dataloaders with `batch_size` attribute returning an integer value or alternatively {advice}"
        )
    if None in sizes:
        raise ValueError(
            "At least one of the dataloaders passed to `accelerate.prepare()` has `None` as batch size. Please "
            + advice
        )
    size = min(sizes) if plugin.is_train_batch_min else max(sizes)
    return int(size // accelerator.num_processes if accelerator.split_batches else size)


def _widths(plugin: CompatDeepSpeedPlugin, model: nn.Module) -> dict[str, int]:
    """Sizes of buckets that follow the width of the model."""
    autos = [key for key in bucket_sizes(1) if plugin.is_auto(key)]
    if not autos:
        return {}
    config: Any = getattr(model, "config", None)
    advice = (
        f"therefore it's not possible to automatically fill out the following `auto` entries in the DeepSpeed config "
        f"file: {autos}. You can fix that by replacing `auto` values for these keys with an integer value of your choice."
    )
    if config is None:
        raise ValueError(f"Can't find `model.config` entry, {advice}")
    width = width_of(config)
    if width is None:
        raise ValueError(f"Can find neither `model.config.hidden_size` nor `model.config.hidden_sizes`, {advice}")
    return bucket_sizes(width)


def _dummies(items: Sequence[Any], ranks: int) -> dict[str, Any]:
    """Values of the objects that stand for DeepSpeed's own; ``ranks``: moves of a user's schedule in one step."""
    values: dict[str, Any] = {}
    rate: Any = None
    for optimizer in (one for one in items if isinstance(one, DummyOptim)):
        rate = optimizer.lr
        values |= {"optimizer.params.lr": rate, "optimizer.params.weight_decay": optimizer.weight_decay}
    for scheduler in (one for one in items if isinstance(one, DummyScheduler)):
        if scheduler.lr_scheduler_callable is not None:
            continue
        defaults = getattr(scheduler.optimizer, "defaults", {})
        driven = defaults.get("lr", getattr(scheduler.optimizer, "lr", rate))
        values |= {
            "scheduler.params.warmup_min_lr": 0.0,
            "scheduler.params.warmup_max_lr": driven,
            "scheduler.params.warmup_num_steps": scheduler.warmup_num_steps,
        }
        if isinstance(scheduler.total_num_steps, int | float):
            values["scheduler.params.total_num_steps"] = ceil(scheduler.total_num_steps / ranks)
    return {key: value for key, value in values.items() if value is not None and value != AUTO}
