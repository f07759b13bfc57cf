"""Parameters of an FSDP2 model that no rank used in a backward: they get no gradient."""

from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accel_backends.fsdp.unreduced_gradients import added_up
from accel_backends.private import full_parameter, unit_parameters


@final
class Usage:
    """Records which parameters of one model its backwards reach, with ``find_unused_parameters``.

    With that option torch gives every parameter of a gathered unit a gradient, of zeros if no rank used it, and an
    optimizer with momentum or weight decay would change the parameter. In one process it has no gradient. Costs a hook
    for each parameter, and an all-reduce of one byte for each in a backward that gives a parameter its first gradient
    of a step.
    """

    __slots__ = ("_hooked", "_used", "_without")

    def __init__(self) -> None:
        self._hooked: dict[int, RemovableHandle] = {}
        self._used: set[int] = set()
        self._without: set[int] = set()

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """Records, before a backward, which parameters have no gradient yet, and which have unreduced gradients.

        ``modules`` are the root and the units, in the same order on every rank.
        """
        self._used.clear()
        self._without.clear()
        for entry in _entries(modules):
            key = id(entry)  # the entry exists as long as the model; its sharded parameter may be replaced
            if entry.sharded_param.grad is None:
                self._without.add(key)
            if added_up(entry) is not None:
                self._used.add(key)
            full = full_parameter(entry)
            if key not in self._hooked and full is not None and full.requires_grad:
                self._hooked[key] = full.register_post_accumulate_grad_hook(_noting(self._used, key))

    @torch.no_grad()
    def end(self, modules: Iterable[nn.Module], *, device: torch.device, group: Any = None) -> None:
        """Deletes, after a backward that reduced gradients, the new gradients of parameters that no rank used.

        Collective: every rank of the group must call this.
        """
        entries = list(_entries(modules))
        fresh = [entry.sharded_param.grad is not None and id(entry) in self._without for entry in entries]
        if not any(fresh):
            return
        used = self._anywhere([id(entry) in self._used for entry in entries], device, group)
        for entry, new, kept in zip(entries, fresh, used, strict=True):
            if new and not kept:
                entry.sharded_param.grad = None

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()

    @staticmethod
    def _anywhere(flags: list[bool], device: torch.device, group: Any) -> list[int]:
        import torch.distributed as dist

        used = torch.tensor(flags, dtype=torch.uint8, device=device)
        if dist.get_world_size(group) > 1:
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
        found: list[int] = used.tolist()
        return found


def _noting(used: set[int], key: int) -> Any:
    return lambda full: used.add(key)


def _entries(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yields torch's ``FSDPParam`` objects of units."""
    for module in modules:
        yield from unit_parameters(module)
