"""DeepSpeed's inference engine, for models that are only evaluated."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from accel_deepspeed.library import library
from accel_precision.policy import PrecisionPolicy
from accel_state.errors import BackendError, PrepareError

if TYPE_CHECKING:
    from accel_state.session import Session


def start_inference(
    session: "Session", model: nn.Module, policy: PrecisionPolicy, options: Mapping[str, Any]
) -> nn.Module:
    """Returns the inference engine of a model, in the policy's dtype unless ``options`` set another.

    Raises:
        BackendError: on a CPU, where DeepSpeed's collectives crash the process.
        PrepareError: DeepSpeed refuses, with its message.
    """
    if session.device.type == "cpu":
        raise BackendError(
            "deepspeed.init_inference does not work on CPUs; nearest: leave the plugin's 'inference' out, and the "
            "model computes as it is, or as a partitioned one at zero_stage=3"
        )
    deepspeed = library(session.device.type)
    config: dict[str, Any] = {} if policy.compute is None else {"dtype": policy.compute}
    try:
        engine: nn.Module = deepspeed.init_inference(model, config={**config, **options})
    except (AssertionError, ValueError, NotImplementedError, ImportError) as error:
        raise PrepareError(f"DeepSpeed cannot prepare this {type(model).__name__} for inference: {error}") from error
    return engine
