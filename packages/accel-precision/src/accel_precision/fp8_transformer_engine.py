"""Linear and normalisation layers that train in float8 with NVIDIA TransformerEngine."""

from contextlib import AbstractContextManager
from dataclasses import fields
from importlib import import_module
from typing import Any, final

from torch import nn

from accel_precision.autocast import call_within
from accel_precision.errors import PrecisionError
from accel_precision.facts import DeviceFacts
from accel_precision.recipes import Fp8Recipe, TERecipeKwargs

MULTIPLE = 16


@final
class TransformerEngineConverter:
    """Replaces ``Linear`` and ``LayerNorm`` by TransformerEngine's and runs the model's calls in its fp8 context.

    Parameters stay the same objects. A linear layer whose dimensions are not both divisible by 16 stays as it is.

    Raises:
        PrecisionError: a recipe of another library, no TransformerEngine, or a device without fp8.
    """

    def __init__(self, recipe: Fp8Recipe, facts: DeviceFacts, *, sharded: bool = False) -> None:
        if not isinstance(recipe, TERecipeKwargs):
            raise PrecisionError(f"TransformerEngine takes a TERecipeKwargs, and got {type(recipe).__name__}")
        if "transformer_engine" not in facts.fp8_libraries:
            raise PrecisionError(
                "precision 'fp8' by TransformerEngine: it is not installed (pip install transformer-engine[pytorch]); "
                "nearest: AORecipeKwargs() for torchao, or precision 'bf16'"
            )
        if not facts.fp8:
            raise PrecisionError(
                f"TransformerEngine needs a GPU with fp8 (NVIDIA Ada, Hopper or newer), and the device is "
                f"{facts.type!r}; nearest: AORecipeKwargs() for torchao, which emulates it, or precision 'bf16'"
            )
        self._recipe = recipe

    def convert(self, model: nn.Module) -> nn.Module:
        """Replaces layers in place and returns the model, whose calls run in TransformerEngine's fp8 context."""
        te = import_module("transformer_engine.pytorch")
        recipe, in_eval = self.recipe(te), self._recipe.use_autocast_during_eval
        _replace_children(model, te)

        def context(module: nn.Module) -> AbstractContextManager[Any]:
            autocast: AbstractContextManager[Any] = te.fp8_autocast(
                enabled=module.training or in_eval, fp8_recipe=recipe
            )
            return autocast

        return call_within(model, context)

    def recipe(self, te: Any) -> Any:
        """Returns TransformerEngine's recipe object, without fields that the installed version no longer has.

        Raises:
            PrecisionError: MXFP8 on a device that lacks it.
        """
        recipes = import_module("transformer_engine.common.recipe")
        kind, given = recipes.DelayedScaling, self._recipe
        values: dict[str, Any] = {"fp8_format": getattr(recipes.Format, given.fp8_format), "margin": given.margin}
        if given.use_mxfp8_block_scaling:
            available, reason = te.fp8.FP8GlobalStateManager.is_mxfp8_available()
            if not available:
                raise PrecisionError(
                    f"use_mxfp8_block_scaling=True: {reason}; nearest: TERecipeKwargs(use_mxfp8_block_scaling=False)"
                )
            kind = recipes.MXFP8BlockScaling
        else:
            names = ("interval", "amax_history_len", "amax_compute_algo", "override_linear_precision")
            values |= {name: getattr(given, name) for name in names}
        known = {field.name for field in fields(kind)}
        return kind(**{name: value for name, value in values.items() if name in known})


def _replace_children(module: nn.Module, te: Any) -> None:
    for name, child in module.named_children():
        if type(child) is nn.Linear and child.in_features % MULTIPLE == 0 and child.out_features % MULTIPLE == 0:
            bias = child.bias is not None
            new = te.Linear(child.in_features, child.out_features, bias=bias, params_dtype=child.weight.dtype)
            setattr(module, name, _with_parameters_of(child, new))
        elif type(child) is nn.LayerNorm and len(child.normalized_shape) == 1 and child.elementwise_affine:
            new = te.LayerNorm(child.normalized_shape[0], eps=child.eps, params_dtype=child.weight.dtype)
            setattr(module, name, _with_parameters_of(child, new))
        else:
            _replace_children(child, te)


def _with_parameters_of(old: nn.Module, new: nn.Module) -> nn.Module:
    for name, parameter in old.named_parameters(recurse=False):
        setattr(new, name, parameter)
    new.train(old.training)
    return new
