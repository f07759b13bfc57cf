"""Axes of a run's models (experts, tensors, sequences), in the order in which a backend applies them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, final

import torch
from torch import nn

from accel_backends.ops.dtensor import is_dtensor
from accel_backends.ops.meta_init import is_meta
from accel_backends.parallel.capacity import capacity_of
from accel_state.errors import PrepareError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_backends.core.run import Run
    from accel_backends.parallel.context_parallel import Context
    from accel_backends.parallel.plan import TensorParallelPlan
    from accel_backends.parallel.sequence_inputs import SequenceInputs
    from accel_state.parallelism.config import ParallelismConfig


@final
@dataclass(frozen=True, slots=True)
class SequenceAxis:
    """Axis whose ranks hold shards of sequences, and how attention spans them; see ``Context``."""

    name: Literal["cp", "sp"]
    size: int
    method: Literal["allgather", "ring", "ulysses"]
    balanced: bool = True
    length: int | None = None

    @classmethod
    def of(cls, parallelism: "ParallelismConfig") -> Self | None:
        """The axis of a run, which has one of the two at most; None if sequences are full."""
        if (size := parallelism.size("sp")) > 1:
            options = parallelism.sp_handler
            varies = options is None or options.sp_seq_length_is_variable
            return cls("sp", size, "ulysses", length=None if varies or options is None else options.sp_seq_length)
        if (size := parallelism.size("cp")) > 1:
            handler = parallelism.cp_handler
            ring = handler is not None and handler.cp_comm_strategy == "alltoall"
            return cls("cp", size, "ring" if ring else "allgather", handler is None or handler.load_balance)
        return None

    def context(self, mesh: "DeviceMesh") -> "Context":
        """Sharding of sequences over the ranks of ``mesh``, that of this axis."""
        from accel_backends.parallel.context_parallel import Context

        return Context(mesh, self.method, self.balanced, self.length)


@final
class ModelAxes:
    """Applies the axes of a run's ``ParallelismConfig`` to models; without such an axis it changes nothing.

    ``mesh`` returns the mesh of an axis by its name; its first call is a collective. ``shards`` is the shard degree of
    an expert-parallel rank's experts.

    Attributes:
        capacity: capacity of the experts of all models, divided or not; None: they compute every choice.
    """

    def __init__(self, run: "Run", mesh: "Callable[[str], DeviceMesh]", *, shards: int = 1) -> None:
        self._run, self._mesh, self._shards = run, mesh, shards
        self._tensor, self._sequence = run.parallelism.size("tp"), SequenceAxis.of(run.parallelism)
        self._expert = run.parallelism.size("ep")
        self._inputs: SequenceInputs | None = None
        self.capacity = capacity_of(run.parallelism)

    @property
    def inputs(self) -> "SequenceInputs | None":
        """Sharding of the inputs of context- and sequence-parallel models; None without these axes.

        Collective: every rank of the group must call this. That holds for the first read.
        """
        if self._sequence is not None and self._inputs is None:
            from accel_backends.parallel.sequence_inputs import SequenceInputs

            self._inputs = SequenceInputs(self._sequence.context(self._mesh(self._sequence.name)))
        return self._inputs

    def experts(self, model: nn.Module) -> list[str]:
        """Names of the modules whose experts are divided among ranks; none without expert parallelism."""
        if self._expert == 1:
            return []
        from accel_backends.parallel.expert_parallel import find_experts

        return list(find_experts(model))

    def take_choices(self, device: torch.device) -> torch.Tensor | None:
        """Numbers of dropped and of all choices of experts (int64, 2) since the last call; None without a capacity."""
        if self.capacity is None:
            return None
        return self.capacity.take_counts_on(device)

    def check(self, model: nn.Module) -> None:
        """Refuses a model that the axes cannot compute, before any change; without communication.

        Raises:
            PrepareError: names the module or the value, and the nearest that works.
        """
        if self._expert > 1:
            from accel_backends.parallel.expert_parallel import check_expert_parallel

            self._check_values(model, f"ep_size={self._expert}")
            check_expert_parallel(model, self._expert, shards=self._shards)
        elif self.capacity is not None:
            from accel_backends.parallel.expert_parallel import check_bounded_experts

            check_bounded_experts(model)
        if self._tensor > 1:
            from accel_backends.parallel.tensor_parallel import check_tensor_parallel

            self._check_values(model, f"tp_size={self._tensor}")
            check_tensor_parallel(model, self._tensor, self.plan, divided=self.experts(model))
        if self._sequence is not None:
            from accel_backends.parallel.sdpa import check_context_parallel
            from accel_backends.parallel.sequence_inputs import check_inputs

            layers = 1 if isinstance(self.plan, Mapping) else self._tensor  # a user's plan may leave attention out
            check_context_parallel(model, self._sequence.method, self._sequence.size, layers=layers)
            check_inputs(model)

    def apply(
        self,
        model: nn.Module,
        device: torch.device,
        send: Callable[[list[torch.Tensor]], None],
        plan: "TensorParallelPlan | None" = None,
        *,
        called: bool = True,
    ) -> None:
        """Applies the axes to a checked model in place; ``send`` overwrites tensors with rank 0's values.

        ``plan``: tensor-parallel plan of these modules; None: that of the options. ``called``: the model itself is
        called, so that hooks shard its inputs and correct its losses; otherwise the caller of its parts does that.

        With expert parallelism the device holds the experts of one parameter at a time in full. With
        tensor parallelism the model is moved to the device first, and the ranks of a tensor-parallel group get
        equal random generators, because they have to draw the same dropout masks.

        Collective: every rank of the group must call this.
        """
        if self._expert > 1 and (called or self.experts(model)):  # a part of a model may have none
            from accel_backends.parallel.expert_parallel import apply_expert_parallel

            def values(parameter: torch.Tensor) -> torch.Tensor:
                full = parameter.detach().to(device)
                send([full])
                return full

            apply_expert_parallel(model, self._mesh("ep"), values=values, capacity=self.capacity)
        elif self._expert == 1 and self.capacity is not None:
            from accel_backends.parallel.expert_parallel import bound_experts

            bound_experts(model, self.capacity)
        if called and (self._expert > 1 or self._sequence is not None):
            from accel_backends.parallel.router_loss import sum_router_loss

            # Experts of other ranks are needed in evaluation too; without them, replicas evaluate on their own.
            alone = None if self._expert > 1 or self.inputs is None else self.inputs.context.group
            sum_router_loss(model, self._run.session.group, evaluation=alone)
        if self._tensor > 1:
            from accel_backends.parallel.tensor_parallel import apply_tensor_parallel

            model.to(device)
            # Experts are DTensors by now, whose ranks have their values, and which differ from rank to rank.
            send([one.detach() for one in (*model.parameters(), *model.buffers()) if not is_dtensor(one)])
            mesh = self._mesh("tp")
            apply_tensor_parallel(model, mesh, plan or self.plan, src_data_rank=None)
            _equalise_generators(mesh, device)
        if (inputs := self.inputs) is not None:
            from accel_backends.parallel.sdpa import apply_context_parallel

            apply_context_parallel(model, inputs.context)
            if called:
                inputs.attach(model)

    def _check_values(self, model: nn.Module, degree: str) -> None:
        """Refuses models without values, and fp8, for an axis that shards values."""
        if is_meta(model):
            raise PrepareError(
                f"{type(model).__name__} is on the meta device, and {degree} shards values; nearest: values on the "
                f"host, or {degree.partition('=')[0]}=1"
            )
        if self._run.policy.fp8 is not None:
            raise PrepareError(f"fp8 with {degree}: fp8 layers are not sharded; nearest: mixed_precision='bf16'")

    @property
    def plan(self) -> Any:
        """Tensor-parallel plan of the options, as ``plan_for`` takes it."""
        handler = self._run.parallelism.tp_handler
        return "derive" if handler is None else handler.plan


def _equalise_generators(mesh: "DeviceMesh", device: torch.device) -> None:
    from accel_state.rng import synchronize_rng_state

    kinds: Sequence[str] = ("torch",) if device.type == "cpu" else ("torch", device.type)
    for kind in kinds:
        synchronize_rng_state(kind, group=mesh.get_group())
