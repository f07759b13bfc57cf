"""Options of DeepSpeed: fields, DeepSpeed's own JSON, and the precedence between them."""

import copy
import os
from collections.abc import Collection, Mapping
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import Any, ClassVar, Self, final

from accel_backends.core.config import BackendConfig, Resolution, StrategyFacts
from accel_backends.core.option_parsing import as_flag, as_number
from accel_deepspeed.config.auto_values import AutoValues
from accel_deepspeed.config.consistency import (
    LAYERS,
    SEQUENCES,
    implied_by,
    layout,
    origin_of,
    set_axis_size,
    with_own_degrees,
)
from accel_deepspeed.config.ds_json import (
    AUTO,
    TOP_KEYS,
    ZERO,
    HfDeepSpeedConfig,
    check_keys,
    find,
    leaves,
    near,
    put,
)
from accel_deepspeed.config.fields import FIELDS, PREFIX
from accel_state.errors import ConfigError

_WORDS = {"true": True, "false": False}
# Short names in a plain mapping: a switch, a device, or DeepSpeed's own section.
_SHORT = {"offload_optimizer": "offload_optimizer_device", "offload_param": "offload_param_device"}


@final
@dataclass(slots=True)
class DeepSpeedConfig(AutoValues, BackendConfig):
    """Options of training with DeepSpeed.

    Each value has the first of these sources: a given field, its environment variable, DeepSpeed's configuration
    (``hf_ds_config``), the default. ``"auto"`` counts as not given. A field or variable that differs from the
    configuration is refused with both origins; ``explain`` returns the origin of every value.

    Attributes:
        hf_ds_config: DeepSpeed's own configuration: a mapping, a path, JSON, or JSON in base64.
        gradient_accumulation_steps: micro-batches per optimizer step; "auto": the Accelerator's setting.
        gradient_clipping: norm to which every step clips gradients; "auto": only ``clip_grad_norm_`` clips.
        zero_stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters; "auto": on ``prepare``
            the planner chooses the stage, and offloading unless these options set it.
        is_train_batch_min: of several loaders report the smallest batch size to DeepSpeed, not the largest.
        offload_optimizer_device: where optimizer states are kept: "none", "cpu" or "nvme".
        offload_param_device: where parameters are kept at stage 3: "none", "cpu" or "nvme".
        offload_optimizer_nvme_path: folder for optimizer states on "nvme".
        offload_param_nvme_path: folder for parameters on "nvme".
        zero3_init_flag: partition a model while it is built within ``zero3_init``; stage 3 only, where it is the
            default.
        zero3_save_16bit_model: full weights have the compute dtype (16 bits, for example) instead of the dtype of the
            optimizer's fp32 master weights.
        transformer_moe_cls_names: names of classes, with commas, whose modules stage 3 gathers as one unit.
        inference: options of ``deepspeed.init_inference`` for models that are only evaluated; None: such models stay as
            they are.
        enable_msamp: MS-AMP is not supported; True is refused.
        msamp_opt_level: accepted and ignored, because MS-AMP is off.
        environment: variables that complete the options; None: those of the process.
        chooses_stage: whether ``zero_stage`` was given as "auto"; it is 2 until the planner has chosen.
        sequence_attention: attention function of Transformers to use with sequence parallelism; None: the model's.
        plugins: all plugins of the run by name, this one included; see ``several``.
        sources: origins of given fields, by field name, for messages; default: the plugin itself.
        origins: origin of each key of the configuration, completed here and by ``prepare``.

    Raises:
        ConfigError: an invalid value, an unknown key, or two sources that contradict each other.
    """

    backend: ClassVar[str] = "deepspeed"
    axes: ClassVar[frozenset[str]] = frozenset({"dp_replicate", "dp_shard", "sp", "tp"})
    precedence: ClassVar[int | None] = None  # an engine of its own, which a user has to want

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
    inference: Mapping[str, Any] | None = None
    enable_msamp: Any = None
    msamp_opt_level: Any = None
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    environment: InitVar[Mapping[str, str] | None] = None
    origins: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    chooses_stage: bool = field(default=False, init=False, repr=False, compare=False)
    sequence_attention: str | None = field(default=None, init=False, repr=False, compare=False)
    plugins: dict[str, "DeepSpeedConfig"] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def build(
        cls, values: "Self | Mapping[str, Any] | None" = None, *, sources: Mapping[str, str] | None = None
    ) -> Self:
        """Returns ``values`` if they are such options already; otherwise builds them from a mapping.

        The mapping may have fields, DeepSpeed's own keys, or both. ``offload_optimizer`` and ``offload_param`` may be
        switches (True: to the CPU), devices, or DeepSpeed's sections. ``sources``: origins of the values by name.
        """
        if values is None or isinstance(values, cls):
            return cls() if values is None else values
        if not isinstance(values, Mapping):
            raise ConfigError(f"options of type {type(values).__name__}; expected {cls.__name__} or a mapping")
        known = {one.name for one in fields(cls) if one.init}
        given: dict[str, Any] = {} if sources is None else {"sources": sources}
        document: dict[str, Any] = {}
        for name, value in values.items():
            if name in known:
                given[name] = value
            elif name in _SHORT:
                _shortened(name, value, given, document)
            elif name in TOP_KEYS:
                document[name] = _WORDS.get(value, value) if isinstance(value, str) else value
            else:
                raise ConfigError(
                    f"{cls.__name__} has no field {name!r}, and DeepSpeed no such key"
                    f"{near(str(name), [*known, *_SHORT, *TOP_KEYS])}"
                )
        if document:
            if "hf_ds_config" in given:
                raise ConfigError(
                    f"hf_ds_config was given, and DeepSpeed's {', '.join(document)} beside it; put them into it"
                )
            given["hf_ds_config"] = document
        return cls(**given)

    @classmethod
    def serves(cls, axes: Collection[str]) -> bool:
        """Whether ``axes`` are served together: DeepSpeed has sequence or tensor parallelism, not both."""
        return cls.axes.issuperset(axes) and not {"sp", "tp"} <= set(axes)

    @classmethod
    def several(cls, plugins: Mapping[str, Any]) -> Self:
        """Returns the first of several plugins of one run, which has references to all.

        Each applies while it is selected.

        Raises:
            ConfigError: ``plugins`` is empty.
        """
        built = {name: cls.build(one) for name, one in plugins.items()}
        if not built:
            raise ConfigError("deepspeed_plugins is empty; expected options by name, the first to be selected first")
        for one in built.values():
            one.plugins = built
        return next(iter(built.values()))

    def __post_init__(self, environment: Mapping[str, str] | None) -> None:
        env = os.environ if environment is None else environment
        source = self.hf_ds_config
        if source is None:
            named = env.get(f"{PREFIX}CONFIG_FILE", "none")
            source = None if named in ("", "none") else named
        if not isinstance(source, HfDeepSpeedConfig):
            source = HfDeepSpeedConfig({} if source is None else source)
        self.hf_ds_config = source
        document = self.hf_ds_config.config
        where = origin_of(self)
        check_keys(document, where)
        self.chooses_stage = self.zero_stage == AUTO and _unset(find(document, FIELDS["zero_stage"].key))
        for name in FIELDS:
            self._decide(name, where, env)
        self._check(env)
        self.hf_ds_config.set_stage_and_offload()

    def _decide(self, name: str, where: str, env: Mapping[str, str]) -> None:
        """Resolves one value, in the field and in the document."""
        document, option = self.hf_ds_config.config, FIELDS[name]
        key, read = option.key, option.read
        written = find(document, key)
        found, origin = getattr(self, name), self.sources.get(name, f"deepspeed_plugin {name}")
        if _unset(found):
            found, origin = env.get(option.variable), f"environment {option.variable}"
        chosen = None if _unset(found) else read(name, found, origin)
        stated = None if _unset(written) else read(name, written, f"{where} {key}")
        if chosen is not None and stated is not None and chosen != stated:
            raise ConfigError(
                f"{origin} says {chosen!r}, and {where} says {key} = {stated!r}; make them agree, or let the "
                f"configuration say {AUTO!r}"
            )
        if chosen is None and stated is not None:
            chosen, origin = stated, f"{where} {key}"
        if chosen is None:
            chosen, origin = option.default, "default"
        setattr(self, name, None if chosen == AUTO else chosen)
        self.origins[key] = origin
        section = key.rpartition(".")[0]
        if chosen in (None, "none") and find(document, section) is None:
            return
        if name == "zero_stage" and self.chooses_stage:
            return
        if chosen != AUTO or written is not None:
            put(document, key, chosen)

    def _check(self, env: Mapping[str, str]) -> None:
        for kind, least in (("optimizer", 1), ("param", 3)):
            device = getattr(self, f"offload_{kind}_device")
            path = getattr(self, f"offload_{kind}_nvme_path")
            if device != "none" and self.zero_stage < least and not self.chooses_stage:
                raise ConfigError(
                    f"offload_{kind}_device={device!r} ({self.origins[f'{ZERO}.offload_{kind}.device']}) needs "
                    f"zero_stage {least} or more, and it is {self.zero_stage} ({self.origins[f'{ZERO}.stage']})"
                )
            if device == "nvme" and path is None:
                raise ConfigError(f"offload_{kind}_device='nvme' needs offload_{kind}_nvme_path, a folder on that disk")
        if self.enable_msamp or (
            self.enable_msamp is None and env.get("ACCELERATE_FP8_BACKEND", "").upper() == "MSAMP"
        ):
            raise ConfigError("enable_msamp: MS-AMP is not supported with DeepSpeed; nearest: mixed_precision='bf16'")
        flag = self.zero3_init_flag
        if flag is None:
            flag = env.get(f"{PREFIX}ZERO3_INIT")
        asked = self.zero_stage == 3 if flag is None else as_flag("zero3_init_flag", flag)
        if asked and self.zero_stage != 3:
            raise ConfigError(
                f"zero3_init_flag is True, and zero_stage is {self.zero_stage} ({self.origins[f'{ZERO}.stage']}); only "
                "stage 3 partitions parameters"
            )
        self.zero3_init_flag = None if flag is None and self.chooses_stage else asked
        if self.transformer_moe_cls_names is None:
            self.transformer_moe_cls_names = env.get(f"{PREFIX}MOE_LAYER_CLS_NAMES") or None

    @property
    def planned(self) -> bool:
        """Whether the planner chooses the stage."""
        return self.chooses_stage

    def resolve(self, facts: StrategyFacts) -> Resolution:
        """Returns these options with the requested degrees, and with the planner's choice once it has chosen.

        Raises:
            ConfigError: a setting, a degree or the planner's choice contradicts these options, or another plugin's.
        """
        implied = implied_by(self.plugins or {"": self})
        facts.agree(implied)
        if facts.plan is not None:
            return self._with_plan(facts.plan).resolve(replace(facts, plan=None))
        config, degrees = self, with_own_degrees(facts, self)
        attention = None if degrees.sp_handler is None else degrees.sp_handler.sp_attn_implementation
        if degrees.non_data_parallel_size > 1 or attention is not None:
            config = self._copied()  # the user's own options stay as they are
        config.set_axis_sizes(sequences=degrees.size("sp"), layers=degrees.size("tp"), attention=attention)
        return Resolution(config, layout(config, degrees, facts.topology.world_size), implied)

    def _with_plan(self, options: Mapping[str, Any]) -> Self:
        for name in ("zero_stage", "offload_optimizer_device", "offload_param_device"):
            origin = self.origins[FIELDS[name].key]
            if origin != "default" and options.get(name, "none") != getattr(self, name):
                raise ConfigError(
                    f"the planner chose {name}={options.get(name, 'none')!r}, and {origin} says "
                    f"{getattr(self, name)!r}; give all values instead of 'auto'"
                )
        known = {name: self.origins[option.key] for name, option in FIELDS.items()}
        sources = {**known, **dict.fromkeys(options, "the planner")}
        document = HfDeepSpeedConfig(self.deepspeed_config)
        # These options have the values of their environment already, which need not be that of the process.
        return replace(self, hf_ds_config=document, sources=sources, environment={}, **options)

    def _copied(self) -> Self:
        plugins = {name: copy.copy(one) for name, one in (self.plugins or {"": self}).items()}
        for one in plugins.values():
            one.hf_ds_config, one.origins = copy.deepcopy(one.hf_ds_config), dict(one.origins)
            one.plugins = plugins if self.plugins else {}
        return next(plugins[name] for name, one in (self.plugins or {"": self}).items() if one is self)

    @property
    def sequence_parallel_size(self) -> int:
        """Size of a sequence-parallel group."""
        found = find(self.deepspeed_config, SEQUENCES)
        return 1 if _unset(found) else int(found)

    @property
    def tensor_parallel_size(self) -> int:
        """Size of a tensor-parallel group."""
        found = find(self.deepspeed_config, LAYERS)
        return 1 if _unset(found) else max(1, as_number(LAYERS, found))

    def set_axis_sizes(self, *, sequences: int, layers: int, attention: str | None) -> None:
        """Sets the sizes of sequence-parallel and tensor-parallel groups, in every plugin of the run.

        ``attention``: attention function of Transformers to use with sequence parallelism.

        Raises:
            ConfigError: these options, or another plugin's, have other values; or the planner chooses the stage.
        """
        for plugin in self.plugins.values() or (self,):
            set_axis_size(plugin, "sp", sequences)
            set_axis_size(plugin, "tp", layers)
            plugin.sequence_attention = attention

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration with the fields merged in; values that ``prepare`` resolves are ``"auto"``."""
        config: dict[str, Any] = self.hf_ds_config.config
        return config

    def explain(self) -> tuple[tuple[str, Any, str], ...]:
        """Returns every key of DeepSpeed's configuration with its value and the origin of the value."""
        where = origin_of(self)
        rows = [
            (key, value, self.origins.get(key, "until prepare" if value == AUTO else where))
            for key, value in leaves(self.deepspeed_config)
        ]
        return tuple(sorted(rows))

    # Methods that Transformers' integration calls

    def note_filled(self, ds_key_long: str) -> None:
        """Notes where the value at a dotted key comes from."""
        self.origins[ds_key_long] = "filled in"

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Enables the section of the precision.

        Raises:
            ConfigError: the configuration enables the other precision.
        """
        other = {"fp16": "bf16", "bf16": "fp16"}.get(mixed_precision)
        if other is None:
            return
        if find(self.deepspeed_config, f"{other}.enabled") is True:
            raise ConfigError(
                f"`--mixed_precision` arg cannot be set to `{mixed_precision}` when `{other}` is set in the DeepSpeed "
                "config file."
            )
        put(self.deepspeed_config, f"{mixed_precision}.enabled", True)
        self.origins[f"{mixed_precision}.enabled"] = "mixed_precision"

    def is_zero3_init_enabled(self) -> bool:
        """Whether models may be partitioned while they are built."""
        return bool(self.zero3_init_flag)


DeepSpeedPlugin = DeepSpeedConfig


def _unset(value: object) -> bool:
    return value is None or value == AUTO or value == ""


def _shortened(name: str, value: Any, given: dict[str, Any], document: dict[str, Any]) -> None:
    """Writes the value of a short name into a field, or into DeepSpeed's section."""
    if isinstance(value, Mapping):
        put(document, f"{ZERO}.{name}", dict(value))
    else:
        value = _WORDS.get(value, value) if isinstance(value, str) else value
        given[_SHORT[name]] = {True: "cpu", False: "none", None: "none"}.get(value, value)
