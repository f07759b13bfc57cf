"""Full tensors by the FQNs of the Transformers model, from the tensors of all ranks, and back."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from accel_megatron.conversion.architecture import Architecture


def full_tensors(architecture: Architecture, local: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns full copies, by FQN, of tensors that are like the parameters of this rank's stage.

    Parameters that are missing in ``local`` have to be missing on all tensor-parallel ranks; they are left out.

    Collective: every rank of the model-parallel group must call this.
    """
    from megatron.core import parallel_state

    tensor, pipeline = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    stage, count = pipeline.rank(), pipeline.size()
    found: dict[str, torch.Tensor] = {}
    for name, rule in architecture.owned_rules(stage, count):
        if name not in local:
            continue
        own = local[name].detach()
        shards = [own]
        if rule.dim is not None and tensor.size() > 1:
            shards = [torch.empty_like(own) for _ in range(tensor.size())]
            dist.all_gather(shards, own.contiguous(), group=tensor)
        full = rule.split(rule.unshard(shards))
        found.update({one: value.clone() for one, value in zip(rule.names, full, strict=True)})
    return found if count == 1 else _of_all_stages(found, pipeline)


def _of_all_stages(found: dict[str, torch.Tensor], group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Returns the tensors of all stages, in their order."""
    described: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{} for _ in range(group.size())]
    dist.all_gather_object(described, {name: (one.shape, one.dtype) for name, one in found.items()}, group=group)
    device = torch.device("cpu") if not found else next(iter(found.values())).device
    full: dict[str, torch.Tensor] = {}
    for stage, names in enumerate(described):
        for name, (shape, dtype) in names.items():
            mine = stage == group.rank()
            full[name] = found[name].contiguous() if mine else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(full[name], dist.get_global_rank(group, stage), group=group)
    return full


def local_tensors(architecture: Architecture, full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns this rank's tensors by megatron-core's names, of those that ``full`` has."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    count = parallel_state.get_pipeline_model_parallel_world_size()
    return {
        name: rule.shard(rule.join([full[one] for one in rule.names]), rank, size)
        for name, rule in architecture.rules(stage, count)
        if rule.names[0] in full
    }
