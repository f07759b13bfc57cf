"""Optimizers that look beyond single elements, with which ranks that hold a part of each parameter cannot step."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

#: torch's optimizers that, on the parts that a backend leaves every rank, fail or step elsewhere than on whole
#: parameters. ``fsdp`` has shards that know of the whole, ``fsdp1`` and ``deepspeed`` pieces of flat tensors.
BEYOND_ELEMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fsdp": ("Adafactor", "Rprop"),
        "fsdp1": ("Adafactor", "LBFGS", "Muon"),
        "deepspeed": ("Adafactor", "LBFGS", "Muon"),
    }
)
# Optimizers of torch that DeepSpeed has for the host: module and class there, and the operation to be compiled.
ON_HOST = {
    "Adam": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", "CPUAdamBuilder"),
    "AdamW": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", "CPUAdamBuilder"),
    "Adagrad": ("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad", "CPUAdagradBuilder"),
}
_TORCHS = "torch.optim"
_STEPS = 2


def beyond_elements(optimizer: Optimizer, backend: str) -> str | None:
    """The name of torch's optimizer that this one is, or is made of, if parts of that backend are not enough for it."""
    torchs = {base.__name__ for base in type(optimizer).__mro__ if base.__module__.startswith(_TORCHS)}
    return next((name for name in BEYOND_ELEMENTS[backend] if name in torchs), None)


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's own, for which ``BEYOND_ELEMENTS`` is complete."""
    return type(optimizer).__module__.startswith(_TORCHS)


def steps_by_element(optimizer: Optimizer, device: torch.device | str = "cpu") -> bool:
    """Whether an optimizer updates pieces of flat tensors as it updates the whole ones; True if it cannot be tried."""
    return tried_by_element(optimizer, device) is not False


def tried_by_element(optimizer: Optimizer, device: torch.device | str = "cpu") -> bool | None:
    """Whether an optimizer updates pieces of flat tensors, on several ranks, as it updates whole ones; None: unknown.

    torch's own are known; of others, some are made of the same class and options for small parameters. Unknown are
    those that cannot be made so, that need more than gradients, or that do not do the same twice.

    ``device``: where the parameters train; kernels of some optimizers are for GPUs only.
    """
    if is_torchs(optimizer):
        return beyond_elements(optimizer, "deepspeed") is None
    trial = OptimizerTrial.of(optimizer, device)
    with trial.leaves_random_numbers():
        whole = trial.expected()
        if whole is None:
            return None
        (matrix, vector), gradients = trial.values, trial.gradients
        cut = 9
        ranks = [
            trial.stepped([matrix.flatten()[:cut]], [[one.flatten()[:cut]] for one, _ in gradients]),
            trial.stepped([matrix.flatten()[cut:], vector], [[one.flatten()[cut:], other] for one, other in gradients]),
        ]
    return all(part is not None for part in ranks) and agree_closely(
        whole, [tensor for part in ranks if part is not None for tensor in part]
    )


@final
@dataclass(frozen=True, slots=True)
class OptimizerTrial:
    """A few steps of an optimizer's class and options on a small matrix and a vector.

    Attributes:
        values: the parameters before the first step.
        gradients: of each step, one for each parameter.
    """

    kind: type[Optimizer]
    options: Mapping[str, Any]
    values: Sequence[torch.Tensor]
    gradients: Sequence[Sequence[torch.Tensor]]

    @classmethod
    def of(cls, optimizer: Optimizer, device: torch.device | str, rows: int = 4) -> "OptimizerTrial":
        """The trial of an optimizer like this one; ``rows``: of the matrix, and elements of the vector."""
        group = optimizer.param_groups[0]
        options = {key: value for key, value in group.items() if key in optimizer.defaults}
        generator = torch.Generator().manual_seed(0)
        values, *gradients = (
            [torch.randn(shape, generator=generator).to(device) for shape in ((rows, 6), (rows,))]
            for _ in range(_STEPS + 1)
        )
        return cls(type(optimizer), options, values, gradients)

    def leaves_random_numbers(self) -> AbstractContextManager[None]:
        """Within it, random numbers are drawn that the program's own generators do not count."""
        device = self.values[0].device
        if device.type == "cpu":
            return torch.random.fork_rng([])
        return torch.random.fork_rng([device], device_type=device.type)

    def expected(self) -> list[torch.Tensor] | None:
        """The parameters after the steps; None if that cannot be found out, see ``tried_by_element``."""
        whole, again = (self.stepped(self.values, self.gradients) for _ in range(2))
        return whole if whole is not None and again is not None and all(map(torch.equal, whole, again)) else None

    def stepped(
        self, values: Sequence[torch.Tensor], gradients: Sequence[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor] | None:
        """These parameters after steps with these gradients; None if such an optimizer does not take them."""
        try:
            return self.step([nn.Parameter(value.clone()) for value in values], gradients)
        except Exception:
            return None

    def step(self, parameters: list[nn.Parameter], gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Makes the optimizer for the parameters and steps; raises what it raises."""
        optimizer = self.kind(parameters, **self.options)
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        return [parameter.detach() for parameter in parameters]


def agree_closely(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether two lists hold the same numbers up to rounding, whatever the shapes of their tensors."""
    first, second = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (one, other))
    return torch.allclose(first, second, rtol=1e-4, atol=1e-6)
