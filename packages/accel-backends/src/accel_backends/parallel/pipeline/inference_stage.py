"""A stage of a pipeline for inference: the model's own forward, with outputs of earlier stages for their modules.

The forward runs from its beginning on every rank, so that it prepares masks and positions for the blocks, and stops
behind the last block of the stage. Modules that have ended before the stage begins are replaced by stand-ins; what they
returned travels with the activations. This holds for an encoder of which a decoder reads the output in every block.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Self, final

import torch
from torch import nn

from accel_backends.parallel.pipeline.call_order import CallOrder, copied
from accel_backends.parallel.pipeline.stages import Elsewhere
from accel_state.errors import BackendError, PrepareError
from accel_state.pytree.operations import leaves_of

Key = tuple[str, int]
"""Name of a module, and number of one of its calls."""


@final
@dataclass(frozen=True, slots=True)
class _Replaced:
    """A child that does not run on a stage, and the numbers of its calls that have ended before the stage begins."""

    parent: nn.Module
    child_name: str
    module: nn.Module
    before: Sequence[int]


@final
@dataclass(frozen=True, slots=True)
class StageCut:
    """What one stage replaces, and what it receives and sends.

    Attributes:
        order: calls of the full model.
        blocks: numbers of the blocks of the stage.
        replaced: children that do not run on the stage.
        received: outputs that the stage before sends.
        sent: outputs that the next stage receives; empty for the last stage.
    """

    order: CallOrder
    blocks: range
    replaced: Sequence[_Replaced]
    received: Sequence[Key]
    sent: Sequence[Key]

    @classmethod
    def of(cls, order: CallOrder, ranges: Sequence[range], number: int) -> Self:
        """Finds the cut of stage ``number`` of those with these blocks."""
        replaced = [list(_replaced(order, one)) for one in ranges]
        needs = [_needs(order, one, gone) for one, gone in zip(ranges, replaced, strict=True)]

        def sent(stage: int) -> list[Key]:
            """Outputs that have ended with a stage and are needed by a later one."""
            if stage < 0:
                return []
            stop = _stop(order, ranges[stage])
            later = {key: end for need in needs[stage + 1 :] for key, end in need.items() if end <= stop}
            return sorted(later)

        return cls(order, ranges[number], replaced[number], sent(number - 1), sent(number))

    @property
    def is_last(self) -> bool:
        """Whether the stage returns the output of the model."""
        return self.blocks.stop == len(self.order.blocks)

    def outputs(self, keys: Sequence[Key]) -> dict[Key, Any]:
        """What the modules of these keys returned in the full model."""
        modules = {name: module for module, name in self.order.names.items()}
        return {(name, call): self.order.calls[modules[name]][call].output for name, call in keys}


@final
class InferenceStage:
    """The blocks of a model that one rank has, and the modules that run between them.

    Other children of the model are replaced while this is built; ``restore`` puts them back.

    Args:
        cut: what is replaced.
        forward: forward of the model.
    """

    def __init__(self, cut: StageCut, forward: Callable[..., Any]) -> None:
        self.blocks, self.received, self.sent, self.is_last = cut.blocks, cut.received, cut.sent, cut.is_last
        self._forward, self._model_name = forward, type(cut.order.model).__name__
        self._replaced: Sequence[_Replaced] = cut.replaced
        self._given: Mapping[Key, Any] = {}
        self._found: dict[Key, Any] = {}
        self._calls: dict[nn.Module, int] = {}
        self._running = False
        order, names = cut.order, cut.order.names
        modules = {name: module for module, name in names.items()}
        self._last = order.blocks[cut.blocks[-1]].module
        self._last_name = names[self._last]
        made: dict[nn.Module, nn.Module] = {}
        for one in cut.replaced:
            if one.module not in made:
                made[one.module] = self._stand_in(one, cut)
            one.parent._modules[one.child_name] = made[one.module]
        own = {name for name, _ in cut.sent} - {name for name, _ in cut.received}
        self._hooks = [
            modules[name].register_forward_hook(self._keeping(name, _occurring(order, modules[name], cut.replaced)))
            for name in sorted(own)
        ]
        if not self.is_last:
            self._hooks.append(self._last.register_forward_hook(self._stop))

    def compute(self, received: Mapping[Key, Any], inputs: Mapping[str, Any]) -> Any:
        """Computes a micro-batch: returns what is sent to the next stage, or on the last one the model's output."""
        self._given, self._found, self._running = received, {}, True
        self._calls.clear()
        try:
            output = self._forward(**inputs)
        except _StageEnd:
            return {key: received[key] if key in received else self._found[key] for key in self.sent}
        finally:
            self._given, self._running = {}, False
        if not self.is_last:
            raise BackendError(
                f"the call of {self._model_name} ended without a call of {self._last_name}, with which a pipeline "
                "stage ends; nearest: arguments with which the same blocks run as with example_args"
            )
        return output

    def check(self, cut: StageCut, inputs: Mapping[str, Any]) -> None:
        """Refuses a model whose stage does not compute what the full model computed.

        Raises:
            PrepareError: names the stage, and what is nearest.
        """
        problem, wanted = "other values", cut.order.output if self.is_last else cut.outputs(self.sent)
        try:
            if is_close(self.compute(cut.outputs(self.received), inputs), wanted, digits=0.75):
                return
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        first = cut.order.blocks[self.blocks.start].name
        raise PrepareError(
            f"the pipeline stage of {self._model_name} that begins with {first} does not compute what the full model "
            f"computes ({problem}), because its blocks need more than outputs of modules before it; nearest: another "
            "split point, or the full model on every rank, as accelerator.prepare_model(model, evaluation_mode=True)"
        )

    def restore(self) -> None:
        """Puts the replaced children back."""
        for one in self._replaced:
            one.parent._modules[one.child_name] = one.module
        for hook in self._hooks:
            hook.remove()

    def release(self) -> None:
        """Frees the replaced children, which cannot be put back any more."""
        self._replaced = ()

    def _stand_in(self, one: _Replaced, cut: StageCut) -> nn.Module:
        names = cut.order.names
        if not one.before:
            return Elsewhere(names[one.module])
        last = _last_of_list(cut.order, one.module, cut.blocks.start)
        if last is not None:
            keys = [(names[last], 0)]
        else:
            keys = [(names[one.module], call) for call in _occurring(cut.order, one.module, cut.replaced)]
        return _StandIn(one.module, self, keys)

    def given(self, keys: Sequence[Key], module: nn.Module) -> Any:
        """What an earlier stage returned in the next call of a module whose calls have these keys."""
        key = keys[min(self._next(module), len(keys) - 1)]
        if key not in self._given:
            raise BackendError(f"{key[0]} is on another rank of the pipeline; call the model that was split")
        return self._given[key]

    def _next(self, module: nn.Module) -> int:
        number = self._calls.get(module, 0)
        self._calls[module] = number + 1
        return number

    def _keeping(self, name: str, calls: Sequence[int]) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            number = self._next(module) if self._running else len(calls)
            if number < len(calls):
                self._found[name, calls[number]] = copied(output)

        return keep

    def _stop(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            raise _StageEnd


class _StageEnd(Exception):
    """Ends the forward of the model behind the last block of a stage."""


@final
class _StandIn(nn.Module):
    """Stands for a module that earlier stages have run, and returns what it returned there.

    Its other attributes are those of the module, whose parameters have a shape and a dtype, but no values.
    """

    def __init__(self, original: nn.Module, stage: InferenceStage, keys: Sequence[Key]) -> None:
        super().__init__()
        self._stage, self._keys = stage, keys
        self.__dict__["_original"] = _without_values(original)  # outside of the registry of modules

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)

    def forward(self, *args: Any, **options: Any) -> Any:
        """Returns the output of the module."""
        return self._stage.given(self._keys, self)


def _without_values(module: nn.Module) -> nn.Module:
    """Copy of a module with parameters and buffers on the meta device."""
    made = copy.copy(module)
    for registry in ("_parameters", "_buffers"):
        tensors = {key: None if one is None else one.detach().to("meta") for key, one in vars(module)[registry].items()}
        made.__dict__[registry] = tensors
    children = {key: None if one is None else _without_values(one) for key, one in module._modules.items()}
    made.__dict__["_modules"] = children
    return made


def _stop(order: CallOrder, blocks: range) -> float:
    """Time at which a stage ends."""
    return inf if blocks.stop == len(order.blocks) else order.blocks[blocks.stop - 1].call.end


def _replaced(order: CallOrder, blocks: range) -> Iterator[_Replaced]:
    """Largest children with parameters none of whose calls is a part of a stage.

    A module that was not called stays, because its parameters may be read without a call.
    """
    start, stop = order.start_of(blocks.start), _stop(order, blocks)

    def search(module: nn.Module) -> Iterator[_Replaced]:
        for name, child in module._modules.items():
            calls = [] if child is None else order.calls[child]
            if child is None or next(child.parameters(), None) is None:
                continue
            if not calls or any(call.end > start and call.begin < stop for call in calls):
                yield from search(child)
            else:
                before = [number for number, call in enumerate(calls) if call.end <= start]
                yield _Replaced(module, name, child, before)

    return search(order.model)


def _needs(order: CallOrder, blocks: range, replaced: Sequence[_Replaced]) -> dict[Key, int]:
    """Outputs that the stand-ins of a stage return, and the times at which their calls have ended."""
    found: dict[Key, int] = {}
    for one in (one for one in replaced if one.before):
        last = _last_of_list(order, one.module, blocks.start)
        source, calls = (one.module, one.before) if last is None else (last, [0])
        found.update({(order.names[source], call): order.calls[source][call].end for call in calls})
    return found


def _last_of_list(order: CallOrder, module: nn.Module, start: int) -> nn.Module | None:
    """The last block before a stage of the list that has this block; None: it is not a block."""
    own = next((block for block in order.blocks if block.module is module), None)
    if own is None:
        return None
    return [block.module for block in order.blocks[:start] if block.blocks is own.blocks][-1]


def _occurring(order: CallOrder, module: nn.Module, replaced: Sequence[_Replaced]) -> list[int]:
    """Numbers of the calls of a module that are not a part of a call of a replaced one."""
    outer = [call for one in replaced if one.module is not module for call in order.calls[one.module]]
    return [
        number
        for number, call in enumerate(order.calls[module])
        if not any(one.begin < call.begin and call.end < one.end for one in outer)
    ]


def is_close(found: Any, wanted: Any, *, digits: float) -> bool:
    """Whether nested tensors are equal to this share of the digits of their dtypes; other leaves are not compared."""
    ours, theirs = leaves_of(found), leaves_of(wanted)
    return len(ours) == len(theirs) and all(
        _is_close(one, other, digits)
        for one, other in zip(ours, theirs, strict=True)
        if isinstance(other, torch.Tensor)
    )


def _is_close(found: Any, wanted: torch.Tensor, digits: float) -> bool:
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape:
        return False
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    bound = scale * torch.finfo(wanted.dtype).eps ** digits
    return torch.allclose(found, wanted, rtol=0, atol=bound, equal_nan=True)
