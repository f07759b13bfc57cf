"""Order in which a model calls its modules, found by one call, and the lists of blocks among them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Self, final

import torch
from torch import nn

from accel_state.errors import PrepareError
from accel_state.pytree.operations import recursively_apply

BEGIN: Final = -1
"""Time before the first call."""


@final
@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module: times of its begin and its end, and what it returned."""

    begin: int
    end: int
    output: Any


@final
@dataclass(frozen=True, slots=True)
class ListedBlock:
    """A member of a list of blocks: its name, the list, and its call."""

    name: str
    module: nn.Module
    blocks: nn.Module
    call: ModuleCall


@final
@dataclass(frozen=True, slots=True)
class CallOrder:
    """Calls of the modules of a model in one call of it.

    Attributes:
        model: the model.
        names: names of its modules.
        output: what it returned.
        calls: calls of each module, in order; modules that were not called have none.
        blocks: members of the lists of blocks of the model, in the order of their calls. An encoder and a decoder have
            one list each.
    """

    model: nn.Module
    names: Mapping[nn.Module, str]
    output: Any
    calls: Mapping[nn.Module, Sequence[ModuleCall]]
    blocks: Sequence[ListedBlock]

    @classmethod
    def of(cls, model: nn.Module, run: Callable[[], Any]) -> Self:
        """Runs a model once, without gradients, and records the calls of its modules.

        Raises:
            PrepareError: the model has no list of blocks that run once each, one after the other.
        """
        names = {module: name for name, module in model.named_modules()}
        calls, output = _recorded(model, run)
        return cls(model, names, output, calls, _blocks(model, calls))

    @property
    def block_bytes(self) -> list[int]:
        """Bytes of the parameters of each block, with those of other modules where they are needed first."""
        found, seen = [0] * len(self.blocks), set[int]()
        for number, block in enumerate(self.blocks):
            found[number] += _new_bytes(block.module, seen)
        for module, calls in self.calls.items():
            if calls and not any(block.module is module for block in self.blocks) and not self._holds_blocks(module):
                ended = sum(block.call.end < calls[0].begin for block in self.blocks)
                found[min(ended, len(found) - 1)] += _new_bytes(module, seen)
        return found

    def start_of(self, block: int) -> int:
        """Time at which the stage that begins with this block begins: the end of the block before it."""
        return BEGIN if block == 0 else self.blocks[block - 1].call.end

    def _holds_blocks(self, module: nn.Module) -> bool:
        inside = set(module.modules())
        return any(block.module in inside for block in self.blocks)


def copied(value: Any) -> Any:
    """Copy of what a module returned, which the model may change in place afterwards."""
    return recursively_apply(torch.Tensor.clone, value)


def _recorded(model: nn.Module, run: Callable[[], Any]) -> tuple[dict[nn.Module, list[ModuleCall]], Any]:
    calls: dict[nn.Module, list[ModuleCall]] = {module: [] for module in model.modules() if module is not model}
    begun: dict[nn.Module, list[int]] = {module: [] for module in calls}
    time = 0

    def begin(module: nn.Module, args: Any) -> None:
        nonlocal time
        begun[module].append(time)
        time += 1

    def end(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal time
        calls[module].append(ModuleCall(begun[module].pop(), time, copied(output)))
        time += 1

    hooks = [module.register_forward_pre_hook(begin) for module in calls]
    hooks += [module.register_forward_hook(end) for module in calls]
    try:
        with torch.no_grad():
            output = run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls, output


def _blocks(model: nn.Module, calls: Mapping[nn.Module, Sequence[ModuleCall]]) -> list[ListedBlock]:
    """Members of all outermost lists whose members run once each, one after the other."""
    found, refused = list[ListedBlock](), list[str]()

    def search(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            members = list(child) if isinstance(child, nn.ModuleList) else list[nn.Module]()
            called = [calls[one] for one in members]
            if called and all(len(one) == 1 for one in called):
                found.extend(
                    ListedBlock(f"{path}.{number}", one, child, calls[one][0]) for number, one in enumerate(members)
                )
                continue
            if called and any(len(one) > 1 for one in called):
                refused.append(f"a module of {path} runs {max(map(len, called))} times")
            search(f"{path}.", child)

    search("", model)
    found.sort(key=lambda block: block.call.begin)
    for one, following in pairwise(found):
        if following.call.begin < one.call.end:
            refused.append(f"{one.name} and {following.name} do not run one after the other")
            found = []
            break
    if not found:
        reasons = "".join(f"; {one}" for one in refused)
        raise PrepareError(
            f"{type(model).__name__} cannot be split into pipeline stages, because it has no list of blocks "
            f"(nn.ModuleList) that run once each, one after the other{reasons}; nearest: the "
            "full model on every rank, as accelerator.prepare_model(model, evaluation_mode=True)"
        )
    return found


def _new_bytes(module: nn.Module, seen: set[int]) -> int:
    new = {id(one): one for one in module.parameters() if id(one) not in seen}
    seen.update(new)
    return sum(one.numel() * one.element_size() for one in new.values())
