"""Full tensors by the FQNs of the Transformers model, from the tensors of all ranks, and back."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, final

import torch
import torch.distributed as dist

from accel_megatron.conversion.architecture import Architecture
from accel_megatron.conversion.rules import Rule, stack_name, stacked, unstacked


def full_tensors(
    architecture: Architecture, local: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Returns full copies, by FQN, of tensors that are like the parameters of this rank.

    Parameters that are missing in ``local`` have to be missing on all tensor-parallel ranks; they are left out. On
    ``device`` are the tensors of all ranks, also where this rank has none.

    Collective: every rank of the model-parallel group must call this.
    """
    from megatron.core import parallel_state

    pipeline = parallel_state.get_pipeline_model_parallel_group()
    found: dict[str, torch.Tensor] = {}
    for name, rule in local_rules(architecture, copies=False):
        if name not in local:
            continue
        own = local[name].detach()
        shards, tensor = [own], _sharing(rule)
        if rule.dim is not None and tensor.size() > 1:
            shards = [torch.empty_like(own) for _ in range(tensor.size())]
            dist.all_gather(shards, own.contiguous(), group=tensor)
        full = rule.split(rule.unshard(shards))
        found.update({one: value.clone() for one, value in zip(rule.names, full, strict=True)})
    if architecture.num_experts and place().expert_ranks > 1:
        experts = {name: value for name, value in found.items() if stack_name(name) != name}
        found |= _of_all_ranks(experts, parallel_state.get_expert_model_parallel_group(), device)
    return stacked(found if pipeline.size() == 1 else _of_all_ranks(found, pipeline, device))


def _of_all_ranks(
    found: dict[str, torch.Tensor], group: dist.ProcessGroup, device: torch.device
) -> dict[str, torch.Tensor]:
    """Returns the tensors of all stages, or the experts of all expert-parallel ranks, in their order."""
    described: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{} for _ in range(group.size())]
    dist.all_gather_object(described, {name: (one.shape, one.dtype) for name, one in found.items()}, group=group)
    full: dict[str, torch.Tensor] = {}
    for rank, names in enumerate(described):
        for name, (shape, dtype) in names.items():
            mine = rank == group.rank()
            full[name] = found[name].contiguous() if mine else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(full[name], dist.get_global_rank(group, rank), group=group)
    return full


def local_tensors(architecture: Architecture, full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns this rank's tensors by megatron-core's names, of those that ``full`` has."""
    slices = unstacked(full, architecture.stacks)
    found = {}
    for name, rule in local_rules(architecture):
        if rule.names[0] in slices:
            group = _sharing(rule)
            found[name] = rule.shard(rule.join([slices[one] for one in rule.names]), group.rank(), group.size())
    return found


def _sharing(rule: Rule) -> dist.ProcessGroup:
    """Returns the ranks over which a tensor is split: those that share an expert, or the tensor-parallel ranks."""
    from megatron.core import parallel_state

    group: dist.ProcessGroup = (
        parallel_state.get_expert_tensor_parallel_group()
        if rule.of_expert
        else parallel_state.get_tensor_model_parallel_group()
    )
    return group


def norm_over_ranks(
    gradients: Iterable[tuple[torch.Tensor, torch.Tensor | None]], group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """Returns the joint 2-norm (fp64, on ``device``) of the gradients that all ranks of ``group`` pass.

    ``gradients``: a parameter and its gradient on this rank. Copies on several ranks count once. Gradients of experts
    are summed over the ranks that have other experts, in place of ``group``.

    Collective: every rank of the group must call this.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    sums: list[torch.Tensor | float] = [0.0, 0.0]
    for parameter, gradient in gradients:
        if gradient is None or not (
            param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)
        ):
            continue
        sums[on_expert_ranks(parameter)] += gradient.detach().double().pow(2).sum()
    dense, experts = (torch.as_tensor(one, dtype=torch.float64, device=device) for one in sums)
    dist.all_reduce(dense, group=group)
    if place().expert_ranks > 1:
        dist.all_reduce(experts, group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return (dense + experts).sqrt()


def mean_over_model_ranks(
    full: Mapping[str, torch.Tensor],
    architecture: Architecture,
    shapes: Mapping[str, torch.Size],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Returns the mean of full tensors, by FQN, over the ranks that compute one replica: the same on all of them.

    Experts are averaged over the ranks that have other experts. A tensor that only other ranks pass is zero on this
    one; ``shapes`` are those of all, and the means have ``dtype``. Tensors that the ranks of a replica have in common
    stay as they are.

    Collective: every rank of the group must call this.
    """
    from megatron.core import parallel_state

    listed: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(listed, list(full))
    known = {name for names in listed for name in names}
    found: dict[str, torch.Tensor] = {}
    for name in (one for one in shapes if one in known):
        mean = (
            full[name].to(device, dtype, copy=True)
            if name in full
            else torch.zeros(shapes[name], dtype=dtype, device=device)
        )
        group = (
            parallel_state.get_expert_tensor_model_pipeline_parallel_group()
            if name in architecture.stacks
            else parallel_state.get_model_parallel_group()
        )
        dist.all_reduce(mean, group=group)
        found[name] = mean.div_(group.size())
    return found


def on_expert_ranks(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of an expert that only some expert-parallel ranks have."""
    return not getattr(parameter, "allreduce", True)


@final
class ModelPlace(NamedTuple):
    """ModelPlace of a rank among pipeline stages and expert-parallel ranks.

    Attributes:
        stage: number of its pipeline stage.
        stages: number of stages.
        expert_rank: its rank in the expert-parallel group.
        expert_ranks: size of that group.
        chunks: number of its chunks of layers; more than one with an interleaved schedule.
    """

    stage: int
    stages: int
    expert_rank: int
    expert_ranks: int
    chunks: int

    def of_chunk(self, number: int) -> tuple[int, int, int, int]:
        """Returns the place of a chunk, were each chunk of all ranks a stage."""
        return number * self.stages + self.stage, self.stages * self.chunks, self.expert_rank, self.expert_ranks


def place() -> ModelPlace:
    """Returns this rank's place."""
    from megatron.core import parallel_state

    return ModelPlace(
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
    )


def local_rules(architecture: Architecture, *, copies: bool = True) -> Iterator[tuple[str, Rule]]:
    """Yields the name and the rule of each of this rank's tensors.

    Without ``copies``, the copy of a tied embedding on the last stage is left out.
    """
    here = place()
    of_stage = architecture.rules if copies else architecture.owned_rules
    for number in range(here.chunks):
        for name, rule in of_stage(*here.of_chunk(number)):
            yield chunk_name(number, name), rule


def chunk_name(number: int, name: str) -> str:
    """Returns the name of a tensor of chunk ``number`` among those of all of this rank's chunks."""
    return f"chunk{number}.{name}" if number else name
