"""Capabilities of a backend, as data that selection, checks and documentation share."""

from dataclasses import dataclass
from typing import final

from accel_precision.policy import PrecisionPolicy, dtype_name

RECORDING = frozenset({"xla"})
"""Types of devices that record computations and run them on a call that the backend has to make."""

PRECISIONS = ("no", "bf16", "fp16", "fp8", "bf16-true", "fp16-true", "fp32-true", "fp64-true")


@final
@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do.

    Attributes:
        device_types: types of devices it runs on; None: any but those of ``RECORDING``.
        precisions: names of precisions it carries out, from ``PRECISIONS``.
        ranks: smallest and largest number of processes; None: no upper limit.
        several_models: whether several models can be prepared in one call.
        uneven_inputs: whether ``join`` lets ranks have different numbers of batches.
        sharded: whether parameters end up sharded (as DTensors or otherwise), so that a rank holds only its part.
        gathers_fp8: whether sharded weights can be gathered in 8 bits.
        offload: whether parameters or optimizer states can be kept on the host.
        meta_device: whether it takes models without values and gives them theirs.
        loads_in_place: whether a state may be loaded whose tensors are, in part, those of ``model_state`` and
            ``optimizer_state`` themselves, with new values in them.
        optimizer_states_of_some: whether an optimizer may be given states of only some of its parameters.
    """

    device_types: frozenset[str] | None = None
    precisions: frozenset[str] = frozenset(PRECISIONS)
    ranks: tuple[int, int | None] = (1, None)
    several_models: bool = True
    uneven_inputs: bool = False
    sharded: bool = False
    gathers_fp8: bool = False
    offload: bool = False
    meta_device: bool = False
    loads_in_place: bool = False
    optimizer_states_of_some: bool = True

    def refusal(self, backend: str, policy: PrecisionPolicy, device_type: str, world_size: int) -> str | None:
        """Why the combination is not possible, with the nearest that is; None if it is."""
        if self.device_types is not None and device_type not in self.device_types:
            able = ", ".join(sorted(self.device_types))
            return f"backend {backend!r} does not run on device type {device_type!r}, only on {able}"
        if self.device_types is None and device_type in RECORDING:
            return (
                f"backend {backend!r} does not run on device type {device_type!r}, which has a backend of its own; "
                f"nearest: strategy={device_type!r}, or none"
            )
        fewest, most = self.ranks
        if world_size < fewest or (most is not None and world_size > most):
            span = str(fewest) if most == fewest else f"{fewest} or more" if most is None else f"{fewest} to {most}"
            return f"backend {backend!r} runs on {span} process(es), and there are {world_size}"
        wanted = precision_of(policy)
        if wanted not in self.precisions:
            halves = ("bf16-true", "fp16-true", "bf16", "fp16") if wanted in ("bf16-true", "fp16-true") else ()
            order = ("bf16", "fp16", "no") if policy.autocast else (*halves, "fp32-true", "bf16", "no")
            nearest = next((name for name in order if name in self.precisions), "no")
            return (
                f"backend {backend!r} does not carry out precision {policy.name!r}; nearest that it does: {nearest!r}"
            )
        return None


def precision_of(policy: PrecisionPolicy) -> str:
    """The entry of ``PRECISIONS`` that a policy, named or made of roles, comes under."""
    if policy.fp8 is not None:
        return "fp8"
    if policy.autocast:
        return dtype_name(policy.compute)
    return "no" if policy.compute is None else f"{dtype_name(policy.compute)}-true"
