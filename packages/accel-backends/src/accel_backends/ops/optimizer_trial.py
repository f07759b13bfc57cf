"""Trials of other libraries' optimizers on small shards, before anything is changed."""

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
    """Refuses optimizers that fail on shards, or step otherwise than on full parameters; collective.

    torch's own are known (``elementwise``). One that cannot be tried is accepted, because a DTensor either computes an
    operation as on the full tensor or raises.

    Raises:
        PrepareError: on every rank the same, with the nearest that works.
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
    """Refuses optimizers that are not shown to update flat pieces of parameters as they update whole ones.

    Args:
        sharded: parameters by id that are going to be sharded.
        device: where they are stepped.

    Raises:
        PrepareError: with the nearest that works.
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
    """Whether the optimizer updates any of the parameters, by id."""
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])


def _problem(trial: OptimizerTrial, mesh: "DeviceMesh", *, offload: bool) -> str | None:
    """How the trial on shards fails; None if it does not."""
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
