"""Capabilities of a backend, as data for selection, checks and documentation."""

from dataclasses import dataclass
from typing import final

from accel_precision.policy import PrecisionPolicy, dtype_name

RECORDING = frozenset({"xla"})
"""Device types with lazy execution: computations are recorded and run at a call that the backend has to make."""

PRECISIONS = ("no", "bf16", "fp16", "fp8", "bf16-true", "fp16-true", "fp32-true", "fp64-true")


@final
@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of a backend.

    Attributes:
        device_types: supported device types; None: any except those of ``RECORDING``.
        precisions: supported precisions, names from ``PRECISIONS``.
        ranks: smallest and largest number of processes; None: no upper limit.
        several_models: whether several models can be prepared in one call.
        uneven_inputs: whether ranks may have different numbers of batches within ``join``.
        sharded: whether parameters are sharded (as DTensors or otherwise).
        gathers_fp8: whether sharded weights can be all-gathered in 8 bits.
        offload: whether parameters or optimizer states can be kept in host memory.
        meta_device: whether models on the meta device can be prepared, and are initialised then.
        instead_of_recomputing: what to do instead of ``Run.activation_checkpointing``, for errors of backends that do
            not apply it; None: the backend applies it.
        loads_in_place: whether a state to load may contain the tensors of ``states.model`` and ``states.optimizer``
            themselves, with new values in them.
        optimizer_states_of_some: whether an optimizer state may lack some of the optimizer's parameters.
        not_alone_because: why the backend cannot run as one rank of many in a fake process group, for errors; None: it
            can.
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
    instead_of_recomputing: str | None = None
    loads_in_place: bool = False
    optimizer_states_of_some: bool = True
    not_alone_because: str | None = None

    def refusal(self, backend: str, policy: PrecisionPolicy, device_type: str, world_size: int) -> str | None:
        """Returns why the combination is not supported, and the nearest supported one; None if it is supported."""
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
    """Returns the entry of ``PRECISIONS`` for a policy, named or made of roles."""
    if policy.fp8 is not None:
        return "fp8"
    if policy.autocast:
        return dtype_name(policy.compute)
    return "no" if policy.compute is None else f"{dtype_name(policy.compute)}-true"
