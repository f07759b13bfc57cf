"""Options of Megatron-LM, with the names and variables that Accelerate's plugin has."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final

from accel_backends.core.config import BackendConfig, Resolution, StrategyFacts
from accel_backends.core.option_parsing import as_flag, as_number
from accel_megatron.degrees import DEGREES, check_degrees, degree_of, fitted
from accel_state.errors import ConfigError, PrepareError

PREFIX = "MEGATRON_LM_"


def _decimal(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={value!r}; expected a number") from None


def _word(name: str, value: object) -> str:
    return str(value)


@final
@dataclass(frozen=True, slots=True)
class Option:
    """A field with an environment variable: its default, its parser, and the reason to refuse other values, if any."""

    default: Any
    parse: Callable[[str, object], Any]
    refused: str = ""


_ELSEWHERE = "the optimizer that is given to prepare keeps its states where its parameters are; nearest: False"
OPTIONS: Mapping[str, Option] = {
    "tp_degree": Option(1, as_number),
    "pp_degree": Option(1, as_number),
    "num_micro_batches": Option(1, as_number),
    "gradient_clipping": Option(1.0, _decimal),
    "sequence_parallelism": Option(False, as_flag),
    "recompute_activations": Option(False, as_flag),
    "recompute_granularity": Option("full", _word),
    "recompute_method": Option("uniform", _word),
    "recompute_num_layers": Option(1, as_number),
    "use_distributed_optimizer": Option(False, as_flag),
    "attention_dropout": Option(None, _decimal),
    "hidden_dropout": Option(None, _decimal),
    "attention_softmax_in_fp32": Option(True, as_flag),
    "calculate_per_token_loss": Option(True, as_flag),
    "use_rotary_position_embeddings": Option(None, as_flag),
    "use_custom_fsdp": Option(False, as_flag, "Megatron's FSDP is not served; nearest: strategy='fsdp'"),
    "no_load_optim": Option(False, as_flag, "states are loaded; nearest: load_folder(..., optimizer=False)"),
    "no_save_optim": Option(False, as_flag, "states are saved; nearest: save_folder(..., optimizer=False)"),
    "eod_mask_loss": Option(False, as_flag, "labels of -100 have no loss; set those of ends of documents to -100"),
    "optimizer_cpu_offload": Option(False, as_flag, _ELSEWHERE),
    "overlap_cpu_optimizer_d2h_h2d": Option(False, as_flag, _ELSEWHERE),
    "use_precision_aware_optimizer": Option(False, as_flag, _ELSEWHERE),
    "decoder_last_pipeline_num_layers": Option(None, as_number, "stages have equal numbers of layers"),
    "attention_backend": Option("local", _word, "only megatron-core's own attention is used; nearest: 'local'"),
    "expert_model_parallel_size": Option(1, as_number),
    "expert_tensor_parallel_size": Option(1, as_number),
    "context_parallel_size": Option(1, as_number),
}
# Accelerate's way to say the default of ``attention_backend``.
SAME = {"attention_backend": (True, "true", "True", "auto", "unfused")}


_SCHEDULE = "the schedule is the scheduler that is given to prepare"
_LOOP = "the loop says how long it runs; nearest: None"
_GROUPS = "weight decays and learning rates are those of the optimizer's parameter groups"
_LENGTHS = "sequences may have any length; nearest: None"
UNSERVED: Mapping[str, str] = {
    "pipeline_model_parallel_split_rank": "megatron-core's schedules divide no encoder and decoder among stages",
    "train_iters": _LOOP,
    "train_samples": _LOOP,
    "eval_iters": "the loop says how long it evaluates; nearest: 100, the default",
    "eval_interval": "the loop says when it evaluates; nearest: 1000, the default",
    "consumed_samples": "loaders continue where they were: accelerator.load_state",
    "weight_decay_incr_style": _GROUPS,
    "start_weight_decay": _GROUPS,
    "end_weight_decay": _GROUPS,
    "no_wd_decay_cond": _GROUPS,
    "scale_lr_cond": _GROUPS,
    "lr_mult": _GROUPS,
    "lr_decay_style": _SCHEDULE,
    "lr_decay_iters": _SCHEDULE,
    "lr_decay_samples": _SCHEDULE,
    "lr_warmup_iters": _SCHEDULE,
    "lr_warmup_samples": _SCHEDULE,
    "lr_warmup_fraction": _SCHEDULE,
    "min_lr": _SCHEDULE,
    "seq_length": _LENGTHS,
    "encoder_seq_length": _LENGTHS,
    "decoder_seq_length": _LENGTHS,
    "tensorboard_dir": "trackers log: Accelerator(log_with='tensorboard', project_dir=...)",
    "set_all_logging_options": "trackers log what accelerator.log is given",
    "is_train_batch_min": "each call splits its own batch into num_micro_batches, so batches may differ; nearest: True",
    "return_logits": "calls in evaluation return logits, those in training a loss alone; nearest: False, the default",
    "megatron_dataset_flag": (
        "a GPT knows batches of Megatron-LM's data sets by their keywords (tokens, loss_mask), and other models take "
        "them with a custom_get_batch_function; nearest: False"
    ),
    "other_megatron_args": "megatron-core has no arguments of Megatron-LM's own programs; nearest: None",
}
"""Fields of Accelerate's plugin that have another place here, and that place; only their defaults are accepted."""


@final
@dataclass(slots=True)
class MegatronConfig(BackendConfig):
    """Options of training with Megatron-LM.

    A field of None is read from ``MEGATRON_LM_<NAME>``, and has its default without that variable. Fields that the
    backend does not serve are refused unless they have their default.

    Attributes:
        tp_degree: tensor-parallel size; may be given as ``ParallelismConfig.tp_size`` instead.
        pp_degree: number of pipeline stages; may be given as ``ParallelismConfig.pp_size`` instead.
        num_micro_batches: micro-batches into which the schedule splits each batch of the loader.
        gradient_clipping: norm that a step clips to, unless ``clip_grad_norm_`` was called in its window; 0: none.
        sequence_parallelism: split activations between the blocks over the sequence, on tensor-parallel ranks.
        recompute_activations: recompute activations in the backward.
        recompute_granularity: "full" layers, or "selective": attention only.
        recompute_method: "uniform" or "block", for full layers.
        recompute_num_layers: layers that are recomputed together ("uniform"), or at all ("block").
        use_distributed_optimizer: shard optimizer states over data-parallel ranks; for Adam and AdamW.
        attention_dropout: None: as the model's own configuration says.
        hidden_dropout: None: as the model's own configuration says.
        attention_softmax_in_fp32: compute softmax of attention in fp32 if the model computes in 16 bits.
        calculate_per_token_loss: the loss of a batch is the mean over its tokens; False: over its micro-batches.
        expert_model_parallel_size: ranks over which the experts of a layer are divided; may be given as
            ``ParallelismConfig.ep_size`` instead.
        expert_tensor_parallel_size: ranks over which each expert is split.
        context_parallel_size: ranks over which each sequence is divided; may be given as ``ParallelismConfig.cp_size``
            instead.
        use_rotary_position_embeddings: must be what the model has; None: is.
        num_layers_per_virtual_pipeline_stage: layers of each chunk of an interleaved schedule, which needs three stages
            or more and ``num_micro_batches`` that they divide; None: 1F1B.
        custom_train_step_class: class of a forward step of the user's own, built with ``TrainStepArguments``.
        custom_train_step_kwargs: further arguments of that class.
        custom_get_batch_function: takes the micro-batches, and returns what the forward step of the family unpacks.
        custom_loss_function: of a family's forward step, see ``GPTTrainStep``, ``BertTrainStep`` and ``T5TrainStep``.
        custom_model_provider_function: builds the model of a stage; takes those that it has parameters for of
            ``pre_process``, ``post_process``, ``add_encoder``, ``add_decoder`` and ``config``.
        custom_prepare_model_function: takes that function, and returns the model, or a list of one.
        custom_megatron_datasets_provider_function: returns the data sets of training, validation and test, of the
            numbers of samples of each.

    The other fields are those of Accelerate's plugin that have another place here; all values but the default are
    refused, and the place is named.

    Raises:
        ConfigError: an invalid value, or one that the backend does not serve.
    """

    backend: ClassVar[str] = "megatron"
    axes: ClassVar[frozenset[str]] = frozenset({"dp_replicate", "dp_shard", "tp", "pp", "ep", "cp"})
    precedence: ClassVar[int | None] = None  # an engine of its own, which a user has to want

    tp_degree: Any = None
    pp_degree: Any = None
    num_micro_batches: Any = None
    gradient_clipping: Any = None
    sequence_parallelism: Any = None
    recompute_activations: Any = None
    recompute_granularity: Any = None
    recompute_method: Any = None
    recompute_num_layers: Any = None
    use_distributed_optimizer: Any = None
    attention_dropout: Any = None
    hidden_dropout: Any = None
    attention_softmax_in_fp32: Any = None
    calculate_per_token_loss: Any = None
    use_rotary_position_embeddings: Any = None
    use_custom_fsdp: Any = None
    no_load_optim: Any = None
    no_save_optim: Any = None
    eod_mask_loss: Any = None
    optimizer_cpu_offload: Any = None
    overlap_cpu_optimizer_d2h_h2d: Any = None
    use_precision_aware_optimizer: Any = None
    decoder_last_pipeline_num_layers: Any = None
    attention_backend: Any = None
    expert_model_parallel_size: Any = None
    expert_tensor_parallel_size: Any = None
    context_parallel_size: Any = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    custom_train_step_class: Callable[..., Any] | None = None
    custom_train_step_kwargs: Mapping[str, Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    pipeline_model_parallel_split_rank: Any = None
    train_iters: Any = None
    train_samples: Any = None
    eval_iters: Any = 100
    eval_interval: Any = 1000
    consumed_samples: Any = None
    weight_decay_incr_style: Any = "constant"
    start_weight_decay: Any = None
    end_weight_decay: Any = None
    no_wd_decay_cond: Any = None
    scale_lr_cond: Any = None
    lr_mult: Any = 1.0
    lr_decay_style: Any = "linear"
    lr_decay_iters: Any = None
    lr_decay_samples: Any = None
    lr_warmup_iters: Any = None
    lr_warmup_samples: Any = None
    lr_warmup_fraction: Any = None
    min_lr: Any = 0
    is_train_batch_min: Any = True
    return_logits: Any = False
    megatron_dataset_flag: Any = False
    seq_length: Any = None
    encoder_seq_length: Any = None
    decoder_seq_length: Any = None
    tensorboard_dir: Any = None
    set_all_logging_options: Any = False
    other_megatron_args: Any = None
    given: frozenset[str] = field(default=frozenset(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = set()
        for name, option in OPTIONS.items():
            value, said = getattr(self, name), name
            if value is None:
                said = f"{PREFIX}{name.upper()}"
                value = os.environ.get(said) or None
            if value is None:
                setattr(self, name, option.default)
                continue
            given.add(name)
            parsed = option.default if value in SAME.get(name, ()) else option.parse(said, value)
            if option.refused and parsed != option.default:
                raise ConfigError(f"{said}={value!r}: {option.refused}")
            setattr(self, name, parsed)
        self.given = frozenset(given)
        self._check()

    @property
    def own_step(self) -> bool:
        """Whether a forward step, a batch or a loss is of the user's own."""
        own = (self.custom_train_step_class, self.custom_get_batch_function, self.custom_loss_function)
        return any(one is not None for one in own)

    def _check_own(self) -> None:
        for name, nearest in UNSERVED.items():
            if getattr(self, name) != self.__dataclass_fields__[name].default:
                raise ConfigError(f"{name}={getattr(self, name)!r}: {nearest}")
        for name in (one for one in self.__dataclass_fields__ if one.startswith("custom_")):
            value = getattr(self, name)
            if value is not None and not callable(value) and name != "custom_train_step_kwargs":
                raise ConfigError(f"{name}={value!r}; expected a function")
        step = self.custom_train_step_class
        if step is None and self.custom_train_step_kwargs:
            raise ConfigError("custom_train_step_kwargs are arguments of custom_train_step_class; give that, too")
        if self.custom_prepare_model_function is not None and self.custom_model_provider_function is None:
            raise ConfigError(
                "custom_prepare_model_function prepares what custom_model_provider_function builds; give that, too"
            )
        for name in ("custom_get_batch_function", "custom_loss_function"):
            if step is not None and not getattr(step, "takes_functions", False) and getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} is for the train steps of the families, and custom_train_step_class={step.__name__} "
                    "is none; nearest: a subclass of GPTTrainStep, BertTrainStep or T5TrainStep"
                )

    def _check(self) -> None:
        self._check_own()
        for name in (
            *DEGREES.values(),
            "expert_tensor_parallel_size",
            "num_micro_batches",
            "recompute_num_layers",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; expected a whole number of at least 1")
        if self.gradient_clipping < 0:
            raise ConfigError(f"gradient_clipping={self.gradient_clipping}; expected 0 (no clipping) or more")
        choices = {"recompute_granularity": ("full", "selective"), "recompute_method": ("uniform", "block")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r}; expected {' or '.join(map(repr, known))}")
        layers = self.num_layers_per_virtual_pipeline_stage
        if layers is not None and (not isinstance(layers, int) or layers < 1):
            raise ConfigError(
                f"num_layers_per_virtual_pipeline_stage={layers!r}; expected a whole number of at least 1, or None"
            )

    def chunks(self, num_layers: int) -> int | None:
        """Returns into how many chunks an interleaved schedule divides each stage; None: it is not divided.

        ``num_layers``: of the model.

        Raises:
            PrepareError: the layers of a stage are not divisible into such chunks.
        """
        layers = self.num_layers_per_virtual_pipeline_stage
        if layers is None:
            return None
        of_stage = num_layers // self.pp_degree
        if of_stage % layers:
            nearest = max(one for one in range(1, layers + 1) if of_stage % one == 0)
            raise PrepareError(
                f"num_layers_per_virtual_pipeline_stage={layers} does not divide the {of_stage} layers of each of "
                f"{self.pp_degree} stages; nearest: {nearest}"
            )
        return None if of_stage == layers else of_stage // layers

    def check_mixture(self) -> None:
        """Refuses degrees with which megatron-core does not train mixtures of experts, or not rightly.

        Raises:
            PrepareError: names the option, and the nearest that works.
        """
        tensor, of_each = self.tp_degree, self.expert_tensor_parallel_size
        if tensor > 1 and not self.sequence_parallelism:
            raise PrepareError(
                f"a mixture of experts with tp_degree={tensor}: megatron-core trains these with sequence parallelism "
                "only; nearest: sequence_parallelism=True"
            )
        if self.expert_model_parallel_size == 1 and of_each != tensor:
            raise PrepareError(
                f"expert_tensor_parallel_size={of_each} with tp_degree={tensor} and expert_model_parallel_size=1: each "
                "tensor-parallel rank has all experts and its own tokens, and megatron-core 0.16.1 does not add up the "
                f"gradients of these; nearest: expert_tensor_parallel_size={tensor}, or "
                f"expert_model_parallel_size={tensor}"
            )

    def resolve(self, facts: StrategyFacts) -> Resolution:
        """Returns these options with the requested degrees; ranks that are left over are data-parallel.

        Raises:
            ConfigError: a degree in ``parallelism_config`` is another one than here.
            TopologyError: the product of the degrees is not the number of processes.
        """
        if facts.plan is not None:
            raise ConfigError("MegatronConfig leaves the planner nothing to choose; name it as the strategy")
        degrees = {axis: degree_of(self, axis, facts) for axis in DEGREES}
        values: dict[str, Any] = {DEGREES[axis]: degree for axis, degree in degrees.items()}
        config = replace(self, **values)
        check_degrees(config, facts.parallelism)
        return Resolution(config, fitted(facts, degrees))


MegatronLMPlugin = MegatronConfig
