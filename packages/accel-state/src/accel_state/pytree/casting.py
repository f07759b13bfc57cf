"""Wrapper of a forward that converts half-precision results to float32."""

import functools
import pickle
from collections.abc import Callable
from typing import Any, NoReturn, final

from accel_state.pytree.operations import convert_to_fp32


@final
class ConvertOutputsToFp32:
    """Calls ``model_forward`` and converts float16 and bfloat16 tensors in its (nested) result to float32.

    Has the name and docstring of the wrapped callable, and ``__wrapped__``. It cannot be pickled, because the wrapped
    callable is usually a method that autocast replaced; unwrap the model first.
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
    """Wraps ``model_forward`` to return float32, as a plain function, so that it can become a method."""
    converted = ConvertOutputsToFp32(model_forward)

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return converted(*args, **kwargs)

    forward.__wrapped__ = model_forward
    return forward
