"""Parameters without a gradient on any rank: the optimizer of an engine leaves them as they are, as torch's do."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_deepspeed.zero.partitions import Partition, Partitions
from accel_state.errors import BackendError

STEP = "step"


@final
class Presence:
    """Which parameters have received a gradient since the last step.

    Args:
        parameters: those that train, in an order that is every rank's.
        device: of the vectors that ranks add up.

    Attributes:
        received: ids of those that have received one on this rank.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._parameters = parameters
        self._ones = torch.ones(len(parameters), device=device)
        self._known = frozenset(map(id, parameters))
        self.received: set[int] = set()

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Notes parameters that have received one."""
        self.received.update(self._known.intersection(map(id, parameters)))

    def here(self) -> torch.Tensor:
        """1 for each that has one on this rank, 0 for the others."""
        if len(self.received) == len(self._parameters):
            return self._ones
        return self._ones.new_tensor([id(parameter) in self.received for parameter in self._parameters])

    def absent(self, everywhere: torch.Tensor | None) -> list[nn.Parameter]:
        """Those that have none on any rank, of which ``everywhere`` is the sum; None: there is one rank."""
        if len(self.received) == len(self._parameters):
            return []
        counts = [0.0] * len(self._parameters) if everywhere is None else everywhere.tolist()
        pairs = zip(self._parameters, counts, strict=True)
        return [parameter for parameter, count in pairs if not count and id(parameter) not in self.received]


class FlatSlice(NamedTuple):
    """A parameter's part on this rank, and how many steps it has missed; None: this one, too."""

    part: Partition
    behind: int | None


@final
@dataclass(frozen=True, slots=True)
class Kept:
    """What a piece was before a step: its weights, its states, and the counts of the tensor that it lies in."""

    piece: FlatSlice
    group: dict[str, Any]
    weights: torch.Tensor
    states: dict[str, torch.Tensor]
    counts: dict[str, Any]


@final
class LeftOut:
    """Steps the flat tensors of an engine as if the optimizer had each parameter by itself.

    The weights and states of absent parameters are restored after the step. An optimizer that counts steps has one
    count for a whole flat tensor, so a parameter that was absent in an earlier step is stepped by itself, with its own.

    Args:
        optimizer: the engine's, of torch's kind.
        parts: where parameters lie in its tensors; they keep how many steps each is behind.
    """

    def __init__(self, optimizer: Optimizer, parts: Partitions) -> None:
        self._optimizer, self._parts = optimizer, parts
        self._pieces: dict[int, list[FlatSlice]] = {}
        self._kept: list[Kept] = []
        self._alone = self._counts = self._stepped = False

    @contextmanager
    def around(self, absent: Sequence[nn.Parameter]) -> Iterator[None]:
        """Within it, the engine steps.

        Raises:
            BackendError: a parameter that was absent before, and an optimizer with a count that is none of steps.
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
                self._pieces.setdefault(id(part.flat), []).append(FlatSlice(part, steps))
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
                for piece in self._pieces.get(id(flat), ()):
                    of = piece.part.of
                    states = {key: of(value).clone() for key, value in state.items() if key not in counts}
                    own = {key: value for key, value in group.items() if key != "params"}
                    self._kept.append(Kept(piece, own, of(flat).clone(), states, counts))

    def _restore(self, optimizer: Optimizer, *_: object) -> None:
        if self._alone:
            return
        for group in optimizer.param_groups:
            self._counts |= STEP in group or any(STEP in optimizer.state.get(flat, ()) for flat in group["params"])
        for kept in self._kept:
            part = kept.piece.part
            assert part.flat is not None
            with torch.no_grad():
                part.of(part.flat).copy_(kept.weights)
                for key, value in optimizer.state[part.flat].items():
                    if _is_spread(value, part.flat) and key in kept.states:
                        part.of(value).copy_(kept.states[key])
                    elif _is_spread(value, part.flat):
                        part.of(value).zero_()
            if kept.piece.behind is not None:
                self._step_alone(optimizer, kept, kept.piece.behind)
        self._kept.clear()

    def _step_alone(self, optimizer: Optimizer, kept: Kept, behind: int) -> None:
        """Steps a piece with a count of its own."""
        part = kept.piece.part
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
    """Whether a state has a value for each element."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == flat.numel()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
