"""Profile of a model: exact bytes of its parts, and one step as a sequence of marks."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, final

import torch

from accel_precision.policy import PrecisionPolicy

MarkKind = Literal["enter", "exit", "reenter", "leave", "gradient", "end"]


@final
@dataclass(frozen=True, slots=True)
class ParameterFact:
    """One parameter as a backend stores it.

    Attributes:
        name: the first of its FQNs in the model.
        shape: of the full parameter.
        dtype: dtype of the stored parameter.
        trainable: whether it requires a gradient.
        unit: index of the unit with which it is gathered.
        sharded: whether sharding backends shard it; scalars and excluded parameters are not sharded.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    unit: int
    sharded: bool = True

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the full parameter."""
        return self.numel * self.dtype.itemsize

    def shard_numel(self, ranks: int) -> int:
        """Elements on the rank with the most, sharded over ``ranks`` ranks along dimension 0."""
        if ranks == 1 or not self.sharded or not self.shape:
            return self.numel
        return -(-self.shape[0] // ranks) * prod(self.shape[1:])


@final
@dataclass(frozen=True, slots=True)
class Mark:
    """One moment of a step, and the memory of activations up to it.

    Activations are all tensors that are neither parameters, buffers, inputs nor the final gradients of parameters.

    Attributes:
        kind: the forward enters or exits a unit, the backward reenters or leaves it, a gradient is allocated, or the
            step's backward ends.
        unit: index of the unit; for a gradient, that of its parameter.
        highest: peak bytes of activations since the previous mark.
        level: bytes of activations at this moment.
        amount: bytes of the gradient.
        flops: floating-point operations since the step began.
    """

    kind: MarkKind
    unit: int
    highest: int
    level: int
    amount: int = 0
    flops: int = 0


@final
@dataclass(frozen=True, slots=True)
class Timeline:
    """One forward and backward of a batch on one device, without a strategy.

    Attributes:
        marks: in chronological order.
        flops: floating-point operations of matrix products, convolutions and attention.
    """

    marks: tuple[Mark, ...]
    flops: int

    @property
    def activations(self) -> int:
        """Peak bytes of activations."""
        return max((mark.highest for mark in self.marks), default=0)


@final
@dataclass(frozen=True, slots=True)
class Variant:
    """Key of a timeline: how the step is computed.

    Attributes:
        native: computes in the policy's dtype itself, as sharding backends do, instead of under autocast.
        checkpointed: uses activation checkpointing of the blocks.
    """

    native: bool = False
    checkpointed: bool = False


@final
@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model and its step in numbers; the rest of the planner consists of pure functions of this profile.

    Attributes:
        name: the model's class.
        parameters: every parameter once, tied ones under their first name.
        buffers: bytes of the model's buffers.
        inputs: bytes of a batch.
        units: names of the units that sharding backends gather, the root ("") first.
        blocks: indices of the units to which activation checkpointing is applied.
        wide: indices of the units that compute in full precision whatever the policy.
        policy: the precision of the timelines.
        timelines: one for each variant; a policy without half precision always computes natively.
        notes: assumptions, and facts that could not be determined.
    """

    name: str
    parameters: tuple[ParameterFact, ...]
    buffers: int
    inputs: int
    units: tuple[str, ...]
    blocks: tuple[int, ...]
    policy: PrecisionPolicy
    timelines: Mapping[Variant, Timeline]
    wide: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def trainable(self) -> tuple[ParameterFact, ...]:
        """The parameters that require gradients."""
        return tuple(parameter for parameter in self.parameters if parameter.trainable)

    def timeline(self, *, native: bool, checkpointed: bool) -> Timeline:
        """Returns the timeline of one variant."""
        return self.timelines[Variant(native and self.policy.autocast, checkpointed and bool(self.blocks))]
