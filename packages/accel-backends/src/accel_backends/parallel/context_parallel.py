"""Context and sequence parallelism: ranks of a mesh axis hold shards of sequences, and attention spans all of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel_backends.parallel.attention.exchanged import exchanged_attention
from accel_backends.parallel.attention.gathered import gathered_attention
from accel_backends.parallel.attention.positions import SequenceSharding
from accel_backends.parallel.attention.ring import ring_attention
from accel_state.errors import BackendError, ConfigError, PrepareError

#: Label of a token without loss, as in ``torch.nn.functional.cross_entropy``.
IGNORED = -100
_LABELS = ("labels", "shift_labels")
_METHODS: Mapping[str, Callable[..., torch.Tensor]] = {
    "allgather": gathered_attention,
    "ring": ring_attention,
    "ulysses": exchanged_attention,
}


@final
@dataclass(frozen=True)
class Context:
    """Sharding of sequences over the ranks of a mesh with one axis, and the attention over the shards.

    ``allgather`` gathers keys and values of full sequences on every rank and calls torch's attention kernels; ``ring``
    keeps shards only and computes the scores itself (see ``attention.blocks``), so it needs less memory for keys and
    more for scores. ``ulysses`` exchanges heads for tokens, so that each rank calls the kernels with full sequences of
    some of the heads; that is sequence parallelism. All are exact. ``balanced`` gives every rank as many causal scores
    to compute, which ``ulysses`` does always. ``length`` is the number of tokens of every sequence; None: batches
    differ.

    Raises:
        ConfigError: a mesh of several axes, or a method that does not exist.
    """

    mesh: DeviceMesh
    method: Literal["allgather", "ring", "ulysses"] = "allgather"
    balanced: bool = True
    length: int | None = None

    def __post_init__(self) -> None:
        if self.mesh.ndim != 1:
            kind, axis = ("sequence", "sp") if self.method == "ulysses" else ("context", "cp")
            raise ConfigError(
                f"{kind} parallelism over a mesh of {self.mesh.ndim} axes {self.mesh.mesh_dim_names}; nearest: "
                f"mesh[{axis!r}], its one axis"
            )
        if self.method not in _METHODS:
            raise ConfigError(f"no context-parallel method {self.method!r}; methods: {', '.join(_METHODS)}")

    @cached_property
    def sharding(self) -> SequenceSharding:
        """Division of the positions among the ranks."""
        return SequenceSharding(self.mesh.size(), self.balanced and self.method != "ulysses")

    @property
    def kind(self) -> str:
        """Word for the parallelism in messages: "context-parallel", or "sequence-parallel" of ``ulysses``."""
        return "sequence-parallel" if self.method == "ulysses" else "context-parallel"

    @property
    def without(self) -> str:
        """Degree that turns the parallelism off, for messages."""
        return "sp_size=1" if self.method == "ulysses" else "cp_size=1"

    @property
    def group(self) -> dist.ProcessGroup:
        """Group of ranks that hold the shards of this rank's sequences."""
        return self.mesh.get_group()

    def positions(self, length: int, *, device: torch.device | str | None = None) -> torch.Tensor:
        """Positions of this rank's tokens in sequences of ``length`` tokens, ascending.

        Raises:
            PrepareError: the length does not divide into the chunks.
        """
        return self.sharding.positions(length, self.mesh.get_local_rank(), device=device)

    def shard(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's shard of full sequences along ``dim``; differentiable."""
        return tensor.index_select(dim, self.positions(tensor.shape[dim], device=tensor.device))

    def shard_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's shard of a batch of full sequences (batch x tokens in dims 0 and 1), as keywords of a model.

        Every tensor with the length of ``input_ids`` (or ``inputs_embeds``) in dim 1 is sharded; others are kept.
        ``position_ids`` are added. Labels become ``shift_labels``, because the next token of a chunk's last one is on
        another rank; ``labels`` are the same tensor, since transformers' models compute a loss only with them. An
        ``attention_mask`` without zeros (padding) is left out.

        Raises:
            PrepareError: no sequences, a length that is not ``length`` or does not divide, padding that attention would
                see, or positions that begin anew within a row (packed sequences).
        """
        first = next((batch[key] for key in ("input_ids", "inputs_embeds") if batch.get(key) is not None), None)
        if first is None:
            raise PrepareError(f"a batch of {', '.join(batch)} has no input_ids or inputs_embeds to shard")
        length = first.shape[1]
        self.check_length(length)
        full = {key: value for key, value in batch.items() if value is not None and key != "attention_mask"}
        if (mask := self._padding(batch.get("attention_mask"), length)) is not None:
            full["attention_mask"] = mask
        if "position_ids" in full:
            self._check_positions(full["position_ids"])
        else:  # not checked, because that waits for the device
            full["position_ids"] = torch.arange(length, device=first.device).expand(first.shape[0], length)
        if "labels" in full and "shift_labels" not in full:
            full["shift_labels"] = _shifted(full["labels"])
        if "shift_labels" in full:
            full["labels"] = full["shift_labels"]
        return {key: self.shard(value) if _has_length(value, length) else value for key, value in full.items()}

    def check_length(self, length: int) -> None:
        """Refuses full sequences of another number of tokens than ``length`` of the context.

        Raises:
            PrepareError: with both numbers.
        """
        if self.length not in (None, length):
            raise PrepareError(f"sequences of {length} tokens, and sp_seq_length says that all have {self.length}")

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        causal: bool,
        scale: float | None = None,
        padding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of this rank's queries to the keys of full sequences; (batch, heads, local tokens, features).

        ``padding``: as in ``exchanged_attention``; ``ulysses`` only.

        Raises:
            BackendError: queries and keys are not the same shard of one sequence, or heads do not divide.

        Collective: every rank of the group must call this.
        """
        if query.shape[-2] != key.shape[-2] or query.ndim != 4:
            raise BackendError(
                f"{self.kind} attention of queries {tuple(query.shape)} to keys {tuple(key.shape)}; expected "
                "self-attention (batch, heads, tokens, features) of as many keys as queries, so no cache and no "
                "cross-attention"
            )
        if query.shape[1] % key.shape[1]:
            raise BackendError(f"{key.shape[1]} heads of keys do not divide {query.shape[1]} heads of queries")
        return _METHODS[self.method](
            query,
            key,
            value,
            group=self.group,
            sharding=self.sharding,
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            causal=causal,
            **({} if padding is None else {"padding": padding}),
        )

    def token_mean(self, losses: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean of the losses over the labelled tokens of all ranks, the same value on every rank.

        Its gradients are those of one process once gradients are *averaged* over the context-parallel ranks, as DDP
        and FSDP average over theirs, however the labelled tokens fall on the ranks.

        Args:
            losses: loss of each local token (``reduction="none"``).
            labels: the tokens' labels, -100 where a token has no loss.

        Collective: every rank of the group must call this.
        """
        labelled = labels != IGNORED
        local = torch.where(labelled, losses, 0.0).sum()
        total = torch.stack([local.detach(), labelled.sum().to(local.dtype)])
        dist.all_reduce(total, group=self.group)
        count = total[1].clamp(min=1)
        ours = local * self.mesh.size() / count
        return ours + (total[0] / count - ours).detach()

    def _padding(self, mask: torch.Tensor | None, length: int) -> torch.Tensor | None:
        """Mask of padding that attention has to apply; None without padding."""
        if mask is None or bool((mask != 0).all()):
            return None
        if self.method != "ulysses":
            raise PrepareError(
                "a batch with padding (attention_mask has zeros), which context-parallel attention would see; nearest: "
                "pad on the right, leave attention_mask out and label padding -100, which causal attention never reads"
            )
        if mask.shape[1:] != (length,):
            raise PrepareError(
                f"attention_mask of shape {tuple(mask.shape)}; expected (batch, {length}), zero where there is padding"
            )
        return mask

    def _check_positions(self, positions: torch.Tensor) -> None:
        if bool((positions.diff(dim=-1) != 1).any()):
            raise PrepareError(
                f"position_ids do not ascend by one: packed sequences, across whose boundaries {self.kind} attention "
                "would look; nearest: one sequence in each row"
            )


def _has_length(value: Any, length: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == length


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    """Labels one to the left; the last token has none."""
    shifted = torch.full_like(labels, IGNORED)
    shifted[:, :-1] = labels[:, 1:]
    return shifted
