"""Ulysses: every rank computes on a part of each sequence, and attention exchanges heads for tokens.

DeepSpeed's engine has no setting for sequence parallelism. For the engine all ranks are data-parallel: gradients are
averaged over all of them, and ZeRO shards over all of them. With the weights of the batches that average is the mean
over all tokens.
"""

import copy
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from accel_backends.ops.fqn import innermost
from accel_deepspeed.config.consistency import SEQUENCES, check_groups
from accel_deepspeed.ulysses.transformers_attention import SharedAttention, is_of_transformers
from accel_state.errors import BackendError, ConfigError, PrepareError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_state.session import Session


@final
class Sequences:
    """Sequence-parallel groups of a run: ``size`` neighbouring ranks each.

    Raises:
        ConfigError: the world size is not divisible by ``size``.
    """

    def __init__(self, session: "Session", size: int) -> None:
        check_groups(session.world_size, size, SEQUENCES)
        self.session, self.size = session, size
        self._group: ProcessGroup | None = None
        self._taken: dict[nn.Module, SharedAttention] = {}

    @property
    def group(self) -> "ProcessGroup | None":
        """Sequence-parallel group of this rank; None without sequence parallelism.

        Collective on the first read: every rank of the group must call this.
        """
        if self.size > 1 and self._group is None:
            from torch.distributed.device_mesh import init_device_mesh

            shape = (self.session.world_size // self.size, self.size)
            mesh = init_device_mesh(self.session.device.type, shape, mesh_dim_names=("dp", "sp"))
            self._group = mesh.get_group("sp")
        return self._group

    def check(self, model: nn.Module) -> None:
        """Refuses a model that would attend to this rank's part of a sequence only.

        Raises:
            PrepareError: the model has no attention that exchanges heads for tokens.
        """
        if self.size == 1:
            return
        from deepspeed.sequence.layer import DistributedAttention

        if is_of_transformers(innermost(model)):
            return
        if not any(isinstance(module, DistributedAttention) for module in model.modules()):
            raise PrepareError(
                f"sequence_parallel_size={self.size}, and nothing in this {type(model).__name__} attends over the "
                "parts of all ranks; give its attention to accelerator.backend.layout.sequence_attention, or to "
                "DeepSpeed's DistributedAttention with accelerator.backend.layout.sequence_group"
            )

    def take(self, model: nn.Module, group: "ProcessGroup | None", attention: str | None) -> None:
        """Makes a Transformers model attend over full sequences.

        Args:
            group: the sequence-parallel group; None: no sequence parallelism.
            attention: attention function of Transformers to use; None: the model's own.

        Raises:
            ConfigError: ``attention`` is given, and the model is not a Transformers model.
        """
        if group is None or model in self._taken:
            return
        if is_of_transformers(model):
            self._taken[model] = SharedAttention(model, group, attention)
        elif attention is not None:
            raise ConfigError(
                f"sp_attn_implementation={attention!r} names an attention of Transformers, and this "
                f"{type(model).__name__} is no model of theirs; leave it out"
            )

    def release(self, models: Iterable[nn.Module]) -> None:
        """Restores the attention of these models."""
        for model in models:
            if taken := self._taken.pop(model, None):
                taken.release()

    def forget(self) -> None:
        """Restores the attention of all models, and drops the group."""
        self.release(list(self._taken))
        self._group = None


@final
class SequenceAttention(nn.Module):
    """DeepSpeed's ``DistributedAttention`` around an attention function.

    Tensors are (samples, tokens, heads, head size).

    All ranks have equally many tokens. Inputs and outputs have this rank's tokens and all heads; the inner function
    receives all tokens and a part of the heads.
    """

    def __init__(self, attention: Callable[..., torch.Tensor], group: "ProcessGroup") -> None:
        super().__init__()
        from deepspeed.sequence.layer import DistributedAttention

        self.exchange = DistributedAttention(attention, group, scatter_idx=2, gather_idx=1)
        self.ranks = group.size()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Returns ``attention`` over full sequences, for this rank's tokens.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: the number of heads is not divisible by the number of ranks.
        """
        for what, heads in (("query", query.shape[2]), ("key", key.shape[2])):
            if heads % self.ranks:
                raise BackendError(
                    f"{heads} {what} heads do not divide among the {self.ranks} ranks that share a sequence; nearest: "
                    f"repeat them to {heads + -heads % self.ranks}, or a smaller sequence_parallel_size"
                )
        result: torch.Tensor = self.exchange(query, key, value, 0, None, *args, **kwargs)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> "SequenceAttention":
        """Copies the attention function, but not the process group."""
        return SequenceAttention(copy.deepcopy(self.exchange.local_attn, memo), self.exchange.spg)
