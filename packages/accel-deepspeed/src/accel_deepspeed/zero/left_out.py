"""Parameters without a gradient on any rank, which a step leaves unchanged, as torch's optimizers do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_deepspeed.zero.partitions import Partition, Partitions
from accel_state.errors import BackendError

STEP = "step"


@final
@dataclass(frozen=True, slots=True)
class Kept:
    """Values of a parameter's slice before a step: weights, and elementwise states by key."""

    part: Partition
    weights: torch.Tensor
    states: dict[str, torch.Tensor]


@final
class LeftOut:
    """Steps of an engine that leave weights and states of absent parameters as they are.

    DeepSpeed steps them with zeros for gradients, so that weight decay and momentum would change them.

    Args:
        optimizer: the engine's torch optimizer.
        parts: partitions of the parameters in the flat tensors, and the number of steps that each parameter is behind.
    """

    def __init__(self, optimizer: Optimizer, parts: Partitions) -> None:
        self._optimizer, self._parts = optimizer, parts
        self._absent: dict[int, list[Partition]] = {}
        self._kept: list[Kept] = []
        self._counts = False

    @contextmanager
    def around(self, absent: Sequence[nn.Parameter]) -> Iterator[None]:
        """Context of the engine's step.

        Raises:
            BackendError: a parameter that was absent before, and an optimizer that counts the steps of all together.
        """
        behind = self._parts.behind
        late = behind.keys() - set(absent)
        if late:
            raise BackendError(
                f"{len(late)} parameters get gradients again that had none on any rank in a step before, and under "
                f"ZeRO {type(self._optimizer).__name__} counts the steps of all parameters together; nearest: "
                "strategy='fsdp' or 'ddp', or SGD, which counts none"
            )
        if not absent:
            yield
            return
        self._absent.clear()
        for part in map(self._parts.part, absent):
            if part.size and part.flat is not None:
                self._absent.setdefault(id(part.flat), []).append(part)
        self._counts = stepped = False
        handles = [
            self._optimizer.register_step_pre_hook(self._keep),
            self._optimizer.register_step_post_hook(self._restore),
        ]
        try:
            yield
            stepped = True
        finally:
            for handle in handles:
                handle.remove()
            self._kept.clear()
        if stepped and self._counts:
            for parameter in absent:
                behind[parameter] = behind.get(parameter, 0) + 1

    def _keep(self, optimizer: Optimizer, *_: object) -> None:
        for flat in (one for group in optimizer.param_groups for one in group["params"]):
            state = optimizer.state.get(flat, {})
            for part in self._absent.get(id(flat), ()):
                states = {key: part.of(value).clone() for key, value in state.items() if _is_spread(value, flat)}
                self._kept.append(Kept(part, part.of(flat).clone(), states))

    @torch.no_grad()
    def _restore(self, optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            self._counts |= STEP in group
            for flat in group["params"]:
                held = [value for value in optimizer.state.get(flat, {}).values() if value is not None]
                self._counts |= not all(_is_spread(value, flat) for value in held)
        for kept in self._kept:
            part = kept.part
            assert part.flat is not None
            part.of(part.flat).copy_(kept.weights)
            for key, value in optimizer.state[part.flat].items():
                if _is_spread(value, part.flat) and key in kept.states:
                    part.of(value).copy_(kept.states[key])
                elif _is_spread(value, part.flat):
                    part.of(value).zero_()
        self._kept.clear()


def _is_spread(value: object, flat: torch.Tensor) -> bool:
    """Whether a state is elementwise."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == flat.numel()
