"""The Accelerator with Accelerate's semantics, over accel's backends."""

import logging
import os
from collections import OrderedDict
from typing import Any

import torch

from accel_compat.facade.backend import open_backend
from accel_compat.facade.plugins import check_sequences, chosen_plugins, handlers_by_field, refuse_megatron
from accel_compat.facade.preparing import PreparingMethods
from accel_compat.facade.process import ProcessMethods
from accel_compat.facade.saving import SavingMethods
from accel_compat.facade.settings import SettingProperties
from accel_compat.facade.trackers import TrackingMethods
from accel_compat.facade.training import TrainingMethods
from accel_compat.options.handlers import (
    CompatAccumulationPlugin,
    CompatDynamoPlugin,
    CompatProjectConfiguration,
    DataLoaderConfiguration,
)
from accel_compat.options.tensor_parallel import degrees_with_plugin
from accel_compat.state.accelerator_state import PRECISIONS, SharedAcceleratorState
from accel_compat.state.gradient_state import SharedGradientState
from accel_state.enums import DistributedType

LOG = logging.getLogger("accelerate.accelerator")


class CompatAccelerator(
    ProcessMethods, SettingProperties, PreparingMethods, TrainingMethods, SavingMethods, TrackingMethods
):
    """Accelerate's ``Accelerator``: all instances of a process share their state, and accel's backends train."""

    init_handler: Any
    ddp_handler: Any
    autocast_handler: Any
    scaler_handler: Any
    _custom_objects: list[Any]

    def __init__(  # noqa: PLR0913  (the signature that users know)
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[Any] | None = None,
        log_with: Any = None,
        project_dir: Any = None,
        project_config: CompatProjectConfiguration | None = None,
        gradient_accumulation_plugin: CompatAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
    ) -> None:
        self.trackers: list[Any] = []
        self.project_configuration = project_config or CompatProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and self.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        if mixed_precision is not None:
            mixed_precision = str(getattr(mixed_precision, "value", mixed_precision))
            if mixed_precision not in PRECISIONS:
                raise ValueError(f"Unknown mixed_precision mode: {mixed_precision}. Choose between {list(PRECISIONS)}")
        if dynamo_plugin is not None and dynamo_backend is not None:
            raise ValueError("You cannot pass in both `dynamo_plugin` and `dynamo_backend`, please only pass in one.")
        dynamo = CompatDynamoPlugin(backend=dynamo_backend) if dynamo_backend is not None else dynamo_plugin
        parallelism_config = degrees_with_plugin(parallelism_config, torch_tp_plugin)
        refuse_megatron(megatron_lm_plugin)
        deepspeed, fsdp_plugin = chosen_plugins(deepspeed_plugin, deepspeed_plugins, fsdp_plugin, parallelism_config)
        fields = handlers_by_field(kwargs_handlers or [])
        for name, handler in fields.items():
            setattr(self, name, handler)
        self.has_fp8_handler = any(fields[f"{kind}_recipe_handler"] for kind in ("ao", "te", "msamp", "fp8"))
        init = {} if self.init_handler is None else self.init_handler.to_kwargs()
        self.state = SharedAcceleratorState(
            mixed_precision=mixed_precision,
            cpu=cpu,
            dynamo_plugin=dynamo or CompatDynamoPlugin(),
            deepspeed_plugin=deepspeed,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism_config,
            _from_accelerator=True,
            **init,
        )
        check_sequences(parallelism_config, self.distributed_type)
        self._open(cpu=cpu, parallelism=parallelism_config)
        self._set_options(
            split_batches, dataloader_config, gradient_accumulation_steps, gradient_accumulation_plugin, rng_types
        )
        self.device_placement = device_placement and not self._places_itself
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.step = 0
        self.flag_tensor: torch.Tensor | None = None
        self._models, self._optimizers, self._schedulers = [], [], []
        self._dataloaders, self._custom_objects = [], []
        self._save_model_state_pre_hook: OrderedDict[int, Any] = OrderedDict()
        self._load_model_state_pre_hook: OrderedDict[int, Any] = OrderedDict()
        self.has_lomo_optimizer = False
        self.deepspeed_engine_wrapped: Any = None
        from accel_compat.helpers.tracking import filter_trackers

        self.log_with = filter_trackers(log_with, self.logging_dir)
        if log_with not in (None, []) and not self.log_with:
            LOG.warning("`log_with=%s` was passed but no supported trackers are currently installed.", log_with)

    def _open(self, *, cpu: bool, parallelism: Any) -> None:
        """Opens the backend of this run."""
        plugins: dict[str, Any] = {}
        handlers = [self.autocast_handler, self.scaler_handler]
        strategy = None
        if self.distributed_type == DistributedType.DEEPSPEED:
            from accel_compat.options.deepspeed import translate_deepspeed

            plugins["deepspeed_plugin"] = translate_deepspeed(
                self.state.deepspeed_plugin, on_cpu=self.device.type == "cpu"
            )
        elif self.distributed_type == DistributedType.FSDP:
            from accel_compat.options.fsdp_translation import translate_fsdp

            plugins["fsdp_plugin"] = self._fsdp_options = translate_fsdp(self.state.__dict__.get("fsdp_plugin"))
        elif self.num_processes == 1:
            strategy = "single"
        else:
            strategy = "ddp"
            handlers.append(self.ddp_handler)
        parts = open_backend(
            precision=self.state.mixed_precision,
            cpu=cpu,
            device_type=self.device.type,
            handlers=[one for one in handlers if one is not None],
            strategy=strategy,
            plugins=plugins,
            parallelism=parallelism,
        )
        self._backend = parts.backend
        if parallelism is not None:
            self.state.device_mesh = parts.parallelism.get_device_mesh(self.device.type)
        precise = self.state.mixed_precision
        self.native_amp = precise in ("bf16", "fp8") or (precise == "fp16" and self.device.type != "cpu")

    @property
    def scaler(self) -> Any:
        """Loss scale of fp16, or None."""
        return self._backend.loss_scale

    @property
    def _places_itself(self) -> bool:
        return self.distributed_type == DistributedType.DEEPSPEED

    def _set_options(
        self, split_batches: Any, loading: Any, steps: int, plugin: CompatAccumulationPlugin | None, rng_types: Any
    ) -> None:
        self.dataloader_config = loading or DataLoaderConfiguration()
        if isinstance(split_batches, bool):
            self.dataloader_config.split_batches = split_batches
        if plugin is not None:
            if steps != 1:
                raise ValueError(
                    "You can only pass one of `gradient_accumulation_steps` and `gradient_accumulation_plugin`. Please "
                    "only pass in the created `GradientAccumulationPlugin` object."
                )
        else:
            steps = int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", steps))
            plugin = CompatAccumulationPlugin(num_steps=steps)
        self.gradient_state = SharedGradientState(gradient_accumulation_plugin=plugin)
        self.rng_types = ["generator"] if rng_types is None else rng_types

    def __deepcopy__(self, memo: object) -> "CompatAccelerator":
        LOG.info("Deep copying the `Accelerator` object, note that this will point to the same original object.")
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_backend", "gradient_state")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.gradient_state = SharedGradientState()
        self._open(cpu=False, parallelism=self.state.parallelism_config)


CompatAccelerator.__name__ = CompatAccelerator.__qualname__ = "Accelerator"
CompatAccelerator.__module__ = "accelerate.accelerator"
