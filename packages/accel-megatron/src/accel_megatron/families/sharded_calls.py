"""Calls of megatron-core's models with full sequences, of which each context-parallel rank computes its shard."""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, final

import torch
import torch.distributed as dist
from torch.nn import functional

from accel_megatron.families.context import ContextRanks, padded_length
from accel_state.errors import BackendError

_TOKENS = frozenset(
    {
        *("input_ids", "position_ids", "labels", "tokentype_ids", "lm_labels", "loss_mask"),
        *("encoder_input_ids", "decoder_input_ids"),
    }
)
_MASKS = frozenset({"attention_mask", "encoder_attn_mask", "decoder_attn_mask", "encoder_decoder_attn_mask"})


@final
class ShardedCalls:
    """The ``forward`` of a model of megatron-core, taking and returning full sequences on all context-parallel ranks.

    Sequences are padded so that they can be divided; padding is hidden from attention, and what it gives is left out.
    What the last stage computes, losses or logits, is joined, so that a loss is the same on all ranks. The gradient of
    that loss on a rank is the part that its tokens have.

    Args:
        model: of one stage, or of a chunk of it, without wrappers.
        ranks: the context-parallel ranks.
    """

    def __init__(self, model: Any, ranks: ContextRanks) -> None:
        self._forward, self._ranks = model.forward, ranks
        self._signature = signature(model.forward)
        self._model, self._config = model, model.config

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        """Returns the output of the last stage for full sequences, [samples, tokens, ...]; of others what they pass on.

        Collective: every context-parallel rank must call this.

        Raises:
            BackendError: a tensor among the arguments that is not known to be divided by tokens.
        """
        given = self._signature.bind(*args, **arguments).arguments
        with self._dropout():
            output = self._forward(**{name: self._local(name, value) for name, value in given.items()})
        if not self._model.post_process:
            return output
        ids = given["decoder_input_ids"] if "decoder_input_ids" in given else given["input_ids"]
        if isinstance(output, tuple):  # with the classes of full sequences, which are computed from the first token
            tokens, classes = output
            return self._joined(tokens, ids.shape[1]), None if classes is None else self._of_first(classes)
        return self._joined(output, ids.shape[1])

    def _local(self, name: str, value: Any) -> Any:
        """Returns this rank's shard of an argument; masks keep the keys of full sequences."""
        if not isinstance(value, torch.Tensor):
            return value
        if name in _TOKENS:
            full = functional.pad(value, (0, self._missing(value.shape[1])))
            return full.index_select(1, self._ranks.positions(full.shape[1], value.device))
        if name not in _MASKS:
            raise BackendError(
                f"{name} of a forward step, {tuple(value.shape)}: context parallelism divides ids, positions, labels "
                "and masks among its ranks only; nearest: context_parallel_size=1"
            )
        if value.dim() == 2:  # of padding, 0 where a token is hidden
            return functional.pad(value, (0, self._missing(value.shape[1])))
        rows = value.shape[-2]
        if rows > 1:
            own = self._ranks.positions(padded_length(self._config, rows), value.device)
            value = value.index_select(-2, own.clamp(max=rows - 1))
        return functional.pad(value, (0, self._missing(value.shape[-1])), value=True)

    def _missing(self, length: int) -> int:
        return padded_length(self._config, length) - length

    def _joined(self, shard: torch.Tensor, length: int) -> torch.Tensor:
        joined: torch.Tensor = _Joined.apply(shard, self._ranks)  # type: ignore[no-untyped-call]
        return joined[:, :length]

    def _of_first(self, own: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = _OfFirst.apply(own, self._ranks.group)  # type: ignore[no-untyped-call]
        return first

    @contextmanager
    def _dropout(self) -> Iterator[None]:
        """Context in which torch's generators differ between context-parallel ranks; they continue alike afterwards."""
        config = self._config
        if not (self._model.training and (config.hidden_dropout or config.attention_dropout)):
            yield
            return
        seed = int(torch.randint(2**31, ())) + self._ranks.group.rank()
        device = next(self._model.parameters()).device
        on_cuda = device.type == "cuda"
        with torch.random.fork_rng(devices=[device] if on_cuda else []):
            torch.default_generator.manual_seed(seed)
            if on_cuda:
                torch.cuda.manual_seed(seed)
            yield


class _Joined(torch.autograd.Function):
    """Full sequences, [samples, tokens, ...], of the shards of all ranks; each keeps the gradient of its own tokens."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
        ctx.ranks = ranks
        shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(ranks.size)]
        dist.all_gather(shards, shard.contiguous(), group=ranks.group)
        length = shard.shape[1] * ranks.size
        full = shard.new_empty(shard.shape[0], length, *shard.shape[2:])
        for rank, one in enumerate(shards):
            full[:, ranks.sharding.positions(length, rank, device=shard.device)] = one
        return full

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return grad.index_select(1, ctx.ranks.positions(grad.shape[1], grad.device)), None


class _OfFirst(torch.autograd.Function):
    """The tensor of the first rank, which alone has a gradient."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.first = group.rank() == 0
        found = own.clone(memory_format=torch.contiguous_format)
        dist.broadcast(found, dist.get_global_rank(group, 0), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] if ctx.first else torch.zeros_like(grads[0]), None
