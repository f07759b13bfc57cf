"""Dtypes by role, autocast, loss scaling and fp8 conversion."""

from accel_precision._version import __version__ as __version__
from accel_precision.autocast import autocast_module as autocast_module
from accel_precision.autocast import call_within as call_within
from accel_precision.autocast import cast_parameters as cast_parameters
from accel_precision.autocast import is_swapped as is_swapped
from accel_precision.autocast import plain_module as plain_module
from accel_precision.autocast import restore_module as restore_module
from accel_precision.convert import converter as converter
from accel_precision.errors import PrecisionError as PrecisionError
from accel_precision.facts import DeviceFacts as DeviceFacts
from accel_precision.fp8 import ModuleConverter as ModuleConverter
from accel_precision.fp8 import installed_converters as installed_converters
from accel_precision.fp8 import load_converter as load_converter
from accel_precision.options import AutocastKwargs as AutocastKwargs
from accel_precision.options import GradScalerKwargs as GradScalerKwargs
from accel_precision.options import KwargsHandler as KwargsHandler
from accel_precision.policy import PrecisionPolicy as PrecisionPolicy
from accel_precision.policy import resolve as resolve
from accel_precision.policy import unsupported as unsupported
from accel_precision.recipes import AORecipeKwargs as AORecipeKwargs
from accel_precision.recipes import Fp8Recipe as Fp8Recipe
from accel_precision.recipes import FP8RecipeKwargs as FP8RecipeKwargs
from accel_precision.recipes import TERecipeKwargs as TERecipeKwargs
from accel_precision.recipes import recipe_from_env as recipe_from_env
from accel_precision.scaler import LossScaler as LossScaler
from accel_precision.scaler import make_scaler as make_scaler

# Each name is listed once, above.
__all__ = sorted(
    name
    for name, value in globals().items()
    if name == "__version__" or getattr(value, "__module__", "").startswith(f"{__name__}.")
)
