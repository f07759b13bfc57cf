"""Consistency of DeepSpeed's options with the other settings of a run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from accel_backends.core.config import Stated, StrategyFacts
from accel_deepspeed.config.ds_json import AUTO, find, put
from accel_state.errors import ConfigError
from accel_state.parallelism.config import ParallelismConfig

if TYPE_CHECKING:
    from accel_deepspeed.config.plugin import DeepSpeedConfig

SEQUENCES = "sequence_parallel_size"
TENSOR = "tensor_parallel"
LAYERS = f"{TENSOR}.autotp_size"
_KEYS = {"sp": SEQUENCES, "tp": LAYERS}
# Reasons why the planner cannot choose a stage together with sequence or tensor parallelism.
_UNPLANNED = {
    "sp": "the planner chooses when a model is prepared, and its attention and its loaders need "
    "sequence-parallel groups before",
    "tp": "the planner looks at full layers, and only DeepSpeed knows, when it has cut a model, what a rank keeps of "
    "them",
}


def implied_by(plugins: Mapping[str, "DeepSpeedConfig"]) -> Mapping[str, Stated]:
    """Returns the values that the options of one run, by plugin name, imply for the Accelerator's settings.

    Raises:
        ConfigError: two of them differ.
    """
    found: dict[str, Stated] = {}
    for name, plugin in plugins.items():
        for key, said in _implied(plugin).items():
            origin = f"plugin {name!r}: {said.origin}" if name else said.origin
            if key in found and found[key].value != said.value:
                raise ConfigError(
                    f"{found[key].origin} says {key} = {found[key].value!r}, and {origin} says {said.value!r}; one "
                    "run has one"
                )
            found[key] = Stated(said.value, origin)
    return found


def _implied(options: "DeepSpeedConfig") -> dict[str, Stated]:
    """Returns the settings in these options: accumulation, precision, sequence-parallel and tensor-parallel size."""
    found: dict[str, Stated] = {}
    origin = options.origins["gradient_accumulation_steps"]
    if options.gradient_accumulation_steps is not None and not origin.startswith("environment"):
        found["gradient_accumulation_steps"] = Stated(options.gradient_accumulation_steps, origin)
    document, where = options.deepspeed_config, origin_of(options)
    enabled = {key: find(document, f"{key}.enabled") for key in ("bf16", "bfloat16", "fp16")}
    on = [key for key, value in enabled.items() if value is True]
    if len(on) > 1:
        raise ConfigError(f"{where} enables {' and '.join(on)}; enable one of them")
    if on:
        found["mixed_precision"] = Stated("fp16" if on == ["fp16"] else "bf16", f"{where} {on[0]}.enabled")
    elif enabled["fp16"] is False and (enabled["bf16"] is False or enabled["bfloat16"] is False):
        found["mixed_precision"] = Stated("no", f"{where} bf16.enabled and fp16.enabled")
    if find(document, SEQUENCES, AUTO) != AUTO:
        found["parallelism_config_sp_size"] = Stated(options.sequence_parallel_size, f"{where} {SEQUENCES}")
    if find(document, LAYERS, AUTO) != AUTO:
        found["parallelism_config_tp_size"] = Stated(options.tensor_parallel_size, f"{where} {LAYERS}")
    return found


def with_own_degrees(facts: StrategyFacts, options: "DeepSpeedConfig") -> ParallelismConfig:
    """Returns the requested degrees, with those of DeepSpeed's configuration for axes whose degree was not given."""
    own = {"sp": options.sequence_parallel_size, "tp": options.tensor_parallel_size}
    added = {f"{axis}_size": size for axis, size in own.items() if axis in facts.open_axes and size > 1}
    return replace(facts.parallelism, **added) if added else facts.parallelism  # type: ignore[arg-type]


def layout(options: "DeepSpeedConfig", degrees: ParallelismConfig, world_size: int) -> ParallelismConfig:
    """Returns the degrees of all axes: ranks outside sequence-parallel and tensor-parallel groups are data-parallel.

    ZeRO shards one replica over them from stage 1 on, and AutoTP at every stage.

    Raises:
        TopologyError: the product of the degrees is not the number of processes.
        ConfigError: both sequence and tensor parallelism.
    """
    sequences, layers = options.sequence_parallel_size, options.tensor_parallel_size
    check_one_axis(sequences, layers)
    rest, left_over = divmod(world_size, sequences * layers)
    replicates = options.zero_stage == 0 and layers == 1
    if layers > 1 and degrees.data_parallel_size == 1 and not left_over:
        degrees = replace(degrees, dp_shard_size=rest)
    fitted = degrees.fitted(world_size)
    return replace(fitted, dp_replicate_size=rest if replicates else 1, dp_shard_size=1 if replicates else rest)


def check_one_axis(sequences: int, layers: int) -> None:
    """Raises ConfigError for both sequence and tensor parallelism."""
    if sequences > 1 and layers > 1:
        raise ConfigError(
            f"{SEQUENCES}={sequences} and {LAYERS}={layers}: DeepSpeed has sequence or tensor parallelism, not both; "
            "leave one of them out"
        )


def check_groups(world_size: int, size: int, key: str) -> None:
    """Refuses groups of ``size`` ranks, the value of ``key``, if the world size is not divisible by ``size``.

    Raises:
        ConfigError: with the nearest valid size.
    """
    if world_size % size:
        raise ConfigError(
            f"{key}={size}: {world_size} processes do not divide into groups of {size}; nearest: "
            f"{largest_divisor(world_size, size)}"
        )


def largest_divisor(total: int, most: int) -> int:
    """Returns the largest divisor of ``total`` that is at most ``most``."""
    return next(size for size in range(min(most, total), 0, -1) if total % size == 0)


def set_axis_size(options: "DeepSpeedConfig", axis: str, size: int) -> None:
    """Sets the sequence-parallel ("sp") or tensor-parallel ("tp") size.

    Raises:
        ConfigError: the options have another value, or leave the stage to the planner.
    """
    document, key = options.deepspeed_config, _KEYS[axis]
    own = options.sequence_parallel_size if axis == "sp" else options.tensor_parallel_size
    if find(document, key, AUTO) != AUTO and own != size:
        raise ConfigError(
            f"parallelism_config has {axis}_size={size}, and {origin_of(options)} says {key} = {own}; make them agree"
        )
    if size == 1:
        return
    if options.chooses_stage:
        raise ConfigError(f"zero_stage='auto' beside {key}={size}: {_UNPLANNED[axis]}; nearest: zero_stage=3")
    put(document, key, size)
    options.origins.setdefault(key, f"parallelism_config {axis}_size")


def origin_of(options: "DeepSpeedConfig") -> str:
    """Returns the origin of DeepSpeed's configuration, for messages; a subclass of Transformers may have none."""
    return getattr(options.hf_ds_config, "origin", "hf_ds_config")
