"""Memory, traffic and time of one rank for degrees of parallelism, from the shape of a model alone; pure.

Parameters are stored in fp32 and computed in bf16, and the optimizer is Adam. Stored parameters, gradients and states
differ by 1 % at most from those of gloo ranks (``test_axis_plans.py``). Activations, communication and times are not
measured, and serve the ranking. Attention keeps no scores, and activations are counted by the tensors that a block of
gated feed-forward layers saves (Korthikanti et al. 2022, without dropout).
"""

from dataclasses import dataclass
from math import lcm
from typing import final

from accel_planner.cost.axis_degrees import AxisDegrees
from accel_planner.cost.communication import EXPOSED, ring
from accel_planner.cost.hardware import Hardware
from accel_planner.cost.transformer_shape import TransformerShape

STORED, COMPUTED = 4, 2
"""Bytes of an element as it is stored, reduced and stepped (fp32), and as it is computed (bf16)."""
_STATES = 2 * STORED
_EXPERTS = "experts"
# Bytes of a logit: in bf16, its fp32 copy, and the gradients of both.
_LOGIT = COMPUTED + STORED + STORED + COMPUTED


@final
@dataclass(frozen=True, slots=True)
class Batching:
    """Sequences of an optimizer step: ``global_batch`` of all ranks, ``micro_batch`` of one forward, of ``length``."""

    global_batch: int
    micro_batch: int
    length: int

    def micro_batches(self, degrees: AxisDegrees) -> int:
        """Forwards of one rank in an optimizer step."""
        return self.global_batch // (degrees.readers * self.micro_batch)


@final
@dataclass(frozen=True, slots=True)
class AxisPlan:
    """Costs of one rank, that with the most.

    Attributes:
        degrees: degree of each axis.
        checkpointing: blocks are recomputed in the backward.
        sync_each_batch: gradients are reduced in each micro-batch of an accumulation window, and not at its end.
        parameters: bytes of stored parameters.
        gradients: bytes of reduced gradients.
        optimizer: bytes of optimizer states.
        activations: bytes of activations of all micro-batches that are in flight.
        communication: bytes of gathered parameters and their gradients, and of an accumulation window's unreduced
            gradients.
        local: bytes that an axis sends in a step over links inside a node, by axis.
        remote: the same over links between nodes.
        bubble: part of the step in which a pipeline's stage waits.
        seconds: estimated time of an optimizer step, for ranking.
    """

    degrees: AxisDegrees
    checkpointing: bool
    sync_each_batch: bool
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    communication: int
    local: dict[str, int]
    remote: dict[str, int]
    bubble: float
    seconds: float

    @property
    def peak(self) -> int:
        """Highest sum of all parts, in bytes."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.communication

    @property
    def name(self) -> str:
        """Degrees above 1, and whether blocks are recomputed and gradients reduced in each micro-batch."""
        return f"{self.degrees}{'+ckpt' * self.checkpointing}{'+sync' * self.sync_each_batch}"


def accumulates(degrees: AxisDegrees, batching: Batching) -> bool:
    """Whether ranks keep full gradients until the end of an accumulation window.

    A pipeline reduces once after its schedule, and its full gradients are among the gathered bytes.
    """
    return batching.micro_batches(degrees) > 1 and degrees.pp == 1 and degrees.shards > 1


def plan_degrees(
    shape: TransformerShape,
    hardware: Hardware,
    degrees: AxisDegrees,
    batching: Batching,
    *,
    checkpointing: bool,
    sync_each_batch: bool = False,
) -> AxisPlan:
    """Plans one combination of degrees."""
    count = batching.micro_batches(degrees)
    tokens = batching.micro_batch * batching.length // degrees.sequence
    unreduced = 0
    if accumulates(degrees, batching) and not sync_each_batch:
        unreduced = _unreduced(shape, degrees, -(-shape.layers // degrees.pp))
    layers = -(-shape.layers // degrees.pp)
    elements = _Elements.of(shape, degrees, layers)
    own = elements.total
    moved = _traffic(
        shape,
        degrees,
        elements,
        blocks=layers * count,
        tokens=tokens,
        count=count,
        reductions=count if sync_each_batch else 1,
        checkpointing=checkpointing,
    )
    sent = {axis: size for axis, size in moved.items() if axis != _EXPERTS}
    if _EXPERTS in moved:
        sent["dp_shard"] = sent.get("dp_shard", 0) + moved[_EXPERTS]
    local = {axis: size for axis, size in sent.items() if degrees.is_local(axis, hardware)}
    remote = {axis: size for axis, size in sent.items() if axis not in local}
    bubble = (degrees.pp - 1) / (count + degrees.pp - 1)
    copies = degrees.tp // _expert_split(degrees)
    work = shape.flops(batching.global_batch, batching.length, copies=copies) * (4 / 3 if checkpointing else 1)
    # The stage with the most layers determines the time.
    computing = work / hardware.ranks / hardware.flops * layers * degrees.pp / shape.layers
    counts = _collectives(degrees, blocks=layers * count, count=count, checkpointing=checkpointing)
    times = {
        axis: _seconds(axis, size, degrees, hardware) + counts.get(axis, 0) * hardware.latency
        for axis, size in moved.items()
    }
    waiting = sum(times.get(axis, 0.0) for axis in ("tp", "cp", "sp", "ep", "pp"))
    reducing = sum(times.get(axis, 0.0) for axis in ("dp_shard", _EXPERTS, "dp_replicate"))
    busy = (computing + waiting) / (1 - bubble)
    hidden = 0.0 if degrees.pp > 1 else computing  # a pipeline gathers before its schedule and reduces after it
    seconds = busy + max(0.0, reducing - hidden) + EXPOSED * min(reducing, hidden)
    return AxisPlan(
        degrees,
        checkpointing,
        sync_each_batch,
        parameters=own * STORED,
        gradients=own * STORED,
        optimizer=own * _STATES,
        activations=_activations(
            shape, degrees, layers, tokens=tokens, in_flight=min(degrees.pp, count), checkpointing=checkpointing
        ),
        communication=_gathered(shape, degrees, layers) + unreduced,
        local=local,
        remote=remote,
        bubble=bubble,
        seconds=seconds,
    )


@final
@dataclass(frozen=True, slots=True)
class _Elements:
    """Elements that a rank stores; those of its experts are gathered over ``dp_shard``, ``cp`` and ``sp``."""

    dense: int
    experts: int

    @classmethod
    def of(cls, shape: TransformerShape, degrees: AxisDegrees, layers: int) -> "_Elements":
        experts = layers * shape.feed_forwards if shape.experts else 0
        dense = layers * shape.block - experts + _ends(shape, degrees)
        # Norms and routers are replicas along the tensor-parallel axis.
        copied = layers * (2 * shape.hidden + shape.hidden * shape.experts) + shape.hidden
        split = -(-(dense - copied) // degrees.tp) + copied
        return cls(
            -(-split // degrees.shards), -(-experts // (_expert_split(degrees) * degrees.ep * degrees.expert_shards))
        )

    @property
    def total(self) -> int:
        return self.dense + self.experts


def _expert_split(degrees: AxisDegrees) -> int:
    """Tensor-parallel ranks that split each expert: with an expert-parallel axis, they hold the same experts."""
    return degrees.tp if degrees.ep == 1 else 1


def _ends(shape: TransformerShape, degrees: AxisDegrees) -> int:
    """Elements outside the blocks on the rank with the most: a stage has the embedding or the head."""
    if degrees.pp == 1 or shape.tied:
        return shape.ends
    return shape.vocabulary * shape.hidden + shape.hidden


def _gathered(shape: TransformerShape, degrees: AxisDegrees, layers: int) -> int:
    """Bytes of parameters and gradients that a rank gathers."""
    if degrees.shards == 1:
        return 0
    ends = _ends(shape, degrees)
    experts = shape.feed_forwards if shape.experts else 0
    own = experts // (degrees.ep * _expert_split(degrees)) if degrees.expert_shards > 1 else 0
    block = (shape.block - experts) // degrees.tp + own
    if degrees.pp > 1:  # all units of the stage are gathered, with full gradients, until the step's backward
        return (layers * block + ends // degrees.tp) * (COMPUTED + STORED)
    return 2 * block * (COMPUTED + COMPUTED) + ends // degrees.tp * (COMPUTED + COMPUTED)


def _unreduced(shape: TransformerShape, degrees: AxisDegrees, layers: int) -> int:
    """Bytes of full gradients that a rank keeps until the last micro-batch of a window reduces them."""
    experts = layers * shape.feed_forwards if shape.experts else 0
    dense = layers * shape.block - experts + _ends(shape, degrees)
    own = experts // (degrees.ep * _expert_split(degrees)) if degrees.expert_shards > 1 else 0
    return (dense // degrees.tp + own) * STORED


def _activations(
    shape: TransformerShape, degrees: AxisDegrees, layers: int, *, tokens: int, in_flight: int, checkpointing: bool
) -> int:
    """Bytes of saved activations: of the first stage all micro-batches in flight, of the last one also logits."""
    attention = 2 * (shape.queries + shape.keys) // degrees.tp
    inner = 4 * shape.feed_forward * max(1, shape.chosen) // _expert_split(degrees)
    block = tokens * COMPUTED * (4 * shape.hidden + attention + inner)
    kept = tokens * COMPUTED * shape.hidden if checkpointing else block
    logits = tokens * shape.vocabulary * _LOGIT
    working = block if checkpointing else 0
    first = in_flight * layers * kept + working
    last = layers * kept + max(working, logits)
    return max(first, last) if degrees.pp > 1 else last


def _traffic(
    shape: TransformerShape,
    degrees: AxisDegrees,
    elements: _Elements,
    *,
    blocks: int,
    tokens: int,
    count: int,
    reductions: int,
    checkpointing: bool,
) -> dict[str, int]:
    """Bytes that a rank sends in an optimizer step along each active axis; those of experts' shards apart."""
    forwards = 2 if checkpointing else 1
    hidden = tokens * shape.hidden * COMPUTED
    gathers = 2 * count if degrees.pp == 1 else 1

    def sharding(size: int, ranks: int) -> int:
        return gathers * ring(size * ranks * COMPUTED, ranks) + reductions * ring(size * ranks * STORED, ranks)

    # Heads of keys and values are repeated, each as often, until the sequence-parallel ranks divide them.
    exchanged = 2 * shape.queries // degrees.tp + 2 * _repeated(shape, degrees) * shape.head_size
    sent = {
        # two all-reduces in each forward of a block and two in its backward
        "tp": blocks * 2 * (forwards + 1) * 2 * ring(hidden, degrees.tp),
        # keys and values are gathered, their gradients reduce-scattered
        "cp": blocks * (forwards + 1) * 2 * tokens * shape.keys // degrees.tp * COMPUTED * (degrees.cp - 1),
        # queries, keys, values and outputs are exchanged for heads, their gradients for tokens
        "sp": blocks * (forwards + 1) * ring(tokens * exchanged * COMPUTED, degrees.sp),
        # tokens go to their experts and return, also their gradients
        "ep": blocks * 2 * (forwards + 1) * ring(hidden * shape.chosen, degrees.ep),
        "pp": 2 * count * hidden if degrees.pp > 1 else 0,
        "dp_shard": sharding(elements.dense, degrees.shards),
        _EXPERTS: sharding(elements.experts, degrees.expert_shards),
        "dp_replicate": 2 * reductions * ring(elements.total * STORED, degrees.dp_replicate),
    }
    return {axis: size for axis, size in sent.items() if size and axis in {"dp_shard", _EXPERTS, *degrees.active}}


def _collectives(degrees: AxisDegrees, *, blocks: int, count: int, checkpointing: bool) -> dict[str, int]:
    """Collectives of a rank in an optimizer step for which its blocks wait, by active axis; messages of a pipeline.

    Short sequences and small shards of them would look free without their latency.
    """
    forwards = 2 if checkpointing else 1
    each = {
        "tp": blocks * 2 * (forwards + 1),  # all-reduces after attention and the feed-forward layer
        "cp": blocks * 2 * (forwards + 1),  # keys and values
        "sp": blocks * 2 * (forwards + 1),  # heads for tokens and back
        "ep": blocks * (3 * forwards + 2),  # numbers of tokens, tokens, outputs; two gradients
        "pp": 2 * count,
    }
    return {axis: number for axis, number in each.items() if axis in degrees.active}


def _repeated(shape: TransformerShape, degrees: AxisDegrees) -> int:
    """Heads of keys that a tensor-parallel rank's attention exchanges over the sequence-parallel ranks."""
    return lcm(-(-shape.groups // degrees.tp), degrees.sp)


def _seconds(axis: str, size: int, degrees: AxisDegrees, hardware: Hardware) -> float:
    """Time of an axis' traffic; groups beside each other share a node's link to other nodes."""
    if degrees.is_local("dp_shard" if axis == _EXPERTS else axis, hardware):
        return size / hardware.local
    return size * _beside(axis, degrees, hardware) / hardware.remote


def _beside(axis: str, degrees: AxisDegrees, hardware: Hardware) -> int:
    """Groups of an axis that have ranks on the same node."""
    if axis == "dp_shard":  # shards of dense layers are over the expert-, context- and sequence-parallel ranks, too
        return min(degrees.tp, hardware.devices)
    if axis == _EXPERTS:
        inside = hardware.devices // (degrees.sequence * degrees.tp)
        return min(degrees.tp, hardware.devices) * min(degrees.ep, max(1, inside))
    return min(degrees.stride(axis), hardware.devices)
