"""Units of a model: modules that are gathered and freed together."""

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, final

import torch
from torch import nn

from accel_backends.core.option_parsing import AutoWrap
from accel_backends.fsdp.config import FSDPConfig
from accel_backends.ops.blocks import blocks_by_class, declared_or_repeated_blocks
from accel_backends.ops.fqn import innermost, natural, places
from accel_backends.private import BatchNorm
from accel_state.errors import PrepareError

Policy = Callable[..., Any]


@final
@dataclass(frozen=True, slots=True)
class Units:
    """Names of a model's units, each before the units inside it; remaining modules belong to the root.

    Attributes:
        blocks: the model's repeated blocks, to which activation checkpointing applies by default.
        extra: modules that are units for another reason (large embeddings).
        experts: modules of experts, which are sharded over a mesh of their own under expert parallelism.
        wide: batch normalisations, units of their own because they compute in full precision.
        ignored: modules that are not sharded, with their submodules.
        tied: modules selected by the options that are no units, because they share a parameter with modules outside.
    """

    blocks: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()

    @property
    def inside_out(self) -> list[str]:
        """All units, each after the units inside it, in the same order on all ranks: block 10 after block 9."""
        return sorted(
            {*self.blocks, *self.extra, *self.experts, *self.wide}, key=lambda name: (-name.count("."), natural(name))
        )


def find_units(model: nn.Module, config: FSDPConfig, *, halves: bool = False, experts: Sequence[str] = ()) -> Units:
    """Returns the units of a model by the options; pure.

    Args:
        halves: whether units compute in half precision, in which running statistics would drift.
        experts: names of modules of experts that expert parallelism divides.

    Raises:
        PrepareError: no module has a given class (the message lists the classes); or experts are among the ignored
            modules.
    """
    model = innermost(model)
    modules = dict(model.named_modules())
    ignored = _ignored(modules, config)
    if excluded := [name for name in experts if _within(name, ignored)]:
        raise PrepareError(
            f"ignored_modules holds {excluded[0]}, whose experts ep_size divides among ranks; nearest: leave it out "
            "of ignored_modules, or ep_size=1"
        )
    left_out = {module for name in ignored for module in modules[name].modules()}
    open_modules = {name: module for name, module in modules.items() if module not in left_out}
    asked = [name for name in _asked(model, open_modules, config) if name and _can_be_unit(open_modules.get(name))]
    leaking = _tied_outside(model, {name: modules[name] for name in open_modules if name})
    blocks = tuple(name for name in asked if name not in leaking)
    automatic = config.auto_wrap_policy in (None, AutoWrap.TRANSFORMER_BASED_WRAP)
    extra = _embeddings(open_modules, blocks, leaking) if automatic and blocks else ()
    wide = tuple(
        name
        for name, module in open_modules.items()
        if halves and name and isinstance(module, BatchNorm) and module.affine and name not in leaking
    )
    tied = tuple(name for name in asked if name in leaking)
    return Units(blocks, extra, tuple(experts), wide, ignored, tied)


def units_by_size(model: nn.Module, least: int) -> list[str]:
    """Returns names of the smallest modules with ``least`` or more elements outside the units inside them."""
    found: list[str] = []
    seen: set[int] = set()

    def rest(name: str, module: nn.Module) -> int:
        left = sum(parameter.numel() for parameter in module._parameters.values() if parameter is not None)
        for child, below in module._modules.items():
            if below is not None and id(below) not in seen:
                seen.add(id(below))
                left += rest(f"{name}.{child}" if name else child, below)
        if least > 0 and left >= least and name and _can_be_unit(module):
            found.append(name)
            return 0
        return left

    rest("", model)
    return found[::-1]


def units_by_policy(modules: Iterable[tuple[str, nn.Module]], policy: Policy) -> list[str]:
    """Returns the names of the modules for which ``policy`` returns true.

    ``policy`` takes a module, or the arguments of torch's policies (also ``recurse`` and the number of elements).
    """
    asks_recursion = "recurse" in _parameters_of(policy)
    found = []
    for name, module in modules:
        numel = sum(parameter.numel() for parameter in module.parameters())
        if policy(module, recurse=False, nonwrapped_numel=numel) if asks_recursion else policy(module):
            found.append(name)
    return found


def parameters_of_units(model: nn.Module, units: Units) -> dict[str, list[str]]:
    """Maps each unit, the root ("") included, to the names of the parameters that are gathered with it."""
    model = innermost(model)
    groups: dict[str, list[str]] = {"": []}
    groups |= {name: [] for name in units.inside_out}
    chosen = set(groups)
    for name, _ in model.named_parameters():
        if _within(name, units.ignored):
            continue
        owner = name.rpartition(".")[0]
        while owner not in chosen:
            owner = owner.rpartition(".")[0]
        groups[owner].append(name)
    return groups


def stays_full(parameter: torch.Tensor) -> bool:
    """Whether a parameter has no dimension or no elements, so that version 2 cannot cut it, and replicates it."""
    return parameter.dim() == 0 or parameter.numel() == 0


def parameters_to_split(model: nn.Module, units: Units) -> list[nn.Parameter]:
    """Returns the model's parameters except those of ignored modules."""
    model = innermost(model)
    ignored = {id(parameter) for name in units.ignored for parameter in model.get_submodule(name).parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in ignored]


def _asked(model: nn.Module, modules: dict[str, nn.Module], config: FSDPConfig) -> list[str]:
    policy = config.auto_wrap_policy
    if policy is AutoWrap.NO_WRAP:
        return []
    if policy is AutoWrap.SIZE_BASED_WRAP:
        return units_by_size(model, config.min_num_params)
    if callable(policy) and not isinstance(policy, AutoWrap):
        return units_by_policy(modules.items(), policy)
    if config.transformer_cls_names_to_wrap:
        return blocks_by_class(model, config.transformer_cls_names_to_wrap)
    return declared_or_repeated_blocks(model)


def _ignored(modules: dict[str, nn.Module], config: FSDPConfig) -> tuple[str, ...]:
    wanted = config.ignored_modules
    if wanted is None:
        return ()
    if isinstance(wanted, str):
        pattern = re.compile(wanted)
        found = tuple(name for name in modules if name and pattern.fullmatch(name))
        if not found:
            near = get_close_matches(wanted, modules, n=1)
            hint = f"; nearest: {near[0]!r}" if near else ""
            raise PrepareError(f"ignored_modules={wanted!r} is the whole name of no module{hint}")
        return found
    given = list(wanted)
    by_id = {id(module): name for name, module in modules.items()}
    strangers = [type(module).__name__ for module in given if id(module) not in by_id]
    if len(strangers) == len(given) and given:
        raise PrepareError(f"none of ignored_modules ({', '.join(strangers[:5])}) is part of the model")
    return tuple(by_id[id(module)] for module in given if id(module) in by_id)


def _can_be_unit(module: nn.Module | None) -> bool:
    """Whether a module has parameters and a forward; a list of modules has none."""
    if module is None or next(module.parameters(), None) is None:
        return False
    return not (isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward)


def _tied_outside(model: nn.Module, modules: dict[str, nn.Module]) -> set[str]:
    """Returns the names of the modules with a parameter that is also used outside of them."""
    uses: dict[int, list[int]] = {}
    for place in places(model):
        for parameter in place.module._parameters.values():
            if parameter is not None:
                uses.setdefault(id(parameter), []).append(id(place.module))
    shared = {key: set(users) for key, users in uses.items() if len(set(users)) > 1}
    if not shared:
        return set()
    leaking = set()
    for name, module in modules.items():
        inside = {id(below) for below in module.modules()}
        if any(users & inside and not users <= inside for users in shared.values()):
            leaking.add(name)
    return leaking


def _embeddings(modules: dict[str, nn.Module], blocks: Collection[str], leaking: Collection[str]) -> tuple[str, ...]:
    """Returns embeddings outside of the blocks that are at least as large as the smallest block.

    They are units of their own, because as part of the root they would stay gathered during the full step.
    """
    least = min(sum(p.numel() for p in modules[name].parameters()) for name in blocks)
    return tuple(
        name
        for name, module in modules.items()
        if isinstance(module, nn.Embedding)
        and module.weight.numel() >= least
        and name not in leaking
        and not _within(name, blocks)
    )


def _within(name: str, units: Iterable[str]) -> bool:
    return any(name == unit or name.startswith(f"{unit}.") for unit in units)


def _parameters_of(policy: Policy) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(policy).parameters)
    except (TypeError, ValueError):
        return ()
