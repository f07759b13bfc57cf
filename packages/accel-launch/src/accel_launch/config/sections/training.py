"""Settings of the training itself: precision, accumulation, compilation, checks."""

# ruff: noqa: RUF009  - setting() returns a dataclass field, as dataclasses.field() does.

from dataclasses import dataclass
from datetime import timedelta

from accel_launch.config.setting import Facts, setting

# Other names of precisions, and roles. accel_precision parses them, but cannot be imported here because it needs torch.
_PRECISIONS = r"none|half|double|fp32|fp64|(fp|bf)?16-mixed|(16|32|64)-true|32|64|.*=.*"
_TRAIN, _COMPILE, _FP8 = "Training", "Compilation", "FP8"
_COMPILING = "dynamo_backend"
_IN_FP8, _BY_TORCHAO, _BY_TRANSFORMER_ENGINE = "mixed_precision=fp8", "fp8_backend=ao", "fp8_backend=te"


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class TrainingSettings:
    """Settings that apply to every script."""

    mixed_precision: str = setting(
        "no",
        Facts(
            "Precision of the computation; also roles, like compute=bf16,reduce=fp32.",
            _TRAIN,
            choices=("no", "fp16", "bf16", "fp8", "fp16-true", "bf16-true", "fp32-true", "fp64-true"),
            pattern=_PRECISIONS,
            env=("ACCELERATE_MIXED_PRECISION",),
        ),
    )
    gradient_accumulation_steps: int = setting(
        1,
        Facts(
            "Micro-batches per optimizer step.",
            _TRAIN,
            minimum=1,
            env=("ACCELERATE_GRADIENT_ACCUMULATION_STEPS",),
            section="deepspeed_config",
        ),
    )
    activation_checkpointing: bool = setting(
        False, Facts("Recompute the activations of the model's blocks in backward, with any strategy.", _TRAIN)
    )
    seed: int | None = setting(None, Facts("Seeds Python, NumPy and torch.", _TRAIN, minimum=0, maximum=2**63 - 1))
    project_dir: str | None = setting(None, Facts("Folder for checkpoints and logs of trackers.", _TRAIN))
    backend: str | None = setting(
        None, Facts("Training backend by name (single, ddp, ...); chosen from what there is if not given.", _TRAIN)
    )
    debug: bool = setting(
        False,
        Facts(
            "Check operation, structure, shape and dtype on all ranks before each collective.",
            _TRAIN,
            env=("ACCELERATE_DEBUG_MODE",),
        ),
    )
    log_level: str | None = setting(
        None,
        Facts(
            "Level of accel's own loggers.",
            _TRAIN,
            choices=("debug", "info", "warning", "error", "critical"),
            env=("ACCELERATE_LOG_LEVEL",),
        ),
    )
    timeout: timedelta | None = setting(
        None, Facts("How long a collective waits for the other ranks.", _TRAIN, minimum=0.001)
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class CompilationSettings:
    """torch.compile, as ``TorchDynamoPlugin`` takes it."""

    dynamo_backend: str = setting(
        "no",
        Facts(
            "Compile prepared models with this backend of torch.compile, like inductor.",
            _COMPILE,
            env=("ACCELERATE_DYNAMO_BACKEND",),
            section="dynamo_config",
            folded=True,
        ),
    )
    dynamo_mode: str = setting(
        "default",
        Facts(
            "What inductor optimises for.",
            _COMPILE,
            choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
            env=("ACCELERATE_DYNAMO_MODE",),
            section="dynamo_config",
            needs=_COMPILING,
        ),
    )
    dynamo_use_fullgraph: bool = setting(
        False,
        Facts(
            "Fail at a graph break.",
            _COMPILE,
            env=("ACCELERATE_DYNAMO_USE_FULLGRAPH",),
            section="dynamo_config",
            needs=_COMPILING,
        ),
    )
    dynamo_use_dynamic: bool | None = setting(
        None,
        Facts(
            "Compile for changing shapes; torch finds out if not given.",
            _COMPILE,
            env=("ACCELERATE_DYNAMO_USE_DYNAMIC",),
            section="dynamo_config",
            needs=_COMPILING,
        ),
    )
    dynamo_use_regional_compilation: bool = setting(
        False,
        Facts(
            "Compile each of the repeated blocks once instead of the full model.",
            _COMPILE,
            env=("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",),
            section="dynamo_config",
            needs=_COMPILING,
        ),
    )


def _fp8(env: str, help: str, **more: object) -> Facts:
    facts = {"env": (f"ACCELERATE_FP8_{env}",), "section": "fp8_config", "needs": _IN_FP8, "prefix": "fp8_"}
    return Facts(help, _FP8, **(facts | more))  # type: ignore[arg-type]


def _te(env: str, help: str, **more: object) -> Facts:
    return _fp8(env, help, needs=_BY_TRANSFORMER_ENGINE, **more)


def _ao(env: str, help: str, **more: object) -> Facts:
    return _fp8(env, help, needs=_BY_TORCHAO, **more)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Fp8Settings:
    """The recipe of ``mixed_precision=fp8``."""

    fp8_backend: str = setting(
        "ao", _fp8("BACKEND", "What computes it: torchao or TransformerEngine.", choices=("ao", "te"))
    )
    fp8_use_autocast_during_eval: bool = setting(
        False, _te("USE_AUTOCAST_DURING_EVAL", "Also in evaluation (TransformerEngine).")
    )
    fp8_margin: int = setting(0, _te("MARGIN", "Margin of the scaling factor (TransformerEngine)."))
    fp8_interval: int = setting(1, _te("INTERVAL", "Steps between two scaling factors (TransformerEngine)."))
    fp8_format: str = setting(
        "HYBRID", _te("FORMAT", "Number format (TransformerEngine).", choices=("HYBRID", "E4M3", "E5M2"))
    )
    fp8_amax_history_len: int = setting(
        1024,
        _te("AMAX_HISTORY_LEN", "Length of the history (TransformerEngine).", aliases=("amax_history_length",)),
    )
    fp8_amax_compute_algo: str = setting(
        "most_recent",
        _te(
            "AMAX_COMPUTE_ALGO",
            "How the history is used (TransformerEngine).",
            choices=("max", "most_recent"),
            aliases=("amax_compute_algorithm",),
        ),
    )
    fp8_override_linear_precision: str = setting(
        "false,false,false",
        _te(
            "OVERRIDE_LINEAR_PRECISION",
            "Higher precision for fprop, dgrad, wgrad: three of true or false (TransformerEngine).",
            listed=True,
            choices=("false,false,false",),
            pattern=r"(true|false)(,(true|false)){2}",
            folded=True,
        ),
    )
    fp8_use_mxfp8_block_scaling: bool = setting(
        False, _te("USE_MXFP8_BLOCK_SCALING", "MXFP8 block scaling (TransformerEngine).")
    )
    fp8_enable_fsdp_float8_all_gather: bool = setting(
        True, _ao("ENABLE_FSDP_FLOAT8_ALL_GATHER", "FSDP gathers in float8 (torchao).", valued=True)
    )
    fp8_pad_inner_dim: bool = setting(True, _ao("PAD_INNER_DIM", "Pad inner dimensions to 16 (torchao).", valued=True))
