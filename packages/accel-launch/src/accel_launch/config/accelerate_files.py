"""Accelerate's own configuration files, of every version, translated to settings.

Their keys are public names; one table holds the meaning of each. A key that only steers the questionnaire or tools of
another machine is ignored at its harmless value and otherwise refused by name.
"""

from collections.abc import Mapping
from types import MappingProxyType

from accel_state.errors import ConfigError

SECTIONS = (
    "deepspeed_config",
    "dynamo_config",
    "fp8_config",
    "fsdp_config",
    "megatron_lm_config",
    "mpirun_config",
    "parallelism_config",
)
"""Mappings of those files whose keys are settings; a key may omit the section's prefix."""

KIND = "distributed_type"
_ON_ACCELERATORS = ("MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU")
_STRATEGIES = MappingProxyType({"FSDP": "use_fsdp", "DEEPSPEED": "use_deepspeed", "MEGATRON_LM": "use_megatron_lm"})
_OFF = (None, "", "no", "false", "0", "none", "null", "{}", "[]")

DISTRIBUTED_TYPES: Mapping[str, str | None] = MappingProxyType(
    {"NO": None, "MULTI_CPU": "cpu", "XLA": "tpu", "TPU": "tpu", "TP": None}
    | dict.fromkeys(_ON_ACCELERATORS, "multi_gpu")
    | _STRATEGIES
)
"""Setting that each ``distributed_type`` turns on."""

UNLESS_ON = MappingProxyType(
    {
        "ipex_config.ipex": "Intel's extension for PyTorch has ended; torch does what it did",
        "ipex_config.use_xpu": "XPUs are found by themselves",
        "mpirun_config.mpirun_ccl": "oneCCL takes CCL_WORKER_COUNT from the environment; set it there",
        "fp8_config.opt_level": "MS-AMP is not supported; nearest: backend: AO",
        "fp8_config.optimization_level": "MS-AMP is not supported; nearest: backend: AO",
        "fp16": "",
        "bf16": "",
    }
)
"""Keys that are accepted if they are off, and the reason why they are refused if they are on."""

_IGNORED_WHERE_CCL = ("mpirun_config.mpirun_ccl",)


def special(section: str, key: str, value: object, place: str) -> dict[str, object] | None:
    """Settings of an entry whose key is not a setting's name; None if the key is unknown.

    Raises:
        ConfigError: the entry requests a missing feature; names ``place`` and the nearest alternative.
    """
    name = f"{section}.{key}" if section else key
    text = str(value).strip().lower() if value is not None else None
    if name == "compute_environment":
        return _compute_environment(value, place)
    if name == KIND:
        return _distributed_type(value, place)
    if name in ("fp16", "bf16"):
        return {} if text in _OFF else {"mixed_precision": name}
    if name == "tp_config.tp_size":
        return {"parallelism_config_tp_size": value}
    if name in UNLESS_ON:
        # Accelerate always writes 1 as the number of oneCCL workers.
        if text in _OFF or (name in _IGNORED_WHERE_CCL and text == "1"):
            return {}
        raise ConfigError(f"{place}: {name} is {value!r}: {UNLESS_ON[name]}")
    return None


def known_names() -> tuple[str, ...]:
    """Keys that ``special`` understands, beside those of settings."""
    return ("compute_environment", "distributed_type", "tp_config.tp_size", *UNLESS_ON)


def _compute_environment(value: object, place: str) -> dict[str, object]:
    if str(value).upper() in ("LOCAL_MACHINE", "NONE"):
        return {}
    raise ConfigError(
        f"{place}: compute_environment is {value!r}; only LOCAL_MACHINE is known here: start jobs of a cloud with its "
        "own tools, which run 'accel launch' on each machine"
    )


def _distributed_type(value: object, place: str) -> dict[str, object]:
    from accel_launch.config.setting import nearest

    kind = str(value).upper()
    kind = "NO" if kind in ("FALSE", "NONE", "") else kind
    if kind not in DISTRIBUTED_TYPES:
        close = nearest(kind, DISTRIBUTED_TYPES)
        hint = f"did you mean {close}?" if close else f"known: {', '.join(DISTRIBUTED_TYPES)}"
        raise ConfigError(f"{place}: distributed_type is {value!r}; {hint}")
    # Selecting one strategy turns off the others, whose sections may well be in the file.
    switches: dict[str, object] = dict.fromkeys(_STRATEGIES.values(), "false")
    chosen = DISTRIBUTED_TYPES[kind]
    return switches if chosen is None else switches | {chosen: "true"}
