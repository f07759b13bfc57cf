"""Pipeline parallelism: consecutive blocks of a model are on different ranks of one mesh axis.

Micro-batches flow through the stages by the schedules of ``torch.distributed.pipelining``: GPipe (Huang et al. 2018,
arXiv:1811.06965), all forwards and then all backwards, or 1F1B (Narayanan et al. 2021, arXiv:2104.04473), which holds
the activations of fewer micro-batches.
"""

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from accel_backends.parallel.stages import Stage, cut_stage
from accel_state.errors import ConfigError, PrepareError

SCHEDULES: Mapping[str, type[PipelineScheduleSingle]] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@final
class Pipeline:
    """A model split into the stages of a pipeline, of which this rank has one.

    ``run(inputs, target)`` computes the forwards and backwards of all micro-batches, and returns the mean of their
    losses. Parameters of other stages are gone from ``model`` on this rank; the others keep their names, so that the
    ranks' state dicts together are that of one process.

    Args:
        model: a causal language model of transformers (see :func:`cut_stage`), the same on every rank. It is changed.
        mesh: mesh with one axis, one rank for each stage.
        loss: mean loss of logits and target of one micro-batch.
        num_microbatches: number of equal micro-batches of a batch.
        schedule: ``"1f1b"`` or ``"gpipe"``.

    Raises:
        ConfigError: a schedule that does not exist.
        PrepareError: on every rank and before any change, a model that cannot be split.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        loss: Loss,
        *,
        num_microbatches: int,
        schedule: str = "1f1b",
    ) -> None:
        if schedule not in SCHEDULES:
            raise ConfigError(f"no pipeline schedule {schedule!r}; schedules: {', '.join(SCHEDULES)}")
        if mesh.ndim != 1:
            raise PrepareError(
                f"a pipeline over a mesh of {mesh.ndim} axes {mesh.mesh_dim_names}; nearest: mesh['pp'], its one axis"
            )
        if num_microbatches < mesh.size() and schedule == "1f1b":
            raise ConfigError(
                f"{num_microbatches} micro-batches for a pipeline of {mesh.size()} stages; nearest: num_microbatches="
                f'{mesh.size()}, or schedule="gpipe"'
            )
        self.num_microbatches = num_microbatches
        self.stage: Stage = cut_stage(model, mesh.get_local_rank(), mesh.size())
        self._device = next(self.stage.parameters()).device
        self._group, self._size = mesh.get_group(), mesh.size()
        self._tie = _tie_group(self.stage, mesh)
        # torch's own scaling would divide the gradients of earlier micro-batches of an accumulation window again.
        self._schedule = SCHEDULES[schedule](
            PipelineStage(self.stage, mesh.get_local_rank(), mesh.size(), self._device, group=self._group),
            num_microbatches,
            loss_fn=lambda output, target: loss(output, target) / num_microbatches,
            scale_grads=False,
        )

    def run(self, inputs: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
        """Runs the schedule on one batch; gradients are added to those that are there.

        Every rank has to pass the same batch. ``options`` are keyword arguments of the model for each stage (position
        ids), split along their first dim.

        Returns:
            The mean loss of the micro-batches, in fp64 and without graph, on every rank.

        Raises:
            PrepareError: the batch does not divide into micro-batches.

        Collective: every rank of the mesh must call this.
        """
        if inputs.shape[0] % self.num_microbatches:
            raise PrepareError(
                f"a batch of {inputs.shape[0]} samples does not divide into {self.num_microbatches} micro-batches"
            )
        earlier = self._set_aside_tied_gradient()
        losses: list[torch.Tensor] = []
        given = (inputs,) if self.stage.first else ()
        if self.stage.last:
            self._schedule.step(*given, target=target, losses=losses, **options)
        else:
            self._schedule.step(*given, **options)
        self._sum_tied_gradient(earlier)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if losses:
            total += torch.stack(losses).detach().sum()
        dist.broadcast(total, group=self._group, group_src=self._size - 1)
        return total

    def _set_aside_tied_gradient(self) -> torch.Tensor | None:
        if self._tie is None or self.stage.tied is None:
            return None
        earlier, self.stage.tied.grad = self.stage.tied.grad, None
        return earlier

    def _sum_tied_gradient(self, earlier: torch.Tensor | None) -> None:
        """Sums the tied weight's gradient of this batch over the first and the last stage."""
        tied = self.stage.tied
        if self._tie is None or tied is None:
            return
        if tied.grad is None:
            tied.grad = torch.zeros_like(tied)
        dist.all_reduce(tied.grad, group=self._tie)
        if earlier is not None:
            tied.grad += earlier


def _tie_group(stage: Stage, mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Group of the first and the last stage, if they share a weight and this rank has one of them."""
    if not stage.is_tied or mesh.size() == 1:
        return None
    ranks = dist.get_process_group_ranks(mesh.get_group())
    if dist.get_rank() not in (ranks[0], ranks[-1]):
        return None
    group: dist.ProcessGroup = dist.new_group([ranks[0], ranks[-1]], use_local_synchronization=True)
    return group
