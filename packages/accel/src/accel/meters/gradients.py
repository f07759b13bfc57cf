"""The gradients of the step that was taken last: looked at only if something was wrong with it."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch


@final
class StepGradients:
    """Keeps the gradients that an optimizer steps with until the step is over, to compare their norms with others.

    Loops clear gradients before anybody has looked at the loss. Nothing is computed or copied when a step is taken: the
    tensors are held on to, and let go of when the step has been looked at, or when the next one is taken.

    Args:
        names: the parameters that are looked at, by name. Of sharded ones, what is here counts.
        optimizers: those of torch's kind tell when they step.
    """

    def __init__(self, names: Mapping[str, torch.Tensor], optimizers: Iterable[object]) -> None:
        self._parameters = dict(names)
        self._held: dict[int, torch.Tensor] = {}
        self._usual: dict[str, torch.Tensor] = {}
        self._handles = [
            optimizer.register_step_pre_hook(self._keep)
            for optimizer in optimizers
            if isinstance(optimizer, torch.optim.Optimizer)
        ]

    def _keep(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._held[id(parameter)] = parameter.grad

    def forget(self) -> None:
        """The step is over."""
        self._held.clear()

    def note(self) -> None:
        """What is there now is usual; nothing waits for a device."""
        self._usual = self._norms() or self._usual

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Inside, parameters whose gradients were cleared have them again."""
        cleared = [one for one in self._parameters.values() if one.grad is None and id(one) in self._held]
        for parameter in cleared:
            parameter.grad = self._held[id(parameter)]
        try:
            yield
        finally:
            for parameter in cleared:
                parameter.grad = None

    def grown(self, count: int = 3) -> str:
        """The parameters whose gradients' norms grew most since ``note``, and how many times; waits for devices."""
        usual = self._usual
        norms = {name: float(norm) for name, norm in self._norms().items() if name in usual}
        times = {name: norm / max(float(usual[name]), 1e-30) for name, norm in norms.items()}
        worst = sorted(times, key=lambda name: -times[name])[:count]
        return ", ".join(f"{name} (x {times[name]:.3g})" for name in worst)

    def _norms(self) -> dict[str, torch.Tensor]:
        with self.put_back():
            found = {name: _local(one.grad) for name, one in self._parameters.items() if one.grad is not None}
        return dict(zip(found, torch._foreach_norm(list(found.values())), strict=True)) if found else {}

    def remove(self) -> None:
        """Stops looking."""
        for handle in self._handles:
            handle.remove()
        self.forget()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)
    own: torch.Tensor = tensor.detach() if to_local is None else to_local().detach()
    return own.coalesce().values() if own.is_sparse else own
