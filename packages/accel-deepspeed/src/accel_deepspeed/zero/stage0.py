"""Accumulated gradients of a stage 0 engine, which are in ``parameter.grad``."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, final

import torch
from torch import nn

from accel_deepspeed.tensor_parallel.shards import full_of_shard, is_cut
from accel_deepspeed.zero.gradients import Gradients
from accel_deepspeed.zero.partitions import Partitions


@final
class FullGradients(Gradients):
    """Stage 0: full gradients in the parameters, averaged over ranks by an all-reduce.

    The average of an average and later gradients is the average of all, so reduced gradients can accumulate further.
    """

    keeps: ClassVar[bool] = True
    spread: ClassVar[bool] = False

    def __init__(self, engine: Any, partitions: Partitions | None) -> None:
        super().__init__(engine, partitions)
        self._absent: list[nn.Parameter] = []

    def reduce(self) -> None:
        """All-reduces by dtype; parameters without a gradient on any rank get none, where DeepSpeed sets zeros."""
        self.presence.add(one for one in self.parameters.values() if one.grad is not None)
        self.at_boundary(True)
        self.engine.allreduce_gradients()
        self._absent = super().absent()
        for parameter in self._absent:
            parameter.grad = None

    def absent(self) -> list[nn.Parameter]:
        """Returns the parameters that ``reduce`` found without a gradient on any rank."""
        return self._absent

    def reopen(self) -> None:
        """Does nothing: averaged gradients are equal on all ranks."""

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiplies the loss by the fp16 loss scale, because the engine only divides gradients by the scale."""
        record = self._loss_scale
        return loss if record is None else loss.float() * record.cur_scale

    def step(self) -> bool:
        """Runs the engine's step, and lets the loss scale grow afterwards.

        DeepSpeed would grow the scale before it divides the gradients, which carry the previous scale.
        """
        record = self._loss_scale
        if record is None or not record.dynamic_loss_scale:
            return super().step()
        window, record.scale_window = record.scale_window, sys.maxsize
        try:
            applied = super().step()
        finally:
            record.scale_window = window
        stable = record.cur_iter - record.last_overflow_iter - 2  # steps before this one
        if applied and stable > 0 and stable % window == 0:
            record.cur_scale *= record.scale_factor
        return applied

    @property
    def _loss_scale(self) -> Any:
        """DeepSpeed's record of the loss scale; None without a loss scale."""
        record = getattr(self.optimizer, "loss_scale_config", None)
        return record if record is not None and record.use_grad_scaling else None

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scales the gradients at once if there is no DeepSpeed optimizer that clips in its step."""
        if hasattr(self.optimizer, "clip_grad"):
            super().clip(max_norm, norm)
            return
        nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, norm)
        self._done = self.engine, "clip_fp32_gradients", lambda: None

    def held(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Returns full gradients: this rank's unreduced ones, or the mean after the reduction."""
        return {name: full_of_shard(p, p.grad.detach().clone()) for name, p in parameters.items() if p.grad is not None}

    def begin(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        parameter.grad = gradient.to(parameter.dtype)

    def on_device(self) -> list[torch.Tensor]:
        return list(self.pending())

    def pending(self) -> Iterable[torch.Tensor]:
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def parts(self) -> dict[int, torch.Tensor]:
        return {key: one.grad for key, one in self.parameters.items() if one.grad is not None}

    def scaled_norm(self) -> Any:
        """Returns the norm of all gradients, which are replicated, or sharded with AutoTP."""
        return self._norm_of_all().nan_to_num_(torch.inf, torch.inf)

    def _norm_of_all(self) -> torch.Tensor:
        found = [one for one in self.parameters.values() if one.grad is not None]
        if self.engine.autotp_size() <= 1:
            return nn.utils.get_total_norm([one.grad.float() for one in found if one.grad is not None])
        import torch.distributed as dist
        from deepspeed.utils import groups

        group = groups.get_tensor_model_parallel_group()
        counted = [one for one in found if is_cut(one) or group.rank() == 0]
        norm = nn.utils.get_total_norm([one.grad.float() for one in counted if one.grad is not None])
        square = norm.to(self.engine.device).square()
        dist.all_reduce(square, group=group)
        return square.sqrt()

    def discard(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        self.stepped()
