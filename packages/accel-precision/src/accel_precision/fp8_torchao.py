"""Linear layers that train in float8 with torchao."""

import warnings
from dataclasses import replace
from importlib import import_module
from typing import Any, final

from torch import nn

from accel_precision.errors import PrecisionError
from accel_precision.facts import DeviceFacts
from accel_precision.fp8_gather import GatheredScales
from accel_precision.recipes import AORecipeKwargs, Fp8Recipe

MULTIPLE = 16  # 8-bit matrix units need both dimensions of a weight to be divisible by this


@final
class TorchAOConverter:
    """Replaces linear layers by torchao's ``Float8Linear``; weights and biases stay the same parameters.

    Args:
        recipe: ``AORecipeKwargs``.
        facts: facts of the device; without fp8 in hardware the layers are emulated (same rounding, slower).
        sharded: FSDP will all-gather the weights, in 8 bits with the tensorwise recipe.

    Raises:
        PrecisionError: a recipe of another library, or torchao is missing.
    """

    def __init__(self, recipe: Fp8Recipe, facts: DeviceFacts, *, sharded: bool = False) -> None:
        if not isinstance(recipe, AORecipeKwargs):
            raise PrecisionError(f"torchao takes an AORecipeKwargs, and got {type(recipe).__name__}")
        if "torchao" not in facts.fp8_libraries:
            raise PrecisionError(
                "precision 'fp8' by torchao: it is not installed (pip install torchao); nearest: 'bf16'"
            )
        self._recipe = recipe
        self._facts = facts
        self._sharded = sharded

    def config(self) -> Any:
        """Returns the recipe as a ``torchao.float8.Float8LinearConfig``."""
        recipe = self._recipe
        emulate = not self._facts.fp8 if recipe.emulate is None else recipe.emulate
        gather = self._sharded and recipe.recipe == "tensorwise"
        if recipe.config is not None:
            given = recipe.config
            return replace(
                given,
                emulate=emulate or given.emulate,
                enable_fsdp_float8_all_gather=given.enable_fsdp_float8_all_gather and self._sharded,
            )
        return replace(
            import_module("torchao.float8").Float8LinearConfig.from_recipe_name(recipe.recipe),
            emulate=emulate,
            pad_inner_dim=True if recipe.pad_inner_dim is None else recipe.pad_inner_dim,
            enable_fsdp_float8_all_gather=gather and recipe.enable_fsdp_float8_all_gather is not False,
        )

    def convert(self, model: nn.Module) -> nn.Module:
        """Replaces the eligible linear layers in place and returns the model, a new module if the model itself is one.

        Warns if no layer is eligible.
        """
        float8 = import_module("torchao.float8")
        done = import_module("torchao.float8.float8_linear").Float8Linear
        linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        chosen = {
            name
            for name, module in linears.items()
            if not isinstance(module, done) and self._eligible(module, name, list(linears))
        }
        if not chosen:
            warnings.warn(
                f"none of the {len(linears)} linear layers of {type(model).__name__} computes in fp8: by default the "
                f"first and the last do not, nor those whose dimensions do not divide by {MULTIPLE}; "
                "AORecipeKwargs(module_filter_func=...) chooses others",
                stacklevel=2,
            )
            return model
        converted: nn.Module = float8.convert_to_float8_training(
            model, config=self.config(), module_filter_fn=lambda module, name: name in chosen
        )
        return converted

    def follow(self, model: nn.Module) -> GatheredScales | None:
        """Returns the scales of the sharded weights that are all-gathered in 8 bits; None if there are none."""
        scales = GatheredScales(model)
        return scales if scales else None

    def _eligible(self, module: nn.Linear, name: str, names: list[str]) -> bool:
        if self._recipe.module_filter_func is not None:
            return self._recipe.module_filter_func(module, name)
        return type(module) is nn.Linear and name not in (names[0], names[-1]) and divides(module)


def divides(module: nn.Linear) -> bool:
    """Whether both dimensions of the weight are divisible by ``MULTIPLE``."""
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
