"""Steps with degrees of parallelism written by hand with torch's own pieces, to which those of accel are compared.

``parallelize_module``, ``fully_shard``, ``torch.distributed.pipelining``, collectives in ``autograd.Function``. Each
step returns the loss of its batch on every rank, as a loop does that logs it or looks for NaN.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

Degrees = Mapping[str, int]
Step = Callable[[], torch.Tensor]
LENGTH, BATCH, MICRO_BATCHES = 32, 8, 4
#: The large ``eps`` makes losses depend on the scale of gradients, too.
OPTIMIZER = {"lr": 1e-2, "eps": 1e-2}
COLWISE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWWISE = ("o_proj", "down_proj")


def parts(degrees: Degrees) -> tuple[Any, torch.Tensor]:
    """A Llama or Mixtral of four blocks whose step takes some ten milliseconds, and the batch of this rank.

    Ranks have the same batch if they differ along tp, cp, sp or pp only.
    """
    from accel.utils import ParallelismConfig
    from accel_testing.equivalence.causal_lms import VOCABULARY, tiny_llama, tiny_mixtral, with_exact_loss

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "use_cache": False}
    model = with_exact_loss((tiny_mixtral if "ep_size" in degrees else tiny_llama)(**sizes))
    place = ParallelismConfig(**degrees).coordinates(dist.get_rank())
    seed = (place["dp_replicate"] * 8 + place["dp_shard"]) * 8 + place["ep"]
    return model, torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def shards_by_hand(degrees: Degrees) -> Step:
    """``parallelize_module`` by block, then ``fully_shard`` by block over the data-parallel ranks."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, tokens = parts(degrees)
    mesh = init_device_mesh("cpu", (degrees.get("dp_shard_size", 1), 2), mesh_dim_names=("dp", "tp"))
    for block in model.model.layers:
        names = [name for name, _ in block.named_modules()]
        plan: dict[str, Any] = {name: ColwiseParallel() for name in names if name.endswith(COLWISE)}
        plan |= {name: RowwiseParallel() for name in names if name.endswith(ROWWISE)}
        parallelize_module(block, mesh["tp"], plan)
    return sharded_step(model, mesh["dp"], {"input_ids": tokens, "labels": tokens})


def sharded_step(model: Any, mesh: Any, batch: Mapping[str, Any], *, summed: Any = None) -> Step:
    """Step of a model whose blocks and root are sharded; ``summed``: group whose ranks have parts of each loss."""
    from torch.distributed.fsdp import fully_shard

    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER, foreach=False)

    def step() -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told: torch.Tensor = loss.detach()
        if summed is not None:
            dist.all_reduce(told, group=summed)
            told = told / dist.get_world_size(summed)
        return told

    return step


class Gathered(torch.autograd.Function):
    """All-gather along a new first dim; the backward reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, size = group, dist.get_world_size(group)
        full = shard.new_empty(size * shard.shape[0], *shard.shape[1:])
        dist.all_gather_into_tensor(full, shard, group=group)
        return full.view(size, *shard.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        shard = gradients[0].new_empty(gradients[0].shape[1:])
        dist.reduce_scatter_tensor(shard, gradients[0].contiguous().flatten(0, 1), group=ctx.group)
        return shard, None


class Sent(torch.autograd.Function):
    """All-to-all of rows, in order of rank; the backward sends the gradients back. Equal parts without sizes."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, to: list[int] | None, source: list[int] | None, group: Any) -> Any:
        ctx.options = source, to, group
        received = rows.new_empty(len(rows) if source is None else sum(source), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), source, to, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return Sent.apply(gradients[0], *ctx.options), None, None, None


def gathered_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    group: Any,
    scaling: float,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Context parallelism: chunks ``r`` and ``2n - 1 - r`` of the queries see the keys before their ends."""
    from torch.nn.attention.bias import causal_lower_right

    rank, size, chunk = dist.get_rank(group), dist.get_world_size(group), query.shape[2] // 2
    first, second = Gathered.apply(torch.cat([key, value], dim=-1), group).split(chunk, dim=3)
    full = torch.cat([*first.unbind(), *reversed(second.unbind())], dim=2)
    keys, values = full.chunk(2, dim=-1)
    outputs = []
    for part, end in zip(query.split(chunk, dim=2), ((rank + 1) * chunk, (2 * size - rank) * chunk), strict=True):
        mask = causal_lower_right(chunk, end)
        seen = keys[:, :, :end], values[:, :, :end]
        outputs.append(F.scaled_dot_product_attention(part, *seen, attn_mask=mask, scale=scaling))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def exchanged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    group: Any,
    scaling: float,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Ulysses: each rank computes some of the heads of full sequences."""
    size = dist.get_world_size(group)
    rows = torch.stack([query, key, value]).unflatten(2, (size, -1)).movedim(2, 0)
    q, k, v = Sent.apply(rows, None, None, group).movedim(0, 3).flatten(3, 4)
    full = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
    own = Sent.apply(full.unflatten(2, (size, -1)).movedim(2, 0), None, None, group).movedim(0, 1).flatten(1, 2)
    return own.transpose(1, 2).contiguous(), None


def sequences_by_hand(degrees: Degrees) -> Step:
    """Shards of sequences, an attention that communicates, and ``fully_shard`` over all ranks."""
    from transformers import AttentionInterface

    model, tokens = parts(degrees)
    mesh = init_device_mesh("cpu", (degrees.get("dp_shard_size", 1), 2), mesh_dim_names=("dp", "own"))
    group, rank, size = mesh["own"].get_group(), mesh["own"].get_local_rank(), 2
    if "cp_size" in degrees:
        chunks = torch.arange(LENGTH).chunk(2 * size)
        places, attention = torch.cat([chunks[rank], chunks[-1 - rank]]), gathered_attention
    else:
        places, attention = torch.arange(LENGTH).chunk(size)[rank], exchanged_attention
    AttentionInterface.register("by_hand", partial(attention, group=group))
    model.set_attn_implementation("by_hand")
    labels = F.pad(tokens, (0, 1), value=-100)[:, 1:]
    batch = {
        "input_ids": tokens[:, places],
        "position_ids": places[None],
        "labels": labels[:, places],
        "shift_labels": labels[:, places],
        "num_items_in_batch": (labels != -100).sum() / size,  # fully_shard averages over the ranks
    }
    everyone = init_device_mesh("cpu", (dist.get_world_size(),))
    return sharded_step(model, everyone, batch, summed=group)


def dispatched(
    compute: Callable[..., torch.Tensor],
    group: Any,
    layer: Any,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Dropless experts: tokens go to the ranks of their experts and back, one row for each choice."""
    size, local = dist.get_world_size(group), layer.num_experts
    chosen = index.flatten()
    order = torch.argsort(chosen, stable=True)
    sent = torch.bincount(chosen, minlength=size * local)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    to, source = torch.stack([sent, received]).view(2, size, local).sum(2).tolist()
    rows = Sent.apply(hidden[order // index.shape[1]], to, source, group)
    experts = torch.arange(local).repeat(size).repeat_interleave(received)
    outputs = Sent.apply(compute(layer, rows, experts[:, None], rows.new_ones(len(rows), 1)), source, to, group)
    weighted = outputs * weights.flatten()[order, None]
    placed = torch.zeros_like(weighted).index_copy(0, order, weighted)
    return placed.view(*index.shape, -1).sum(1)


def experts_by_hand(degrees: Degrees) -> Step:
    """Half of the experts on each of two ranks, ``fully_shard`` of the rest over all ranks."""
    from torch.distributed.fsdp import fully_shard

    model, tokens = parts(degrees)
    mesh = init_device_mesh("cpu", (degrees.get("dp_shard_size", 1), 2), mesh_dim_names=("dp", "ep"))
    group = mesh["ep"].get_group()
    for block in model.model.layers:
        experts = block.mlp.experts
        compute = type(experts).forward
        for name, parameter in list(experts.named_parameters()):
            own = parameter.detach().chunk(2)[mesh["ep"].get_local_rank()].clone()
            setattr(experts, name, nn.Parameter(own))
        experts.num_experts //= 2
        experts.forward = MethodType(partial(dispatched, compute, group), experts)
        fully_shard(experts, mesh=mesh["dp"])
        experts.set_gradient_divide_factor(float(dist.get_world_size()))  # its tokens are those of all ranks
        # gloo has no sum of scaled gradients; in a group of one rank torch divides such a sum twice.
        experts.set_force_sum_reduction_for_comms(mesh["dp"].size() > 1)
    everyone = init_device_mesh("cpu", (dist.get_world_size(),))
    return sharded_step(model, everyone, {"input_ids": tokens, "labels": tokens})


class Half(nn.Module):
    """One stage of a Llama: its base model with the first half of the blocks, or with the last, and the head.

    The model's own forward prepares masks and positions, and its own function computes the loss, as on the other side
    and in the cases without stages.
    """

    def __init__(self, model: Any, *, first: bool) -> None:
        super().__init__()
        blocks, middle = list(model.model.layers), len(model.model.layers) // 2
        self.base, self.first = model.model, first
        self.base.layers = nn.ModuleList(blocks[:middle] if first else blocks[middle:])
        self.base.config.num_hidden_layers = len(self.base.layers)
        self.head = None if first else model.lm_head
        self.loss_function, self.vocabulary = model.loss_function, model.config.vocab_size
        if first:
            self.base.norm = nn.Identity()
        else:
            self.base.embed_tokens = None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids" if self.first else "inputs_embeds": given}
        hidden: torch.Tensor = self.base(**inputs, use_cache=False).last_hidden_state
        return hidden if self.head is None else self.head(hidden)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocabulary)
        return found


def pipeline_by_hand(degrees: Degrees) -> Step:
    """Two halves of the model under torch's 1F1B, whose last rank sends the loss to the first.

    Replicas average their gradients in one all-reduce for each.
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model, tokens = parts(degrees)
    replicas = degrees.get("dp_replicate_size", 1)
    mesh = init_device_mesh("cpu", (2, replicas), mesh_dim_names=("pp", "dp"))
    place = mesh["pp"].get_local_rank()
    half = Half(model, first=place == 0)
    stage = PipelineStage(half, place, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=half.loss)
    optimizer = torch.optim.AdamW(half.parameters(), **OPTIMIZER)

    def step() -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if place == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=tokens, losses=losses)
        loss = torch.stack(losses).detach().mean() if losses else torch.zeros(())
        dist.broadcast(loss, group=mesh["pp"].get_group(), group_src=1)
        if replicas > 1:
            gradients = [p.grad for p in half.parameters() if p.grad is not None]
            flat = torch.cat([one.flatten() for one in gradients]).div_(replicas)
            dist.all_reduce(flat, group=mesh["dp"].get_group())
            for one, mean in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
                one.copy_(mean.view_as(one))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def step_by_hand(degrees: Degrees) -> Step:
    """The step with these degrees."""
    if "pp_size" in degrees:
        return pipeline_by_hand(degrees)
    if "ep_size" in degrees:
        return experts_by_hand(degrees)
    return shards_by_hand(degrees) if "tp_size" in degrees else sequences_by_hand(degrees)
