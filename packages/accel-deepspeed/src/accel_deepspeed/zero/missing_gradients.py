"""Parameters without a gradient on any rank, which a step leaves unchanged, as torch's optimizers do."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_deepspeed.zero.partitions import Partition, Partitions
from accel_state.errors import BackendError

STEP = "step"


@final
class Presence:
    """Record of the parameters that have received a gradient since the last step.

    Args:
        parameters: trainable parameters, in the same order on every rank.
        device: device of the vectors that are all-reduced.

    Attributes:
        received: ids of the parameters that have received a gradient on this rank.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._parameters = parameters
        self._ones = torch.ones(len(parameters), device=device)
        self._known = frozenset(map(id, parameters))
        self.received: set[int] = set()

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Records parameters that have received a gradient."""
        self.received.update(self._known.intersection(map(id, parameters)))

    def here(self) -> torch.Tensor:
        """Returns a vector with 1 for each parameter with a gradient on this rank, and 0 for others."""
        if len(self.received) == len(self._parameters):
            return self._ones
        return self._ones.new_tensor([id(parameter) in self.received for parameter in self._parameters])

    def absent(self, everywhere: torch.Tensor | None) -> list[nn.Parameter]:
        """Returns parameters without a gradient on any rank.

        ``everywhere``: sum of ``here`` over ranks, None for one rank.
        """
        if len(self.received) == len(self._parameters):
            return []
        counts = [0.0] * len(self._parameters) if everywhere is None else everywhere.tolist()
        pairs = zip(self._parameters, counts, strict=True)
        return [parameter for parameter, count in pairs if not count and id(parameter) not in self.received]


@final
@dataclass(frozen=True, slots=True)
class Kept:
    """Values of a parameter's partition before a step.

    Attributes:
        part: the partition.
        behind: number of steps that the parameter has missed; None if it misses this step too.
        group: options of its param group.
        weights: copy of the weights.
        states: copies of the elementwise states.
        counts: step counters of the flat tensor.
    """

    part: Partition
    behind: int | None
    group: dict[str, Any]
    weights: torch.Tensor
    states: dict[str, torch.Tensor]
    counts: dict[str, Any]


@final
class LeftOut:
    """Steps the flat tensors of an engine as if each parameter were a separate tensor of the optimizer.

    Weights and states of absent parameters are restored after the step. An optimizer with step counters has one counter
    for a flat tensor, so a parameter that was absent in an earlier step is stepped separately, with its own counter.

    Args:
        optimizer: the engine's torch optimizer.
        parts: partitions of the parameters in the flat tensors, and the number of steps that each parameter is behind.
    """

    def __init__(self, optimizer: Optimizer, parts: Partitions) -> None:
        self._optimizer, self._parts = optimizer, parts
        self._pieces: dict[int, list[tuple[Partition, int | None]]] = {}
        self._kept: list[Kept] = []
        self._alone = self._counts = self._stepped = False

    @contextmanager
    def around(self, absent: Sequence[nn.Parameter]) -> Iterator[None]:
        """Context of the engine's step.

        Raises:
            BackendError: a parameter that was absent before, and an optimizer with a counter other than ``step``.
        """
        behind = self._parts.behind
        if not absent and not behind:
            yield
            return
        left = dict.fromkeys(absent)
        late = {parameter: steps for parameter, steps in behind.items() if parameter not in left}
        if late:
            self._check_counts(len(late))
        self._pieces.clear()
        for parameter, steps in (*left.items(), *late.items()):
            part = self._parts.part(parameter)
            if part.size and part.flat is not None:
                self._pieces.setdefault(id(part.flat), []).append((part, steps))
        self._stepped = False
        before = self._optimizer.register_step_pre_hook(self._keep)
        after = self._optimizer.register_step_post_hook(self._restore)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self._kept.clear()
        if self._stepped and self._counts:
            for parameter in absent:
                behind[parameter] = behind.get(parameter, 0) + 1

    def _check_counts(self, late: int) -> None:
        for flat, state in self._optimizer.state.items():
            other = {key for key, value in state.items() if not _is_spread(value, flat)} - {STEP}
            if other:
                raise BackendError(
                    f"{late} parameters get gradients again that had none on any rank in a step before, and "
                    f"{type(self._optimizer).__name__} keeps {', '.join(sorted(other))} of all parameters together "
                    "under ZeRO; put them into a parameter group of their own, or use AdamW or strategy='fsdp'"
                )

    def _keep(self, optimizer: Optimizer, *_: object) -> None:
        if self._alone:
            return
        self._stepped = True
        for group in optimizer.param_groups:
            for flat in group["params"]:
                state = optimizer.state.get(flat, {})
                counts = {key: _copy(value) for key, value in state.items() if not _is_spread(value, flat)}
                for part, behind in self._pieces.get(id(flat), ()):
                    states = {key: part.of(value).clone() for key, value in state.items() if key not in counts}
                    own = {key: value for key, value in group.items() if key != "params"}
                    self._kept.append(Kept(part, behind, own, part.of(flat).clone(), states, counts))

    def _restore(self, optimizer: Optimizer, *_: object) -> None:
        if self._alone:
            return
        for group in optimizer.param_groups:
            self._counts |= STEP in group or any(STEP in optimizer.state.get(flat, ()) for flat in group["params"])
        for kept in self._kept:
            part = kept.part
            assert part.flat is not None
            with torch.no_grad():
                part.of(part.flat).copy_(kept.weights)
                for key, value in optimizer.state[part.flat].items():
                    if _is_spread(value, part.flat) and key in kept.states:
                        part.of(value).copy_(kept.states[key])
                    elif _is_spread(value, part.flat):
                        part.of(value).zero_()
            if kept.behind is not None:
                self._step_alone(optimizer, kept, kept.behind)
        self._kept.clear()

    def _step_alone(self, optimizer: Optimizer, kept: Kept, behind: int) -> None:
        """Steps a slice with its own step counter."""
        part = kept.part
        assert part.flat is not None
        assert part.flat.grad is not None
        view = nn.Parameter(part.of(part.flat))
        view.grad = part.of(part.flat.grad)
        spread = {key: part.of(optimizer.state[part.flat][key]) for key in kept.states}
        optimizer.state[view] = spread | {key: value - behind for key, value in kept.counts.items()}
        groups = optimizer.param_groups
        own = {**kept.group, "params": [view]}
        if STEP in own:
            own[STEP] -= behind
        optimizer.param_groups = [own]
        self._alone = True
        try:
            optimizer.step()
        finally:
            self._alone = False
            optimizer.param_groups = groups
            del optimizer.state[view]


def _is_spread(value: object, flat: torch.Tensor) -> bool:
    """Whether a state is elementwise."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == flat.numel()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
