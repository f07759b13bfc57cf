"""The run that a backend is opened for: its processes, precision, degrees of parallelism and options of a step."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, final

from accel_backends.ops.activation_checkpointing import ActivationCheckpointing
from accel_precision.options import AutocastKwargs, GradScalerKwargs
from accel_precision.policy import PrecisionPolicy
from accel_state.parallelism.config import ParallelismConfig
from accel_state.session import Session


@final
@dataclass(frozen=True, slots=True)
class Run:
    """Everything that a backend receives except its own options.

    Attributes:
        session: processes and device.
        policy: dtypes of parameters, computation and reduction.
        parallelism: degrees of each axis, from which backends take those that they serve.
        autocast: options of the autocast context around forwards.
        scaler: options of the fp16 loss scale; None: the defaults.
        activation_checkpointing: which activations backward recomputes in models that train; None: those that the
            backend's options name.
    """

    session: Session
    policy: PrecisionPolicy
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    scaler: GradScalerKwargs | None = None
    activation_checkpointing: ActivationCheckpointing | None = None

    def autocast_context(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Returns the policy's autocast context on the run's device; ``options``: others than the run's."""
        return self.policy.autocast_context(self.session.device.type, options or self.autocast)
