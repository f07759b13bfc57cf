"""A model's profile: exact bytes of its parts, and one step of it as a sequence of marks."""

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
    """One parameter as a backend will hold it.

    Attributes:
        name: the first of its names in the model.
        shape: of the full parameter.
        dtype: in which it is stored.
        trainable: whether it gets a gradient.
        unit: index of the unit that it is gathered with.
        sharded: whether sharding backends split it; those without dimension and those left out stay whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    unit: int
    sharded: bool = True

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size in bytes, whole."""
        return self.numel * self.dtype.itemsize

    def shard_numel(self, ranks: int) -> int:
        """Numbers that the fullest of ``ranks`` ranks holds, split along dimension 0."""
        if ranks == 1 or not self.sharded or not self.shape:
            return self.numel
        return -(-self.shape[0] // ranks) * prod(self.shape[1:])


@final
@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a step, and how much memory activations took before it.

    Activations are all tensors that are neither parameters, buffers, inputs nor the final gradients of parameters.

    Attributes:
        kind: forward enters or exits a unit, backward reenters or leaves it, a gradient's memory is taken, or the
            step's backward ends.
        unit: index of the unit; of a gradient, that of its parameter.
        highest: most bytes of activations since the mark before.
        level: bytes of activations at this moment.
        amount: bytes of the gradient.
        flops: operations since the step began.
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
    """One forward and backward of a batch on one device, without any strategy.

    Attributes:
        marks: in the order in which they happen.
        flops: floating-point operations of matrix products, convolutions and attention.
    """

    marks: tuple[Mark, ...]
    flops: int

    @property
    def activations(self) -> int:
        """The most bytes of activations at any moment."""
        return max((mark.highest for mark in self.marks), default=0)


@final
@dataclass(frozen=True, slots=True)
class Variant:
    """Which of a model's timelines.

    Attributes:
        native: computes in the precision's dtype itself, as sharding backends do, instead of under autocast.
        checkpointed: computes the blocks' activations again in backward.
    """

    native: bool = False
    checkpointed: bool = False


@final
@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model and its step in numbers; everything else in the planner is a pure function of it.

    Attributes:
        name: the model's class.
        parameters: every parameter once, tied ones under their first name.
        buffers: bytes of the model's buffers.
        inputs: bytes of a batch.
        units: names of the units that sharding backends gather, the root ("") first.
        blocks: indices of those units that activation checkpointing is applied to.
        wide: indices of those that compute in full precision whatever the policy.
        policy: the precision that the timelines were made with.
        timelines: of each variant; a precision without half precision computes natively in any case.
        notes: what was assumed or could not be found out.
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
        """How many numbers the parameters have together."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def trainable(self) -> tuple[ParameterFact, ...]:
        """The parameters that get gradients."""
        return tuple(parameter for parameter in self.parameters if parameter.trainable)

    def timeline(self, *, native: bool, checkpointed: bool) -> Timeline:
        """The step in one variant."""
        return self.timelines[Variant(native and self.policy.autocast, checkpointed and bool(self.blocks))]
