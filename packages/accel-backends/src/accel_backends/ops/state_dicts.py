"""State dicts of models and optimizers by FQN, independent of wrappers, world size and backend.

A model's state is ``{name: tensor}``, tied tensors once, under their first name. An optimizer's state is
``{"state": {name: {key: tensor | number}}, "param_groups": [{option: value, ..., "params": [name, ...]}]}``.
"""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.ops.fqn import few, first_names, innermost, named_parameters, raw_prefixes
from accel_backends.private import is_of_fsdp2, loads_as_torch_does, saves_as_torch_does, shard_of
from accel_state.errors import CheckpointMismatchError, PrepareError
from accel_state.pytree.saved_shapes import is_extra_state, shape_text, shapes_differ

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def model_state(model: nn.Module) -> dict[str, Any]:
    """Returns the model's ``state_dict`` by FQN. Tensors share memory with the model."""
    model = innermost(model)
    stored, prefixes = first_names(model), raw_prefixes(model)
    state: dict[str, Any] = {}
    for raw, value in model.state_dict().items():
        state.setdefault(_stored_name(raw, stored, prefixes), value)
    return state


def with_aliases(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a ``model_state`` with tied tensors under all their names, as in a bare module's ``state_dict``.

    Names that the model does not have (modules of other ranks) are kept.
    """
    model = innermost(model)
    stored, prefixes = first_names(model), raw_prefixes(model)
    names = {_plain_name(raw, prefixes): _stored_name(raw, stored, prefixes) for raw in model.state_dict()}
    here = set(names.values())
    others = {name: value for name, value in state.items() if name not in here}
    return {name: state[kept] for name, kept in names.items() if kept in state} | others


def names_stored(model: nn.Module) -> dict[str, str]:
    """Maps every FQN of a parameter or buffer to the name under which ``model_state`` stores the tensor."""
    model = innermost(model)
    prefixes = raw_prefixes(model)
    return {_plain_name(raw, prefixes): name for raw, name in first_names(model).items()}


def load_model_state(
    model: nn.Module,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    place: Callable[[Any, Any], Any] = lambda value, own: value,
) -> tuple[list[str], list[str]]:
    """Loads a ``model_state`` into this or any other wrapping of the same model.

    Nothing is loaded unless all names and shapes fit. A tied tensor may be given under any of its names.
    ``place(value, own)`` converts a given value to the form of the model's own tensor (for example to a shard). Values
    that already are the model's own memory are skipped.

    Returns:
        The missing names and the unknown names; both empty if ``strict``.

    Raises:
        CheckpointMismatchError: names are missing or unknown (``strict``), or shapes differ.
    """
    model = innermost(model)
    stored, prefixes = first_names(model), raw_prefixes(model)
    own = _own_tensors(model)
    wanted = {raw: _stored_name(raw, stored, prefixes) for raw in own}
    aliases = {_plain_name(raw, prefixes): name for raw, name in wanted.items()}
    given = {aliases.get(name, name): value for name, value in state.items()}
    known = dict.fromkeys(wanted.values())
    missing = [name for name in known if name not in given]
    unexpected = [name for name in given if name not in known]
    if strict and (missing or unexpected):
        raise CheckpointMismatchError(
            differences(f"state of another {type(model).__name__}", missing, unexpected, list(aliases))
        )
    misshapen = [
        f"{name} is {shape_text(name, given[name])} here and {shape_text(name, value)} in the model"
        for raw, name in wanted.items()
        if name in given and shapes_differ(name, value := own[raw], given[name])
    ]
    if misshapen:
        raise CheckpointMismatchError(f"state of another {type(model).__name__}: {few(misshapen)}")
    loaded = {raw: place(given[name], own[raw]) for raw, name in wanted.items() if name in given}
    if all(map(_loads_as_torch_does, model.modules())):
        # An extra state is for its module to take, whatever its memory.
        loaded = {raw: one for raw, one in loaded.items() if is_extra_state(raw) or not _same_memory(one, own[raw])}
        expanded = [raw for raw in loaded if not is_extra_state(raw) and _repeated_dims(own[raw])]
        _load_expanded([(wanted[raw], own[raw], loaded.pop(raw)) for raw in expanded])
    if loaded:
        _load(model, loaded)
    return missing, unexpected


def optimizer_state(optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
    """Returns the optimizer's ``state_dict`` with FQNs in place of parameter indices.

    If the optimizer updates parameters of several models, each FQN has its model's position as prefix (``0.``).

    Raises:
        PrepareError: the optimizer updates a parameter that belongs to none of the models, or has a state that belongs
            to no parameter.
    """
    names = optimizer_names(optimizer, models)
    packed = optimizer.state_dict()
    shared = [key for key in packed[STATE] if not isinstance(key, int) or key >= len(names)]
    if shared:
        raise PrepareError(
            f"{type(optimizer).__name__}.state has the key {few([repr(key) for key in shared])}, which is none of its "
            "parameters, so no other sharding of them can load it. Keep what all parameters share in param_groups, or "
            "in an attribute of an object for register_for_checkpointing"
        )
    return {
        STATE: {names[index]: dict(values) for index, values in packed[STATE].items()},
        GROUPS: [{**group, PARAMS: [names[index] for index in group[PARAMS]]} for group in packed[GROUPS]],
    }


def load_optimizer_state(optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
    """Loads an ``optimizer_state`` into an optimizer with the same parameters in the same groups.

    Groups are matched by their parameters, so their order does not matter. Tensors keep the dtype in which they were
    saved, where torch would convert them to the parameter's dtype.

    Raises:
        CheckpointMismatchError: the parameters or their grouping differ.
    """
    names = optimizer_names(optimizer, models)
    index_of = {name: index for index, name in enumerate(names)}
    order = iter(names)
    grouped = [[next(order) for _ in group[PARAMS]] for group in optimizer.param_groups]
    groups = [
        {**options, PARAMS: _numbers([index_of[name] for name in here], optimizer)}
        for options, here in zip(fitted_groups(optimizer, grouped, state), grouped, strict=True)
    ]
    values_of = {index_of[name]: dict(values) for name, values in state[STATE].items()}
    optimizer.load_state_dict({STATE: values_of, GROUPS: groups})
    _keep_dtypes(optimizer, values_of)


def _numbers(numbers: list[int], optimizer: Optimizer) -> Sequence[int]:
    """Returns the parameter indices of a group, as a range if they are consecutive.

    torch looks each index up once per state tensor, which takes quadratic time in a list.
    """
    span = range(numbers[0], numbers[0] + len(numbers)) if numbers else range(0)
    own_way = type(optimizer).load_state_dict is not Optimizer.load_state_dict
    hooked = bool(optimizer._optimizer_load_state_dict_pre_hooks)
    return numbers if own_way or hooked or list(span) != numbers else span


def fitted_groups(
    optimizer: Optimizer, names: Sequence[Sequence[str]], state: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns the saved options of each of the optimizer's groups, matched by the names of the parameters.

    Options that the state does not have keep their value.

    Raises:
        CheckpointMismatchError: the parameters or their grouping differ.
    """
    kind = type(optimizer).__name__
    known = [name for here in names for name in here]
    saved: dict[frozenset[str], list[Mapping[str, Any]]] = {}
    for group in state[GROUPS]:
        saved.setdefault(frozenset(group[PARAMS]), []).append(group)  # several may be empty
    unknown = sorted(set(state[STATE]) - set(known))
    fitted: list[dict[str, Any]] = []
    for position, (group, here) in enumerate(zip(optimizer.param_groups, names, strict=True)):
        matches = saved.get(frozenset(here))
        if not matches or unknown or len(state[GROUPS]) != len(names):
            there = sorted({name for group in state[GROUPS] for name in group[PARAMS]})
            missing = sorted(set(known) - set(there))
            reason = differences(f"state of another {kind}", missing, sorted({*unknown, *there} - set(known)), known)
            if not missing and set(there) == set(known):
                reason = f"state of another {kind}: its groups differ, first at group {position} ({few(here)})"
            raise CheckpointMismatchError(reason)
        fitted.append(_options(group, matches.pop(0), kind))
    return fitted


# Options in which two states of one optimizer may differ: names, and choices of implementation.
ASIDE = frozenset(
    [PARAMS, "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable", "bias_correction"]
)


def _options(group: Mapping[str, Any], saved: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Returns the saved options of a group; options that this version of the optimizer added keep their value.

    Raises:
        CheckpointMismatchError: each side has options that the other lacks, so the optimizers are different.
    """
    lacking, foreign = set(group) - set(saved) - ASIDE, set(saved) - set(group) - ASIDE
    if lacking and foreign:
        raise CheckpointMismatchError(
            f"state of another optimizer: {kind} has {few(sorted(lacking))}, and the state has "
            f"{few(sorted(foreign))} instead; build the optimizer that was saved"
        )
    kept = {key: value for key, value in group.items() if key not in saved and key != PARAMS}
    return {**kept, **{key: value for key, value in saved.items() if key != PARAMS}}


def optimizer_names(optimizer: Optimizer, models: Sequence[nn.Module]) -> list[str]:
    """Returns the FQN of every parameter of the optimizer, in the order of its groups.

    Raises:
        PrepareError: a parameter belongs to none of the models.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]
    ids = {id(parameter) for parameter in held}
    by_model = [{id(p): name for name, p in named_parameters(model).items()} for model in models]
    users = [index for index, known in enumerate(by_model) if ids & known.keys()]
    names: dict[int, str] = {}
    for index in reversed(users):
        prefix = f"{index}." if len(users) > 1 else ""
        names |= {key: prefix + name for key, name in by_model[index].items()}
    foreign = foreign_parameters(optimizer, names.keys())
    if foreign:
        raise PrepareError(
            f"{type(optimizer).__name__} updates parameters of none of the prepared models: {few(foreign)}"
        )
    return [names[id(parameter)] for parameter in held]


def state_templates(optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Returns the optimizer's parameters by FQN, as templates of the placement of their states."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return dict(zip(optimizer_names(optimizer, models), held, strict=True))


def foreign_parameters(optimizer: Optimizer, known: "set[int] | Mapping[int, Any] | Any") -> list[str]:
    """Returns descriptions of the optimizer's parameters whose ``id`` is not in ``known``."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        labels = group.get("param_names")
        for position, parameter in enumerate(group[PARAMS]):
            if id(parameter) not in known:
                label = f"{labels[position]!r}, " if labels else ""
                found.append(f"group {number} parameter {position} ({label}shape {tuple(parameter.shape)})")
    return found


def _repeated_dims(tensor: torch.Tensor) -> list[int]:
    """Dimensions along which a tensor repeats its memory, as those that ``expand`` makes."""
    if type(tensor) not in _PLAIN:
        return []
    return [dim for dim, size in enumerate(tensor.shape) if size > 1 and tensor.stride(dim) == 0]


@torch.no_grad()
def _load_expanded(loads: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    """Copies values into tensors that repeat their memory, which torch's ``copy_`` refuses: (name, tensor, value) each.

    Raises:
        CheckpointMismatchError: a value differs along a dimension that the tensor repeats; nothing is copied.
    """
    copies = []
    for name, target, value in loads:
        source, dims = value, _repeated_dims(target)
        for dim in dims:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        if not torch.equal(source.expand_as(value), value):
            raise CheckpointMismatchError(
                f"{name} repeats one value along dimensions {dims} in the model, and the state has several values "
                "there; nearest: contiguous() in the model, whose result has memory for all of them"
            )
        copies.append((target, source))
    for target, source in copies:
        target.copy_(source)


#: Attribute that marks a pre-hook of ``load_state_dict`` which changes the placement of values, not the values.
ONLY_PLACES = "_accel_only_places"
_PLAIN = (torch.Tensor, nn.Parameter)
# Models with a module of more children than this are loaded child by child.
_WIDE = 8


def _load(module: nn.Module, state: Mapping[str, Any]) -> None:
    """``module.load_state_dict`` in time linear in the number of parameters.

    torch filters all entries of a module once for each child, which is quadratic: 10,000 layers take 10,000 times
    10,000 comparisons. Here a wide module without hooks (or one that contains a wide module) passes each child only the
    child's own entries.
    """
    if not any(len(one._modules) > _WIDE for one in module.modules()) or not _loads_as_torch_does(module):
        module.load_state_dict(state, strict=False)
        return
    children: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    for name, value in state.items():
        child, dot, rest = name.partition(".")
        if dot and child in module._modules:
            children.setdefault(child, {})[rest] = value
        else:
            own[name] = value
    if own:
        module.load_state_dict(own, strict=False)
    for name, given in children.items():
        inner = module._modules[name]
        if inner is not None:
            _load(inner, given)


def _own_tensors(model: nn.Module) -> dict[str, Any]:
    """Returns the model's ``state_dict`` for comparisons; detaching each DTensor would take as long as loading it."""
    if all(map(saves_as_torch_does, model.modules())):
        return model.state_dict(keep_vars=True)
    return model.state_dict()


def _loads_as_torch_does(module: nn.Module) -> bool:
    """Whether no hook or overridden method can depend on which entries the module and its children are given."""
    kind = type(module)
    return (
        kind.load_state_dict is nn.Module.load_state_dict
        and loads_as_torch_does(kind)
        and all(map(_keeps_content, module._load_state_dict_pre_hooks.values()))
        and all(map(_keeps_content, module._load_state_dict_post_hooks.values()))
    )


def _keeps_content(hook: Any) -> bool:
    """Whether a ``load_state_dict`` hook leaves values unchanged: marked hooks, and FSDP2's, which reshard."""
    function = getattr(hook, "hook", hook)  # torch wraps hooks that receive the module
    return hasattr(function, ONLY_PLACES) or is_of_fsdp2(function)


def _same_memory(value: Any, own: Any) -> bool:
    """Whether ``value`` is a view of all of the model's own tensor, so that a copy would change nothing."""
    if type(value) not in _PLAIN or type(own) not in _PLAIN:
        local, own_local = shard_of(value), shard_of(own)
        if local is None or own_local is None:
            return False
        if value.placements != own.placements or value.device_mesh != own.device_mesh:
            return False
        value, own = local, own_local
        if type(value) not in _PLAIN or type(own) not in _PLAIN:
            return False
    return (
        value.data_ptr() == own.data_ptr() != 0
        and (value.dtype, value.device, value.shape) == (own.dtype, own.device, own.shape)
        and value.stride() == own.stride()
        and (value.is_conj(), value.is_neg()) == (own.is_conj(), own.is_neg())
    )


def _stored_name(raw: str, stored: Mapping[str, str], prefixes: Mapping[str, str]) -> str:
    return stored[raw] if raw in stored else _plain_name(raw, prefixes)


def _plain_name(raw: str, prefixes: Mapping[str, str]) -> str:
    """Removes wrapper prefixes from a name; an ``_extra_state`` is named after the module that holds it."""
    prefix, dot, leaf = raw.rpartition(".")
    return prefixes.get(prefix + dot, prefix + dot) + leaf


def differences(head: str, missing: Sequence[str], unexpected: Sequence[str], known: Sequence[str]) -> str:
    """Describes the differences between the names of a state and the known names, for an error message."""
    parts = [f"it lacks {few(missing)}"] if missing else []
    if unexpected:
        near = get_close_matches(unexpected[0], known, n=1)
        parts.append(f"it holds unknown {few(unexpected)}{f' (nearest: {near[0]})' if near else ''}")
    return f"{head}: {'; '.join(parts)}"


def _keep_dtypes(optimizer: Optimizer, saved: Mapping[int, Mapping[str, Any]]) -> None:
    """Undoes torch's conversion of loaded state tensors to the parameters' dtype, which rounds fp32 states."""
    held = [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]
    for index, values in saved.items():
        state = optimizer.state[held[index]]
        for key, value in values.items():
            now = state.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                state[key] = value.to(now.device, copy=True)
