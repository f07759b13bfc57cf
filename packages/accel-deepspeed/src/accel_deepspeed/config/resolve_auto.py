"""Resolution of every "auto" in DeepSpeed's configuration from the model, the run and the options; pure."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from accel_deepspeed.config.consistency import LAYERS, TENSOR
from accel_deepspeed.config.ds_json import AUTO, ZERO, find, leaves, put
from accel_precision.options import GradScalerKwargs
from accel_precision.policy import PrecisionPolicy, dtype_name
from accel_state.errors import ConfigError

_MICRO, _TOTAL, _STEPS = "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"
# DeepSpeed's default bucket sizes, which exceed the size of small models.
_BUCKETS = {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}


@final
@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts that are known when a model is prepared.

    Attributes:
        policy: the run's precision.
        world_size: data-parallel size: number of ranks with different samples.
        elements: number of elements of all trainable parameters.
        hidden_size: width of the model, if its config states it.
        batch_sizes: micro-batch size of each loader of the same ``prepare``.
        smallest: report the smallest of several batch sizes, otherwise the largest.
        rates: ``lr`` and ``weight_decay`` of a ``DummyOptim``.
        steps: ``total_num_steps`` and ``warmup_num_steps`` of a ``DummyScheduler``.
        scaler: options of the loss scale, if given.
        device_type: type of the training devices.
        tensor_parallel_size: size of a tensor-parallel group.
    """

    policy: PrecisionPolicy
    world_size: int
    elements: int = 0
    hidden_size: int | None = None
    batch_sizes: Sequence[int] = ()
    smallest: bool = True
    rates: Mapping[str, float] | None = None
    steps: Mapping[str, int | None] | None = None
    scaler: GradScalerKwargs | None = None
    device_type: str = "cpu"
    tensor_parallel_size: int = 1


# Options of ZeRO++ that quantize on the device, which DeepSpeed implements for GPUs only.
_PACKING = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")


def check_abilities(config: Mapping[str, Any], run: RunFacts) -> None:
    """Refuses options that DeepSpeed does not support here, or that would train wrongly in an ordinary loop.

    Raises:
        ConfigError: with the key, the reason, and the nearest alternative.
    """
    packing = [key for key in _PACKING if find(config, f"{ZERO}.{key}") is True]
    if packing and run.device_type == "cpu":
        raise ConfigError(
            f"{ZERO}.{packing[0]}: DeepSpeed packs numbers on GPUs only; nearest: zero_hpz_partition_size, the part of "
            "ZeRO++ that does without"
        )
    if run.tensor_parallel_size > 1:
        _check_shared_layers(config, run)


def _check_shared_layers(config: Mapping[str, Any], run: RunFacts) -> None:
    """Refuses options that cannot be combined with AutoTP."""
    halves = run.policy.compute is not None and dtype_name(run.policy.compute) in ("bf16", "fp16")
    if int(find(config, f"{ZERO}.stage", 0)) == 0 and halves:
        raise ConfigError(
            f"{LAYERS}={run.tensor_parallel_size} at stage 0 in {run.policy.name}: DeepSpeed measures one rank's "
            "part of the gradients there, and clips by that; nearest: zero_stage=1"
        )
    if int(find(config, f"{ZERO}.zero_hpz_partition_size", 1)) > 1:
        raise ConfigError(
            f"{LAYERS}={run.tensor_parallel_size} and {ZERO}.zero_hpz_partition_size shard parameters over groups "
            "that know nothing of each other; leave one of them out"
        )


def settle(document: Mapping[str, Any], run: RunFacts) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the engine's configuration, and the origin of each value that was resolved here.

    The engine's ``gradient_accumulation_steps`` is always 1, because the Accelerator counts micro-batches.

    Raises:
        ConfigError: batch sizes that contradict each other, or an "auto" without a source.
    """
    check_abilities(document, run)
    config = copy.deepcopy(dict(document))
    origins: dict[str, str] = {}

    def fill(key: str, value: Any, origin: str, *, absent: bool = False) -> None:
        if find(config, key) == AUTO or (absent and find(config, key) is None):
            put(config, key, value)
            origins[key] = origin

    _batches(config, run, origins)
    _shares(config, run, fill)
    _precision(config, run, fill)
    if run.tensor_parallel_size > 1:
        fill(f"{TENSOR}.vocab_parallel_lm_head", False, "logits stay full", absent=True)
    _sizes(config, run, fill)
    _dummies(config, run, fill)
    fill("gradient_clipping", 0.0, "clip_grad_norm_ decides", absent=True)
    fill("zero_allow_untested_optimizer", True, "any optimizer of torch", absent=True)
    fill("steps_per_print", 2**31 - 1, "default", absent=True)
    if find(config, f"{ZERO}.stage") == 1 and find(config, f"{ZERO}.overlap_comm"):
        put(config, f"{ZERO}.overlap_comm", False)
        origins[f"{ZERO}.overlap_comm"] = "stage 1 reduces once, after the last micro-batch"
    for key, value in list(leaves(config)):
        if value == AUTO:
            section, _, last = key.rpartition(".")
            del (find(config, section) if section else config)[last]
            origins[key] = "DeepSpeed's default"
    return config, origins


def _batches(config: dict[str, Any], run: RunFacts, origins: dict[str, str]) -> None:
    """Resolves micro-batch and global batch size; the engine's own batch is one micro-batch on every rank."""
    stated = {key: config.get(key) for key in (_MICRO, _TOTAL, _STEPS)}
    given = {key: int(value) for key, value in stated.items() if value is not None and value != AUTO}
    steps = given.get(_STEPS, 1)
    known = (min if run.smallest else max)(run.batch_sizes, default=0)
    if _MICRO in given:
        micro, origin = given[_MICRO], "as given"
    elif known:
        micro, origin = known, "batch size of the loaders"
    elif _TOTAL in given and given[_TOTAL] % (steps * run.world_size) == 0:
        micro, origin = given[_TOTAL] // (steps * run.world_size), _TOTAL
    else:
        micro, origin = 1, "no loader was prepared with the model; DeepSpeed only reports it"
    if _TOTAL in given and given[_TOTAL] != micro * steps * run.world_size:
        raise ConfigError(
            f"{_TOTAL} is {given[_TOTAL]}, and {_MICRO} {micro} ({origin}) x {_STEPS} {steps} x {run.world_size} ranks "
            f"make {micro * steps * run.world_size}; give it as {AUTO!r}, or make them multiply"
        )
    config.update({_MICRO: micro, _TOTAL: micro * run.world_size, _STEPS: 1})
    if run.tensor_parallel_size > 1:
        del config[_TOTAL]  # with AutoTP DeepSpeed is inconsistent: world size here, data-parallel size there
    origins.update({_MICRO: origin, _TOTAL: "one micro-batch on every rank", _STEPS: "accumulate counts"})


def _shares(config: dict[str, Any], run: RunFacts, fill: Any) -> None:
    """Removes keys of DeepSpeed's own groups: with both degrees, DeepSpeed would reduce over one of the groups only."""
    travels = config.pop("seq_parallel_communication_data_type", None)
    if travels not in (None, AUTO) and find(config, "sequence_parallel_size", AUTO) not in (AUTO, 1):
        fill("communication_data_type", travels, "seq_parallel_communication_data_type", absent=True)
    stated = config.pop("data_parallel_size", None)
    if stated not in (None, AUTO, run.world_size):
        raise ConfigError(
            f"data_parallel_size is {stated}, and batches are spread over {run.world_size} ranks; make it agree, or "
            "leave it out"
        )


def _precision(config: dict[str, Any], run: RunFacts, fill: Any) -> None:
    """Resolves the enabled 16-bit section, the dtypes of gradient reduction and accumulation, and the loss scale."""
    policy = run.policy
    name = dtype_name(policy.compute) if policy.compute is not None else "no"
    if "bfloat16" in config:
        config["bf16"] = config.pop("bfloat16")
    if name in ("bf16", "fp16") and find(config, f"{name}.enabled") is False:
        raise ConfigError(
            f"mixed_precision is {policy.name!r}, and the DeepSpeed config says {name}.enabled = false; make them "
            f"agree, or let the config say {AUTO!r}"
        )
    for section in ("bf16", "fp16"):
        fill(f"{section}.enabled", section == name, f"precision {policy.name}", absent=section == name)
    if name not in ("bf16", "fp16"):
        return
    if policy.true:
        _true_precision(config, policy, fill)
    reduce = dtype_name(policy.reduce or policy.params) if policy.reduce or policy.params else "fp32"
    fill("communication_data_type", reduce, f"precision {policy.name}", absent=True)
    stage = find(config, f"{ZERO}.stage", 0)
    offloads = find(config, f"{ZERO}.offload_optimizer.device", "none") != "none"
    if stage >= 2 or (stage == 1 and offloads):
        accumulate = name if policy.true else "fp32"
        fill("data_types.grad_accum_dtype", accumulate, f"precision {policy.name}", absent=True)
    if name == "fp16" and run.scaler is not None:
        _loss_scale(run.scaler, fill)


def _loss_scale(scaler: GradScalerKwargs, fill: Any) -> None:
    """Resolves the loss scale of fp16.

    Raises:
        ConfigError: factors by which DeepSpeed does not change its scale.
    """
    origin = "GradScalerKwargs"
    if scaler.static or not scaler.enabled:
        fill("fp16.loss_scale", scaler.init_scale if scaler.enabled else 1.0, origin, absent=True)
        return
    if (scaler.growth_factor, scaler.backoff_factor) != (2.0, 0.5):
        raise ConfigError(
            f"{origin} has growth_factor={scaler.growth_factor} and backoff_factor={scaler.backoff_factor}, and "
            "DeepSpeed doubles and halves its loss scale; nearest: 2.0 and 0.5, or 1.0 and 1.0, which is a static scale"
        )
    fill("fp16.initial_scale_power", round(math.log2(scaler.init_scale)), origin, absent=True)
    fill("fp16.loss_scale_window", scaler.growth_interval, origin, absent=True)
    fill("fp16.hysteresis", 1, origin, absent=True)


def _true_precision(config: dict[str, Any], policy: PrecisionPolicy, fill: Any) -> None:
    """Resolves training without master weights: weights and optimizer states have the compute dtype.

    Raises:
        ConfigError: stage 0, where DeepSpeed always has master weights; or the configuration enables them.
    """
    if int(find(config, f"{ZERO}.stage", 0)) == 0:
        raise ConfigError(
            f"precision {policy.name!r} at stage 0, where DeepSpeed keeps fp32 copies of the weights; nearest: "
            "zero_stage=1, or mixed_precision='bf16'"
        )
    if find(config, f"{ZERO}.offload_optimizer.device", "none") != "none":
        raise ConfigError(
            f"precision {policy.name!r} with offload_optimizer, where DeepSpeed takes only its own Adam, with "
            "states in bf16; nearest: offload_param alone, or mixed_precision='bf16'"
        )
    for key in ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"):
        if find(config, key, AUTO) not in (True, AUTO):
            raise ConfigError(
                f"precision is {policy.name!r}, and the DeepSpeed config says {key} = false; make them agree, or use "
                "mixed_precision='bf16'"
            )
        fill(key, True, f"precision {policy.name}", absent=True)


def width_of(config: Any) -> int | None:
    """Width in a model's config or in that of its text model, the largest of several; None: none is stated."""
    for source in (config, getattr(config, "text_config", None)):
        one, several = getattr(source, "hidden_size", None), getattr(source, "hidden_sizes", None)
        if isinstance(one, int):
            return one
        if several:
            return int(max(several))
    return None


def bucket_sizes(width: int) -> dict[str, int]:
    """Sizes of buckets by key, in elements, for a model of this width."""
    return {
        f"{ZERO}.reduce_bucket_size": width * width,
        f"{ZERO}.stage3_prefetch_bucket_size": int(0.9 * width * width),
        f"{ZERO}.stage3_param_persistence_threshold": 10 * width,
    }


def _sizes(config: dict[str, Any], run: RunFacts, fill: Any) -> None:
    """Resolves bucket sizes from the width of the model, if known, limited to the size of the model."""
    width = run.hidden_size
    if width is not None:
        for key, size in bucket_sizes(width).items():
            fill(key, size, f"hidden_size {width}")
    for key, default in _BUCKETS.items():
        if 0 < run.elements < default:
            even = run.elements + run.elements % 2
            fill(f"{ZERO}.{key}", even, "size of the model", absent=find(config, f"{ZERO}.stage", 0) > 0)
    fill(f"{ZERO}.stage3_gather_16bit_weights_on_model_save", False, "default")


def _dummies(config: dict[str, Any], run: RunFacts, fill: Any) -> None:
    """Resolves optimizer and scheduler values from a ``DummyOptim`` and a ``DummyScheduler``."""
    rates = run.rates or {}
    for key in ("lr", "weight_decay"):
        if key in rates:
            fill(f"optimizer.params.{key}", rates[key], f"DummyOptim {key}")
    if run.steps is None:
        return
    rate = rates.get("lr", find(config, "optimizer.params.lr"))
    values = {"warmup_min_lr": 0.0, "warmup_max_lr": rate, **run.steps}
    if values.get("warmup_num_steps") is not None:
        values["warmup_num_steps"] = max(1, int(values["warmup_num_steps"] or 0))
    for key, value in values.items():
        if value is not None and value != AUTO:
            fill(f"scheduler.params.{key}", value, f"DummyScheduler {key}")
    left = [key for key, value in leaves(config.get("scheduler") or {}) if value == AUTO]
    if left:
        raise ConfigError(
            f"scheduler.{left[0]} is 'auto', and nothing says what it is; give DummyScheduler the numbers"
        )
