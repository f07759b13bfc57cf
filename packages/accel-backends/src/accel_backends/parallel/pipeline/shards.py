"""Parameters of pipeline stages, sharded while no batch is computed over ranks that compute on other tokens."""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.ops.averaging import complete_gradients
from accel_backends.ops.fqn import named_parameters
from accel_backends.ops.optimizer_support import FUSED_ON_FULL, beyond_elements, check_state
from accel_backends.parallel.expert_parallel import shard_placement
from accel_backends.parallel.pipeline.causal_lm import CausalLM, has_parameters
from accel_backends.private import full_parameter, joined_units, reduce_unit_gradients, unit_parameters
from accel_precision.policy import dtype_name
from accel_state.errors import PrepareError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


@final
class _Unit(nn.Module):
    """Modules whose parameters are gathered together. It is never called, so that torch's hooks do not run."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.own = nn.ModuleList(modules)

    def forward(self) -> None:
        """Does nothing; ``fully_shard`` takes modules with a forward."""


@final
class StageShards:
    """Sharding of the modules of this rank's stages in place, with torch's ``fully_shard``; each block is a unit.

    Parameters are full while a schedule runs, and sharded otherwise, as ``reshard_after_forward=False`` does, because
    blocks compute once for each micro-batch. Their full gradients stay on the rank until ``reduce``.

    Args:
        causal_lm: the model, with the modules of this rank's stages.
        mesh: axes over which parameters are sharded, the last one shards.
        group: ranks of this mesh.
        axes: degrees of the axes of the run that shard, for errors.
        experts: modules of experts, which are divided among expert-parallel ranks; each is a unit.
        expert_mesh: axes over which these are sharded, the last one shards.

    Collective: every rank of the mesh must call this.
    """

    def __init__(
        self,
        causal_lm: CausalLM,
        mesh: "DeviceMesh",
        group: "ProcessGroup",
        *,
        axes: Collection[str],
        experts: Sequence[nn.Module] = (),
        expert_mesh: "DeviceMesh | None" = None,
    ) -> None:
        from torch.distributed.fsdp import fully_shard

        divided = [_Unit([module]) for module in experts]
        # torch does not reduce gradients without elements, which are the same on all ranks.
        empty = {parameter for parameter in causal_lm.model.parameters() if not parameter.numel()}
        for unit in divided:
            assert expert_mesh is not None
            place = shard_placement(expert_mesh.size(-1))
            fully_shard(
                unit, mesh=expert_mesh, reshard_after_forward=False, shard_placement_fn=place, ignored_params=empty
            )
        elsewhere = {parameter for unit in divided for parameter in unit.parameters()} | empty
        blocks = [_Unit([block]) for block in causal_lm.blocks if has_parameters(block)]
        around = [causal_lm.base.get_submodule(name) for name in (*causal_lm.embeddings, *causal_lm.behind)]
        root = _Unit([*divided, *blocks, *around, causal_lm.model.get_submodule(causal_lm.head_name)])
        for unit in (*blocks, root):
            fully_shard(unit, mesh=mesh, reshard_after_forward=False, ignored_params=elsewhere)
        self._model, self._group = causal_lm.model, group
        self._units = cast("list[FSDPModule]", [root, *blocks, *divided])
        joined_units(self._units, axes)
        with self.gathered():
            pass  # makes the full parameters

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which the modules have full parameters.

        Collective: every rank of the mesh must call this.
        """
        handles = [unit.unshard(async_op=True) for unit in self._units]
        for handle in handles:
            if handle is not None:
                handle.wait()
        try:
            yield
        finally:
            for unit in self._units:
                unit.reshard()

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        """Full parameters that train, whose gradients are those of this rank.

        They have values within ``gathered`` only, where torch also copies ``requires_grad`` of the shards to them.
        """
        return [cast(nn.Parameter, full) for shard, full in self._pairs() if shard.requires_grad]

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Full gradients of this rank that are not reduced yet, by FQN."""
        names = {id(parameter): name for name, parameter in named_parameters(self._model).items()}
        return {names[id(shard)]: full.grad for shard, full in self._pairs() if full.grad is not None}

    def drop_gradients(self, parameters: Container[int] | None = None) -> None:
        """Drops the full gradients of this rank; ``parameters``: ids of their shards. Default: all."""
        for shard, full in self._pairs():
            if parameters is None or id(shard) in parameters:
                full.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Adds the means over the ranks of the mesh of the full gradients to those of the shards.

        A parameter that any rank has used gets a gradient on all ranks.

        Collective: every rank of the mesh must call this.
        """
        complete_gradients(self.trained_parameters, self._group)
        reduce_unit_gradients(self._units)

    def _pairs(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yields shards, which the model has outside of ``gathered``, and full parameters."""
        for unit in self._units:
            for entry in unit_parameters(cast(nn.Module, unit)):
                full = full_parameter(entry)
                assert full is not None
                yield entry.sharded_param, full


def check_shardable(model: nn.Module, *, axes: Collection[str], upcast: bool) -> None:
    """Refuses parameters that cannot be sharded over ``axes``.

    ``axes``: degrees of the axes of the run that shard. ``upcast``: half-precision parameters that train become fp32
    first.

    Raises:
        PrepareError: a parameter without dimension, or trained parameters of several dtypes.
    """
    first: dict[torch.dtype, str] = {}
    nearest = f"dp_replicate_size instead of {' and '.join(axes)}"
    for name, parameter in named_parameters(model).items():
        if parameter.dim() == 0:
            raise PrepareError(
                f"{name} of {type(model).__name__} has no dimension to shard; nearest: nn.Parameter(torch.tensor("
                f"[value])), or {nearest}"
            )
        if parameter.requires_grad:
            half = upcast and parameter.dtype.itemsize == 2
            first.setdefault(torch.float32 if half else parameter.dtype, name)
    if len(first) > 1:
        listed = ", ".join(f"{name} is {dtype_name(dtype)}" for dtype, name in first.items())
        raise PrepareError(
            f"parameters that train have several dtypes, and stages that {' and '.join(axes)} shard are gathered "
            f"together: {listed}; nearest: model.to() one dtype, or {nearest}"
        )


def check_optimizers(optimizers: Iterable[Optimizer], sharded: Mapping[int, Any], *, axes: Collection[str]) -> None:
    """Refuses optimizers that cannot step on shards; ``sharded``: by id, the parameters that will be sharded.

    ``axes``: degrees of the axes of the run that shard.

    Raises:
        PrepareError: an optimizer that looks at full parameters, a fused step that torch has not for shards, or a state
            that is not of the shape of its parameter.
    """
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        held = [(group, one) for group in optimizer.param_groups for one in group["params"] if id(one) in sharded]
        if held and beyond_elements(optimizer, "fsdp") is not None:
            raise PrepareError(
                f"{kind} looks at full parameters, of which {' and '.join(axes)} leave every rank a part; nearest: "
                "AdamW, or dp_replicate_size"
            )
        if isinstance(optimizer, FUSED_ON_FULL) and any(group.get("fused") for group, _ in held):
            raise PrepareError(
                f"{kind}(fused=True): torch has no fused step of {kind} for the shards of {' and '.join(axes)}; "
                "nearest: foreach=True"
            )
        for _, parameter in held:
            check_state(kind, parameter, optimizer.state.get(parameter, {}))
