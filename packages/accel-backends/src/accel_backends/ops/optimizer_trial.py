"""Trials of other libraries' optimizers on small shards, before any change to the model."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.ops.dtensor import gathered, sharded_like
from accel_backends.ops.optimizer_support import (
    OptimizerTrial,
    agree_closely,
    is_torchs,
    steps_by_element,
    tried_by_element,
)
from accel_state.errors import PrepareError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_on_shards(optimizers: Iterable[Optimizer], mesh: "DeviceMesh", *, offload: bool) -> None:
    """Refuses optimizers that fail on DTensor shards, or update them otherwise than full parameters.

    torch's own optimizers are looked up (``optimizer_support``). An optimizer that cannot be tried is accepted, because
    a DTensor operation either computes as on the full tensor or raises.

    Collective: every rank of the group must call this.

    Raises:
        PrepareError: the same on every rank, with the nearest alternative.
    """
    for optimizer in optimizers:
        if is_torchs(optimizer):
            continue
        device = "cpu" if offload else mesh.device_type
        trial = OptimizerTrial.of(optimizer, device, rows=2 * mesh.size())
        with trial.leaves_random_numbers():
            problem = _problem(trial, mesh, offload=offload)
        if problem is not None:
            nearest = "fsdp_version=1, or " if steps_by_element(optimizer, device) else ""
            raise PrepareError(
                f"{type(optimizer).__name__} {problem}, of which fsdp_version=2 leaves every rank a part; nearest: "
                f"AdamW, or {nearest}strategy='ddp'"
            )


def check_on_pieces(optimizers: Iterable[Optimizer], sharded: Mapping[int, Any], device: torch.device | str) -> None:
    """Refuses optimizers not shown to update slices of flat parameters as they update full parameters.

    Args:
        sharded: by id, the parameters that will be sharded.
        device: where the optimizers step.

    Raises:
        PrepareError: with the nearest alternative.
    """
    for optimizer in optimizers:
        if not holds_any(optimizer, sharded) or (by_element := tried_by_element(optimizer, device)):
            continue
        reason = "looks at full parameters" if by_element is False else "could not be tried on pieces of parameters"
        raise PrepareError(
            f"{type(optimizer).__name__} {reason}, and fsdp_version=1 leaves every rank flat pieces of them, on which "
            "it might train otherwise without a sign; nearest: AdamW, or fsdp_version=2, or strategy='ddp'"
        )


def holds_any(optimizer: Optimizer, parameters: Mapping[int, Any]) -> bool:
    """Whether the optimizer updates any of ``parameters``, which are given by id."""
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])


def _problem(trial: OptimizerTrial, mesh: "DeviceMesh", *, offload: bool) -> str | None:
    """Returns how the trial on shards fails, as text; None if it passes."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    expected = trial.expected()
    if expected is None:
        return None
    holder = nn.Module()
    for name, value in zip(("matrix", "vector"), trial.values, strict=True):
        holder.register_parameter(name, nn.Parameter(value.to(mesh.device_type, copy=True)))
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    fully_shard(holder, mesh=mesh, offload_policy=policy)
    parameters = list(holder.parameters())
    gradients = [list(map(sharded_like, step, parameters)) for step in trial.gradients]
    try:
        found = trial.step(parameters, gradients)
        together = agree_closely(expected, [gathered(one).to(expected[0].device) for one in found])
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0][:200]
        return f"fails on sharded parameters ({type(error).__name__}: {said})"
    return None if together else "updates sharded parameters otherwise than whole ones"
