"""Recipes for training in 8-bit floats: one dataclass for each library."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from torch import nn

from accel_precision.errors import PrecisionError, did_you_mean
from accel_precision.options import KwargsHandler

AO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
TE_FORMATS = ("HYBRID", "E4M3", "E5M2")
TE_ALGORITHMS = ("most_recent", "max")


@dataclass(frozen=True, slots=True)
class Fp8Recipe(KwargsHandler):
    """Base of the recipes; ``library`` is the entry point (group ``accel.fp8``) of the converter for the recipe."""

    library: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class AORecipeKwargs(Fp8Recipe):
    """Recipe of linear layers in float8 with torchao.

    Attributes:
        config: a ``torchao.float8.Float8LinearConfig``, which replaces all fields below except ``module_filter_func``.
        module_filter_func: ``(module, name) -> bool``, selects the linear layers to convert; None: those whose
            dimensions are divisible by 16, without the first and the last (embedding and logits, where 8 bits cost most
            accuracy).
        pad_inner_dim: pad inner dimensions that are not divisible by 16; None: yes.
        enable_fsdp_float8_all_gather: FSDP2, if used, all-gathers weights in 8 bits; None: yes for the tensorwise
            recipe.
        recipe: granularity of the scales: "tensorwise", "rowwise", or "rowwise_with_gw_hp" (weight gradients in high
            precision).
        emulate: compute in high precision with 8-bit rounding; None: on devices without fp8.
    """

    library: ClassVar[str] = "torchao"

    config: Any = None
    module_filter_func: Callable[[nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None
    recipe: str = "tensorwise"
    emulate: bool | None = None

    def __post_init__(self) -> None:
        _choice("recipe", self.recipe, AO_RECIPES)
        if self.recipe != "tensorwise" and self.enable_fsdp_float8_all_gather:
            raise PrecisionError(
                f"enable_fsdp_float8_all_gather=True with recipe={self.recipe!r}: torchao gathers in float8 only with "
                "recipe='tensorwise'"
            )


@dataclass(frozen=True, slots=True)
class TERecipeKwargs(Fp8Recipe):
    """Recipe of float8 linear and normalisation layers with NVIDIA TransformerEngine; fields as in its recipes.

    ``use_mxfp8_block_scaling`` selects MXFP8 (Blackwell), which has no amax history: the ``amax_*`` fields, ``margin``
    and ``interval`` configure delayed scaling, which is used otherwise.
    """

    library: ClassVar[str] = "transformer_engine"

    use_autocast_during_eval: bool = False
    margin: int = 0
    interval: int = 1
    fp8_format: str = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: str = "most_recent"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    use_mxfp8_block_scaling: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "fp8_format", _choice("fp8_format", self.fp8_format.upper(), TE_FORMATS))
        _choice("amax_compute_algo", self.amax_compute_algo, TE_ALGORITHMS)
        if self.amax_history_len < 1:
            raise PrecisionError(f"amax_history_len is {self.amax_history_len}; it counts steps, at least 1")
        if self.use_mxfp8_block_scaling and (self.amax_history_len, self.amax_compute_algo) != (1024, "most_recent"):
            raise PrecisionError(
                "amax_history_len and amax_compute_algo have no meaning with use_mxfp8_block_scaling=True"
            )


@dataclass(frozen=True, slots=True)
class FP8RecipeKwargs(KwargsHandler):
    """Recipe of either library: ``backend`` is "AO" or "TE"; None: TE if any field is given, AO otherwise.

    The other fields are those of ``TERecipeKwargs``, None if not given. Prefer ``TERecipeKwargs`` and
    ``AORecipeKwargs``.

    Raises:
        PrecisionError: MS-AMP (``backend`` or ``opt_level``), which is no longer maintained; an unknown backend; a
            field of TransformerEngine's together with torchao.
    """

    opt_level: str | None = None
    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        self.recipe()

    def recipe(self) -> Fp8Recipe:
        """Returns the recipe of the selected library."""
        given = self.to_kwargs()
        name = str(given.pop("backend", "TE" if given else "AO")).upper()
        if name == "MSAMP" or "opt_level" in given:
            raise PrecisionError(
                "fp8 backend 'MSAMP' is not supported: MS-AMP is no longer maintained and does not run with this "
                "torch; use AORecipeKwargs() (torchao) or TERecipeKwargs() (TransformerEngine)"
            )
        if _choice("backend", name, ("AO", "TE")) == "TE":
            return TERecipeKwargs(**given)
        if given:
            raise PrecisionError(f"{', '.join(given)}: torchao has no such option; it takes AORecipeKwargs(...)")
        return AORecipeKwargs()


def recipe_from_env(env: Mapping[str, str], prefix: str = "ACCELERATE_FP8_") -> Fp8Recipe | None:
    """Reads a recipe from a launcher's variables (``<prefix>BACKEND=AO|TE``, ``<prefix>FORMAT``, ...); pure.

    Returns None if ``<prefix>BACKEND`` is missing or "NO".

    Raises:
        PrecisionError: a value that the recipe does not accept.
    """
    given = {name.removeprefix(prefix): value for name, value in env.items() if name.startswith(prefix) and value}
    backend = given.pop("BACKEND", "NO").upper()
    if backend == "NO":
        return None
    if backend == "AO":
        names = {"PAD_INNER_DIM": "pad_inner_dim", "ENABLE_FSDP_FLOAT8_ALL_GATHER": "enable_fsdp_float8_all_gather"}
        values: dict[str, Any] = {field: _flag(name, given[name]) for name, field in names.items() if name in given}
        return AORecipeKwargs(**values)
    values = {"backend": backend}
    for name in ("USE_AUTOCAST_DURING_EVAL", "USE_MXFP8_BLOCK_SCALING"):
        if name in given:
            values[name.lower()] = _flag(name, given[name])
    for name in ("MARGIN", "INTERVAL", "AMAX_HISTORY_LEN"):
        if name in given:
            values[name.lower()] = _number(name, given[name])
    values |= {field: given[name] for name, field in _TEXTS.items() if name in given}
    overrides = ("OVERRIDE_FPROP", "OVERRIDE_DGRAD", "OVERRIDE_WGRAD")
    if any(name in given for name in overrides):
        values["override_linear_precision"] = tuple(_flag(name, given.get(name, "0")) for name in overrides)
    return FP8RecipeKwargs(**values).recipe()


_TEXTS: Mapping[str, str] = MappingProxyType({"FORMAT": "fp8_format", "AMAX_COMPUTE_ALGO": "amax_compute_algo"})


def _flag(name: str, text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in known:
        raise PrecisionError(f"{name}={text!r}; expected true or false")
    return known[text.lower()]


def _number(name: str, text: str) -> int:
    if not text.strip().lstrip("-").isdecimal():
        raise PrecisionError(f"{name}={text!r}; expected a whole number")
    return int(text)


def _choice(what: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise PrecisionError(f"{what} {given!r} is not one of {', '.join(known)}{did_you_mean(given, known)}")
    return given
