"""DeepSpeed's plugin with Accelerate's fields, variables and errors."""

import copy
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accel.utils.dataclasses import DeepSpeedPlugin
from accel.utils.deepspeed import HfDeepSpeedConfig
from accel_deepspeed.config.auto_values import AutoValues
from accel_state.environment import str_to_bool

AUTO, ZERO = "auto", "zero_optimization"
GATHER = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
PREFIX = "ACCELERATE_DEEPSPEED_"
# For each field: its key in DeepSpeed's JSON, its variable, and its default.
_KEYS: Mapping[str, tuple[str, str, Any]] = {
    "gradient_accumulation_steps": (
        "gradient_accumulation_steps",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        AUTO,
    ),
    "gradient_clipping": ("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING", AUTO),
    "zero_stage": (f"{ZERO}.stage", f"{PREFIX}ZERO_STAGE", "2"),
    "offload_optimizer_device": (f"{ZERO}.offload_optimizer.device", f"{PREFIX}OFFLOAD_OPTIMIZER_DEVICE", "none"),
    "offload_param_device": (f"{ZERO}.offload_param.device", f"{PREFIX}OFFLOAD_PARAM_DEVICE", "none"),
    "offload_optimizer_nvme_path": (
        f"{ZERO}.offload_optimizer.nvme_path",
        f"{PREFIX}OFFLOAD_OPTIMIZER_NVME_PATH",
        "none",
    ),
    "offload_param_nvme_path": (f"{ZERO}.offload_param.nvme_path", f"{PREFIX}OFFLOAD_PARAM_NVME_PATH", "none"),
    "zero3_save_16bit_model": (GATHER, f"{PREFIX}ZERO3_SAVE_16BIT_MODEL", "false"),
}


class PluginSelectionError(NotImplementedError):
    """A plugin was selected by other means than the state's method."""


@dataclass
class CompatDeepSpeedPlugin(AutoValues):
    """Options of DeepSpeed; None is completed from the variables ``ACCELERATE_DEEPSPEED_…``.

    Attributes:
        hf_ds_config: DeepSpeed's configuration: a mapping, a path, JSON; without one it is made of the fields.
        deepspeed_config: that configuration as a mapping, which ``prepare`` completes in place.
        dschf: the configuration that Transformers sees while the plugin is selected.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: Any = None
    gradient_clipping: Any = None
    zero_stage: Any = None
    is_train_batch_min: bool = True
    offload_optimizer_device: Any = None
    offload_param_device: Any = None
    offload_optimizer_nvme_path: Any = None
    offload_param_nvme_path: Any = None
    zero3_init_flag: Any = None
    zero3_save_16bit_model: Any = None
    transformer_moe_cls_names: Any = None
    enable_msamp: Any = None
    msamp_opt_level: Any = None

    def __post_init__(self) -> None:
        for name, (_, variable, default) in _KEYS.items():
            if getattr(self, name) is None:
                setattr(self, name, _typed(name, os.environ.get(variable, default)))
        named = os.environ.get(f"{PREFIX}CONFIG_FILE", "none")
        if self.hf_ds_config is None and named not in ("", "none"):
            self.hf_ds_config = named
        if self.hf_ds_config is None:
            self.hf_ds_config = HfDeepSpeedConfig(self._document())
        else:
            self._read()
        self.deepspeed_config = self.hf_ds_config.config
        self.zero_stage = self.hf_ds_config.get_value(f"{ZERO}.stage")
        self._complete_init_flag()
        if self.transformer_moe_cls_names is None:
            self.transformer_moe_cls_names = os.environ.get(f"{PREFIX}MOE_LAYER_CLS_NAMES") or None
        self.dschf: Any = None
        self._selected = False

    def _read(self) -> None:
        """Reads the configuration, and fills its "auto" from the fields."""
        self._check_doubled()
        if not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)
        document = self.hf_ds_config.config
        document.setdefault("gradient_accumulation_steps", 1)
        if ZERO not in document:
            raise ValueError("Please specify the ZeRO optimization config in the DeepSpeed config.")
        for name, (key, _, _) in _KEYS.items():
            if self.is_auto(key) and getattr(self, name) != AUTO:
                self.fill_match(key, must_match=False, **{key: getattr(self, name)})
        self.hf_ds_config.set_stage_and_offload()

    def _check_doubled(self) -> None:
        """Refuses settings of a launcher that DeepSpeed's configuration has, too."""
        doubled = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
        doubled = [name for name in doubled if name in (*_KEYS, "mixed_precision")]
        if doubled:
            raise ValueError(
                f"With `deepspeed_config_file`, these variables of the accelerate config have no effect: {doubled}.\n"
                "Specify them in the DeepSpeed config file.\nIf you are using an accelerate config file, remove others "
                "config variables mentioned in the above specified list."
            )

    def _document(self) -> dict[str, Any]:
        """DeepSpeed's configuration with the values of the fields."""
        sections: dict[str, Any] = {}
        for kind in ("optimizer", "param"):
            path = getattr(self, f"offload_{kind}_nvme_path")
            sections[f"offload_{kind}"] = {"device": getattr(self, f"offload_{kind}_device")}
            if path not in (None, "none"):
                sections[f"offload_{kind}"]["nvme_path"] = path
        document = {
            "train_batch_size": AUTO,
            "train_micro_batch_size_per_gpu": AUTO,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            ZERO: {"stage": self.zero_stage, **sections, GATHER.rpartition(".")[2]: self.zero3_save_16bit_model},
        }
        return document | ({"gradient_clipping": self.gradient_clipping} if self.gradient_clipping else {})

    def _complete_init_flag(self) -> None:
        third = self.hf_ds_config.is_zero3()
        if self.zero3_init_flag is None:
            self.zero3_init_flag = str_to_bool(os.environ.get(f"{PREFIX}ZERO3_INIT", str(third))) == 1
        if self.zero3_init_flag and not third:
            warnings.warn(
                "DeepSpeed Zero3 Init flag is only applicable for ZeRO Stage 3. Setting it to False.", stacklevel=4
            )
            self.zero3_init_flag = False

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are partitioned while they are built."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Within the block, Transformers partitions models while it builds them only if ``enable`` is set."""
        before = self.zero3_init_flag
        if before == enable:
            yield
            return
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Enables the section of a precision where it is "auto" or missing.

        Raises:
            ValueError: the configuration enables the other precision.
        """
        document = self.deepspeed_config
        for name, other in (("fp16", "bf16"), ("bf16", "fp16")):
            if mixed_precision == name and document.get(other, {}).get("enabled") is True:
                raise ValueError(
                    f"`--mixed_precision` arg cannot be set to `{name}` when `{other}` is set in the DeepSpeed config "
                    "file."
                )
        for name in ("fp16", "bf16"):
            wanted = mixed_precision == name
            section = document.setdefault(name, {"enabled": wanted})
            if section.get("enabled", AUTO) == AUTO:
                section["enabled"] = wanted

    @property
    def selected(self) -> bool:
        """Whether models are prepared with these options."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise PluginSelectionError(
            "'selected' can only be set through calling 'AcceleratorState.select_deepspeed_plugin(key)'."
        )

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Makes these options those of models prepared from now on, and of Transformers.

        Raises:
            ValueError: the state did not call this.
        """
        if not _from_accelerator_state:
            raise ValueError(
                "A `DeepSpeedPlugin` is selected by calling `AcceleratorState.select_deepspeed_plugin(key)`."
            )
        self._selected = True
        self.set_deepspeed_weakref()

    def _unselect(self) -> None:
        self._selected = False

    def set_deepspeed_weakref(self) -> None:
        """Shows the configuration to Transformers, which keeps a weak reference; nothing without Transformers."""
        from accel.utils.imports import is_transformers_available

        if not is_transformers_available():
            return
        from transformers.integrations import deepspeed as theirs

        theirs.unset_hf_deepspeed_config()
        if self.hf_ds_config.is_zero3() and not self.zero3_init_flag:
            return
        document = copy.deepcopy(self.deepspeed_config)
        for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            if document.get(name, AUTO) == AUTO:
                document[name] = 1
        if document.get("train_batch_size") == AUTO:
            del document["train_batch_size"]
        if theirs.HfDeepSpeedConfig.__base__ is not object:
            self.dschf = theirs.HfDeepSpeedConfig(document)
            return
        # Transformers was imported before there was an accelerate, whose configuration is the base of its own.
        self.dschf = HfDeepSpeedConfig(document)
        theirs.set_hf_deepspeed_config(self.dschf)


def _typed(name: str, text: Any) -> Any:
    if name == "zero3_save_16bit_model":
        return str_to_bool(str(text)) == 1
    if text in (AUTO, None) or not isinstance(text, str):
        return text
    if name == "gradient_clipping":
        return float(text)
    return int(text) if name in ("gradient_accumulation_steps", "zero_stage") else text


def translate_deepspeed(plugin: Any, *, on_cpu: bool = False) -> Any:
    """Returns accel's options with the values of Accelerate's; ``on_cpu`` those of a run without fp16.

    accel counts micro-batches itself, so that its engines take one at a time. Offloading that a stage does not have is
    left out, as DeepSpeed does.
    """
    plugin = CompatDeepSpeedPlugin() if plugin is None else plugin
    document = copy.deepcopy(plugin.deepspeed_config)
    document["gradient_accumulation_steps"] = 1
    document.pop("train_batch_size", None)
    if on_cpu:
        document.pop("fp16", None)
    section = document[ZERO]
    stage = section.get("stage", AUTO)
    if stage != AUTO:
        section["stage"] = stage = int(str(stage).removeprefix("zero"))
    steps = document.get("scheduler", {}).get("params", {})
    if steps.get("warmup_num_steps") == 0:
        steps["warmup_num_steps"] = 1  # DeepSpeed's schedulers accept no 0
    if stage != AUTO and stage < 3:
        section.pop("offload_param", None)
    if stage == 0:
        section.pop("offload_optimizer", None)
    return DeepSpeedPlugin(
        hf_ds_config=document,
        is_train_batch_min=plugin.is_train_batch_min,
        zero3_init_flag=bool(plugin.zero3_init_flag and stage == 3),
        transformer_moe_cls_names=plugin.transformer_moe_cls_names,
        enable_msamp=plugin.enable_msamp,
        environment={},  # the plugin has read the variables
    )


def get_active_deepspeed_plugin(state: Any) -> Any:
    """DeepSpeed's options in use.

    Raises:
        ValueError: the run does not use DeepSpeed.
    """
    from accel_state.enums import DistributedType

    if state.distributed_type != DistributedType.DEEPSPEED:
        raise ValueError("Couldn't retrieve the active `DeepSpeedPlugin` as none were enabled.")
    return state.deepspeed_plugin
