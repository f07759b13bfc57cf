"""Training with different numbers of batches per rank, and equal state on all ranks afterwards.

On ranks that have run out of batches torch's Join repeats the collectives of the models, and at the end it copies the
model of a rank with the most batches to all ranks. Join does not copy optimizers, their schedulers and the loss scale,
which would have made fewer steps on some ranks, so that weights would diverge from the next step on. ``_Follower`` adds
them to the Join.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accel_precision.scaler import LossScaler


@contextmanager
def joined(
    models: Sequence[DistributedDataParallel],
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    scaler: LossScaler | None,
) -> Iterator[None]:
    """torch's Join over the models; afterwards all ranks continue from the state of a rank with the most batches.

    That is the state of optimizers, schedulers and the loss scale.

    Within the context each rank decides alone whether gradients overflowed: DDP averages them, so all ranks that still
    step have the same gradients, and ranks without batches take part in no further collective. torch leaves the models
    configured for the context, in which each forward and backward is a collective.
    """
    before = [model._join_config for model in models]
    reduce = None if scaler is None else scaler.reduce
    if scaler is not None:
        scaler.reduce = None
    try:
        with Join([*models, _Follower(models[0], optimizers, schedulers, scaler)]):
            yield
    finally:
        for model, config in zip(models, before, strict=True):
            model._join_config = config
        if scaler is not None:
            scaler.reduce = reduce


@final
class _Follower(Joinable):
    """Participant of a Join for the optimizers, schedulers and the loss scale of its models."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        scaler: LossScaler | None,
    ) -> None:
        super().__init__()
        self.model = model
        self.optimizers = optimizers
        self.schedulers = schedulers
        self.scaler = scaler

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook that runs once all ranks have run out of batches."""
        return _Settle(self)

    @property
    def join_device(self) -> torch.device:
        """Device of the model."""
        device: torch.device = self.model.join_device
        return device

    @property
    def join_process_group(self) -> Any:
        """Process group of the model."""
        return self.model.join_process_group


@final
class _Settle(JoinHook):
    def __init__(self, follower: _Follower) -> None:
        self.follower = follower

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copies all states from the highest of the ranks with the most batches to all ranks."""
        import torch.distributed as dist

        from accel_state.collectives.objects import all_gather_object, broadcast_object_list
        from accel_state.collectives.tensors import broadcast

        follower = self.follower
        group = follower.join_process_group
        went_on = all_gather_object(is_last_joiner, group=group)
        if all(went_on):
            return
        source = max(rank for rank, last in enumerate(went_on) if last)
        here = dist.get_rank(group) == source
        tensors: list[torch.Tensor] = []
        states = (
            [_without_tensors(optimizer.state_dict(), tensors) for optimizer in follower.optimizers] if here else []
        )
        schedules = [_plain_items(scheduler.state_dict()) for scheduler in follower.schedulers] if here else []
        scale = None if follower.scaler is None else follower.scaler.state_dict()
        shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        sent: list[Any] = [states, shapes, schedules, scale]
        broadcast_object_list(sent, from_process=source, group=group)
        states, shapes, schedules, scale = sent
        if not here:
            tensors = [torch.empty(shape, dtype=dtype, device=self._own(device)) for shape, dtype, device in shapes]
        broadcast(tensors, from_process=source, group=group)
        if here:
            return
        for optimizer, state in zip(follower.optimizers, states, strict=True):
            optimizer.load_state_dict(_with_tensors(state, tensors))
        for scheduler, schedule in zip(follower.schedulers, schedules, strict=True):
            scheduler.load_state_dict({**scheduler.state_dict(), **schedule})
        if follower.scaler is not None and scale is not None:
            follower.scaler.load_state_dict(scale)

    def _own(self, device: torch.device) -> torch.device:
        """Returns this rank's device of the same type."""
        return device if device.type == "cpu" else self.follower.join_device


def _plain_items(state: Mapping[str, Any]) -> dict[str, Any]:
    """The items of a scheduler's state that count steps and rates; objects within it belong to one rank."""
    return {key: value for key, value in state.items() if _is_plain(value)}


def _is_plain(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return all(map(_is_plain, tree.values()))
    if isinstance(tree, (list, tuple)):
        return all(map(_is_plain, tree))
    return tree is None or isinstance(tree, (int, float, str))


class _Slot(int):
    """Placeholder of a tensor: its index in the list of tensors."""


def _without_tensors(tree: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        tensors.append(tree.detach())
        return _Slot(len(tensors) - 1)
    if isinstance(tree, dict):
        return {key: _without_tensors(value, tensors) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_without_tensors(value, tensors) for value in tree)
    return tree


def _with_tensors(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(tree, _Slot):
        return tensors[tree]
    if isinstance(tree, dict):
        return {key: _with_tensors(value, tensors) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_with_tensors(value, tensors) for value in tree)
    return tree
