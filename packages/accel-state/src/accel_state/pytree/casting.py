"""A callable whose results come out in float32, whatever it computed in."""

import functools
import pickle
from collections.abc import Callable
from typing import Any, NoReturn, final

from accel_state.pytree.operations import convert_to_fp32


@final
class ConvertOutputsToFp32:
    """Calls ``model_forward`` and returns its float16 and bfloat16 results, however nested, in float32.

    Looks like what it wraps (``__wrapped__``, name, docstring). It cannot be pickled, as what it wraps is usually a
    method that autocast replaced: unwrap the model first.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> NoReturn:
        raise pickle.PicklingError(
            "cannot pickle a prepared model with automatic mixed precision; unwrap it first with "
            "accelerator.unwrap_model(model)"
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """``model_forward`` with its results in float32, as a plain function (which may become a method)."""
    converted = ConvertOutputsToFp32(model_forward)

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return converted(*args, **kwargs)

    forward.__wrapped__ = model_forward
    return forward
