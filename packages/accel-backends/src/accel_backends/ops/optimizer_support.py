"""Support of optimizers on shards of parameters: torch's own by a table, others by a trial on small shards."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.ops.dtensor import gathered, sharded_like
from accel_state.errors import PrepareError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: torch's optimizers that fail, or update otherwise than on full parameters, on the shards of each backend: DTensors
#: with ``fsdp``, slices of flat tensors with ``fsdp1`` and ``deepspeed``.
BEYOND_ELEMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fsdp": ("Adafactor", "Rprop"),
        "fsdp1": ("Adafactor", "LBFGS", "Muon"),
        "deepspeed": ("Adafactor", "LBFGS", "Muon"),
    }
)
# torch's optimizers with a DeepSpeed version for the host: module, class, and builder of the compiled op.
ON_HOST = {
    "Adam": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", "CPUAdamBuilder"),
    "AdamW": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", "CPUAdamBuilder"),
    "Adagrad": ("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad", "CPUAdagradBuilder"),
}
#: torch's optimizers whose fused steps do not support DTensors.
FUSED_ON_FULL = (torch.optim.SGD, torch.optim.Adagrad)
_TORCHS = "torch.optim"
_STEPS = 2


def beyond_elements(optimizer: Optimizer, backend: str) -> str | None:
    """Returns the name of the optimizer's torch class if that class cannot step on the backend's shards."""
    torchs = {base.__name__ for base in type(optimizer).__mro__ if base.__module__.startswith(_TORCHS)}
    return next((name for name in BEYOND_ELEMENTS[backend] if name in torchs), None)


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether the optimizer's class is torch's own; ``BEYOND_ELEMENTS`` is complete for these."""
    return type(optimizer).__module__.startswith(_TORCHS)


def steps_by_element(optimizer: Optimizer, device: torch.device | str = "cpu") -> bool:
    """Whether an optimizer updates slices of flat tensors as it updates full tensors.

    True if a trial is not possible.
    """
    return tried_by_element(optimizer, device) is not False


def tried_by_element(optimizer: Optimizer, device: torch.device | str = "cpu") -> bool | None:
    """Whether an optimizer updates slices of flat tensors, on several ranks, as it updates full ones; None: unknown.

    torch's own optimizers are looked up; another optimizer's class and options are tried on small parameters. Unknown
    are optimizers that cannot be constructed so, that need more than gradients, or that are not deterministic.

    ``device``: where the parameters train, because kernels of some optimizers exist for GPUs only.
    """
    if is_torchs(optimizer):
        return beyond_elements(optimizer, "deepspeed") is None
    trial = OptimizerTrial.of(optimizer, device)
    with trial.leaves_random_numbers():
        full = trial.expected()
        if full is None:
            return None
        (matrix, vector), gradients = trial.values, trial.gradients
        cut = 9
        ranks = [
            trial.stepped([matrix.flatten()[:cut]], [[one.flatten()[:cut]] for one, _ in gradients]),
            trial.stepped([matrix.flatten()[cut:], vector], [[one.flatten()[cut:], other] for one, other in gradients]),
        ]
    return all(part is not None for part in ranks) and agree_closely(
        full, [tensor for part in ranks if part is not None for tensor in part]
    )


@final
@dataclass(frozen=True, slots=True)
class OptimizerTrial:
    """A few steps of an optimizer's class and options on a small matrix and a vector.

    Attributes:
        values: parameters before the first step.
        gradients: for each step, one gradient for each parameter.
    """

    kind: type[Optimizer]
    options: Mapping[str, Any]
    values: Sequence[torch.Tensor]
    gradients: Sequence[Sequence[torch.Tensor]]

    @classmethod
    def of(cls, optimizer: Optimizer, device: torch.device | str, rows: int = 4) -> "OptimizerTrial":
        """Creates the trial of an optimizer; ``rows``: rows of the matrix, and elements of the vector."""
        group = optimizer.param_groups[0]
        options = {key: value for key, value in group.items() if key in optimizer.defaults}
        generator = torch.Generator().manual_seed(0)
        values, *gradients = (
            [torch.randn(shape, generator=generator).to(device) for shape in ((rows, 6), (rows,))]
            for _ in range(_STEPS + 1)
        )
        return cls(type(optimizer), options, values, gradients)

    def leaves_random_numbers(self) -> AbstractContextManager[None]:
        """Context that restores the global random generators on exit."""
        device = self.values[0].device
        if device.type == "cpu":
            return torch.random.fork_rng([])
        return torch.random.fork_rng([device], device_type=device.type)

    def expected(self) -> list[torch.Tensor] | None:
        """Returns the parameters after the steps; None if unknown, see ``tried_by_element``."""
        full, again = (self.stepped(self.values, self.gradients) for _ in range(2))
        return full if full is not None and again is not None and all(map(torch.equal, full, again)) else None

    def stepped(
        self, values: Sequence[torch.Tensor], gradients: Sequence[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor] | None:
        """Returns the parameters after steps with these gradients.

        None if constructing or stepping the optimizer fails.
        """
        try:
            return self.step([nn.Parameter(value.clone()) for value in values], gradients)
        except Exception:
            return None

    def step(self, parameters: list[nn.Parameter], gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Constructs the optimizer and steps; exceptions of the optimizer pass through."""
        optimizer = self.kind(parameters, **self.options)
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        return [parameter.detach() for parameter in parameters]


def agree_closely(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether two lists hold the same elements up to rounding, whatever the shapes of their tensors."""
    first, second = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (one, other))
    return torch.allclose(first, second, rtol=1e-4, atol=1e-6)


def check_on_shards(optimizers: Iterable[Optimizer], mesh: "DeviceMesh", *, offload: bool) -> None:
    """Refuses optimizers that fail on DTensor shards, or update them otherwise than full parameters.

    torch's own optimizers are looked up (``BEYOND_ELEMENTS``). An optimizer that cannot be tried is accepted, because
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
    return None if together else "updates sharded parameters differently from full ones"


def check_state(kind: str, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
    """Refuses optimizer state that is not of the shape of its parameter, as which it would be sharded.

    Raises:
        PrepareError: with the name of the state.
    """
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != parameter.shape:
            raise PrepareError(
                f"{kind} holds {key} of shape {tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}, "
                "which cannot be split as the parameter is; prepare the optimizer before its first step"
            )
