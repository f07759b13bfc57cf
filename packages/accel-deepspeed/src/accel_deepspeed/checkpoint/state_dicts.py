"""State dicts of DeepSpeed's engines by FQN, as full tensors or DTensors.

At every ZeRO stage a parameter's weight and optimizer state are assembled one tensor at a time, and each rank keeps its
rows. A state therefore fits any other stage, world size and backend, and no rank ever holds more than its shard and one
full tensor.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.ops import state_dicts as states
from accel_backends.ops.dtensor import gathered, is_dtensor
from accel_backends.ops.fqn import first_names, innermost, named_parameters
from accel_backends.ops.state_dicts import GROUPS, PARAMS, STATE, differences, fitted_groups
from accel_deepspeed.engine.optimizers import is_host
from accel_deepspeed.tensor_parallel.shards import full_of_shard, local_shape_of, shape_of, shard_of_full
from accel_deepspeed.zero.partitions import Partition, Partitions
from accel_state.errors import CheckpointMismatchError
from accel_state.watchdog.decorator import recorded

STEP = "step"


@final
@dataclass(frozen=True, slots=True)
class PartitionLayout:
    """Layout of saved states: the mesh over which they are sharded (None: full), and the names in each parameter group.

    Attributes:
        mesh: one-dimensional mesh over which tensors are sharded.
        groups: FQNs of each group's parameters, as in the optimizer before the engine was created.
    """

    mesh: Any
    groups: tuple[tuple[str, ...], ...]

    def sharded(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows of a full tensor, as a DTensor."""
        if self.mesh is None or full.dim() == 0:
            return full
        from torch.distributed.tensor import DTensor, Shard, distribute_tensor

        placed = distribute_tensor(full, self.mesh, [Shard(0)], src_data_rank=None)
        local = placed.to_local().clone()  # so that the memory of the full tensor is freed
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())

    def empty(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns an uninitialised tensor of the parameter's full shape, sharded like its states."""
        shape = shape_of(parameter)
        if self.mesh is None or not shape:
            return torch.empty(shape, dtype=torch.float32, device=parameter.device)
        from torch.distributed.tensor import Shard, empty

        made: torch.Tensor = empty(shape, dtype=torch.float32, device_mesh=self.mesh, placements=[Shard(0)])
        return made


# ----------------------------------------------------------------------------------------------------- one tensor


def full_of(parts: Partitions, parameter: nn.Parameter, key: str | None = None) -> torch.Tensor:
    """Returns a parameter's weight in the optimizer's dtype, or one of its optimizer states, in full on every rank.

    Collective: every rank of the group must call this.
    """
    import torch.distributed as dist

    shape = local_shape_of(parameter)
    with parts.held(parameter) as part:
        dtype = _dtype_elsewhere(parts, key) if part.flat is None else _source(parts, part, key).dtype
        full = torch.zeros(shape.numel(), dtype=dtype, device=parts.engine.device)
        if part.size and part.flat is not None:
            full.narrow(0, part.start, part.size).copy_(part.of(_source(parts, part, key)))
    if dist.get_world_size(parts.group(parameter)) > 1 and shape.numel() and parts.spread:
        dist.all_reduce(full, group=parts.group(parameter))
    return full_of_shard(parameter, full.view(shape))


def put_full(parts: Partitions, parameter: nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
    """Writes this rank's shard of a full weight or state."""
    put_part(parts, parameter, shard_of_full(parameter, value), key)


def put_part(parts: Partitions, parameter: nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
    """Writes this rank's shard of a weight or state; ``value`` is the tensor-parallel shard (full without AutoTP)."""
    with parts.held(parameter, changed=True) as part:
        if part.size and part.flat is not None:
            target = part.of(_source(parts, part, key))
            target.copy_(value.reshape(-1).narrow(0, part.start, part.size))


def _dtype_elsewhere(parts: Partitions, key: str | None) -> torch.dtype:
    """Returns the dtype of a weight or state that only other ranks have, which is the dtype of this rank's own ones."""
    flats = parts.flats()
    found = flats if key is None else [parts.state[flat][key] for flat in flats if key in parts.state.get(flat, ())]
    return found[0].dtype if found else torch.float32


def _source(parts: Partitions, part: Partition, key: str | None) -> torch.Tensor:
    assert part.flat is not None
    if key is None:
        return part.flat
    found: torch.Tensor = parts.state[part.flat][key]
    return found


# ---------------------------------------------------------------------------------------------------- the model


def model_state(engine: Any, parts: Partitions | None, layout: PartitionLayout) -> dict[str, Any]:
    """Returns parameters, in fp32 if the optimizer has master weights, and full buffers.

    Collective: every rank of the group must call this.
    """
    return {
        name: layout.sharded(full_weight(parts, value)) if isinstance(value, nn.Parameter) else value
        for name, value in _entries(engine).items()
    }


def _entries(engine: Any) -> dict[str, Any]:
    """Returns parameters, buffers and extra states by FQN, in the order of the model's own state dict.

    A parameter has its FQN also if a ``state_dict`` hook renames or leaves out its entry: the hook's entry has the
    compute dtype, and no elements at stage 3. Such parameters are last.
    """
    parameters = named_parameters(engine)
    own = set(first_names(innermost(engine)).values())
    return _not_of(parameters.values(), states.model_state(engine), known=own) | parameters


def _not_of(
    parameters: Collection[nn.Parameter], state: Mapping[str, Any], *, known: Collection[str]
) -> dict[str, Any]:
    """Returns the entries of a state dict with ``known`` names, and others that are no memory of a parameter."""
    added = {name: value for name, value in state.items() if name not in known and isinstance(value, torch.Tensor)}
    if not added:
        return dict(state)
    storages = {one.untyped_storage().data_ptr() for one in parameters} - {0}
    freed = [one for one in parameters if not one.numel()]  # at stage 3, each an empty tensor of its own
    renamed = {
        name
        for name, value in added.items()
        if value.untyped_storage().data_ptr() in storages or any(map(value.is_set_to, freed))
    }
    return {name: value for name, value in state.items() if name not in renamed}


def full_weight(parts: Partitions | None, parameter: nn.Parameter) -> torch.Tensor:
    """Returns a full parameter: the optimizer's master weight, or in the compute dtype if it has none.

    Collective: every rank of the group must call this.
    """
    if parts is not None and parts.holds(parameter):
        return full_of(parts, parameter)
    if not hasattr(parameter, "ds_id"):
        return full_of_shard(parameter, parameter.detach())
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        part = parameter.detach().clone()
    return full_of_shard(parameter, part)


def load_model_state(engine: Any, parts: Partitions | None, state: Mapping[str, Any]) -> None:
    """Loads validated values into weights, master weights and buffers.

    Collective: every rank of the group must call this.
    """
    parameters = named_parameters(engine)
    for name, parameter in parameters.items():
        if name not in state:
            continue
        value = gathered(state[name]).detach().to(engine.device)
        if parts is not None and parts.holds(parameter):
            put_full(parts, parameter, value)
        else:
            _set_computed(parameter, value)
    if parts is not None:
        parts.refresh()
    others = {name: value for name, value in state.items() if name not in parameters}
    states.load_model_state(engine, others, strict=False, place=lambda value, _: _gathered(value))


def _set_computed(parameter: nn.Parameter, value: torch.Tensor) -> None:
    value = shard_of_full(parameter, value).view(local_shape_of(parameter))
    if not hasattr(parameter, "ds_id"):
        with torch.no_grad():
            parameter.copy_(value)
        return
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        parameter.copy_(value)


def _gathered(value: Any) -> Any:
    return gathered(value) if isinstance(value, torch.Tensor) else value


def fitted_state(engine: Any, state: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Returns a validated state under the FQNs by which the engine's parameters and buffers are stored.

    Raises:
        CheckpointMismatchError: names are missing or unknown (``strict``), or shapes differ.
    """
    stored = first_names(innermost(engine))
    wanted = _entries(engine)
    shapes = {name: tuple(shape_of(value)) for name, value in wanted.items() if isinstance(value, torch.Tensor)}
    given = {stored.get(name, name): value for name, value in state.items()}
    missing = [name for name in wanted if name not in given]
    unexpected = [name for name in given if name not in wanted]
    if strict and (missing or unexpected):
        raise CheckpointMismatchError(
            differences(type(innermost(engine)).__name__, sorted(missing), unexpected, sorted(wanted))
        )
    for name, shape in shapes.items():
        if name in given and tuple(given[name].shape) != shape:
            raise CheckpointMismatchError(
                f"state of another {type(innermost(engine)).__name__}: {name} is {tuple(given[name].shape)} here and "
                f"{shape} in the model"
            )
    return {name: value for name, value in given.items() if name in wanted}


def full_state(engine: Any, parts: Partitions | None, *, keep: bool) -> dict[str, Any]:
    """Returns full tensors in host memory, assembled one at a time; an empty dict without ``keep``.

    Without ``parts``, weights have the compute dtype.

    Collective: every rank of the group must call this.
    """
    gather = recorded("get_state_dict")(_full_state) if engine.zero_optimization() else _full_state
    return gather(engine, parts, keep=keep)


def _full_state(engine: Any, parts: Partitions | None, *, keep: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in _entries(engine).items():
        full = full_weight(parts, value) if isinstance(value, nn.Parameter) else value
        if keep:
            found[name] = full.detach().to("cpu", copy=True) if isinstance(full, torch.Tensor) else full
    return found


# ------------------------------------------------------------------------------------------------- the optimizer


def optimizer_state(engine: Any, parts: Partitions, layout: PartitionLayout) -> dict[str, Any]:
    """Returns the optimizer's state by FQN. Collective: every rank of the group must call this."""
    parameters = named_parameters(engine)
    keys = _tensor_keys(parts)
    numbers = _numbers(parts)
    state: dict[str, dict[str, Any]] = {}
    for name in (name for group in layout.groups for name in group):
        parameter = parameters[name]
        if not parts.holds(parameter) or not (keys or numbers):
            continue
        found: dict[str, Any] = {key: layout.sharded(full_of(parts, parameter, key)) for key in keys}
        behind = parts.behind.get(parameter, 0)
        state[name] = {**_copied(numbers.get(_group_of(layout, name), {}), behind=behind), **found}
    return {STATE: state, GROUPS: group_options(engine.basic_optimizer, layout.groups)}


def load_optimizer_state(engine: Any, parts: Partitions, layout: PartitionLayout, state: Mapping[str, Any]) -> None:
    """Loads an ``optimizer_state`` of any backend whose names and groups have been validated.

    Collective: every rank of the group must call this.
    """
    parameters = named_parameters(engine)
    saved = state[STATE]
    _load_options(engine, layout, state)
    parts.behind.clear()
    if not saved:
        for flat in parts.flats():
            parts.state.pop(flat, None)
        return
    tensors = _saved_tensors(saved, parameters)
    plain = is_host(engine.basic_optimizer)
    numbers = parts.group_numbers()
    counts = any(STEP in values for values in saved.values())
    for group, names in enumerate(layout.groups):
        number = _common_numbers([saved[name] for name in names if name in saved], names, set(tensors))
        if counts:
            number.setdefault(STEP, 0.0)  # no parameter of the group had a gradient so far
        stepped = [name for name in names if parts.holds(parameters[name])]
        parts.behind.update({parameters[name]: steps for name, steps in _behind(saved, stepped, number).items()})
        for flat in (one for one in parts.flats() if numbers[id(one)] == group):
            with parts.opened(flat):
                own = parts.state[flat]
                before = dict(own)  # DeepSpeed finds states on disk by their tensor
                own.clear()
                own.update(_copied(number, plain=plain))
                for key, dtype in tensors.items():
                    made = torch.zeros_like(flat, dtype=dtype, requires_grad=False)
                    own[key] = before[key].zero_() if _is_alike(before.get(key), made) else made
    for name, parameter in ((name, parameters[name]) for names in layout.groups for name in names):
        if not parts.holds(parameter) or name not in saved:
            continue
        for key in tensors:
            put_full(parts, parameter, gathered(saved[name][key]).detach().to(engine.device), key)
    parts.states_changed()


def _copied(values: Mapping[str, Any], *, plain: bool = False, behind: int = 0) -> dict[str, Any]:
    """Copies non-elementwise state values, because torch increments step counters in place.

    ``step`` becomes a tensor, as in torch's optimizers; with ``plain`` an integer, as in DeepSpeed's host optimizers.
    ``behind``: number of counted steps that the parameter missed.
    """
    copied = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
    if STEP in copied:
        steps = float(copied[STEP]) - behind
        copied[STEP] = int(steps) if plain else torch.tensor(steps)
    return copied


def _is_alike(one: Any, other: torch.Tensor) -> bool:
    return isinstance(one, torch.Tensor) and (one.shape, one.dtype) == (other.shape, other.dtype)


def _tensor_keys(parts: Partitions) -> list[str]:
    """Returns the keys of the elementwise states; equal on all ranks, because ranks step together."""
    for flat in parts.flats():
        own = parts.state.get(flat)
        if own:
            return [k for k, v in own.items() if isinstance(v, torch.Tensor) and v.shape == flat.shape and v.dim() > 0]
    return []


def _numbers(parts: Partitions) -> dict[int, dict[str, Any]]:
    """Returns optimizer state that is not per element (Adam's ``step``), by param-group index."""
    found: dict[int, dict[str, Any]] = {}
    keys = _tensor_keys(parts)
    groups = parts.group_numbers()
    for flat in parts.flats():
        own = parts.state.get(flat)
        if own:
            number = groups[id(flat)]
            found.setdefault(number, {key: value for key, value in own.items() if key not in keys})
    return found


def _group_of(layout: PartitionLayout, name: str) -> int:
    return next(index for index, names in enumerate(layout.groups) if name in names)


def _saved_tensors(saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.dtype]:
    """Returns keys and dtypes of the saved elementwise states."""
    found: dict[str, torch.dtype] = {}
    for name, values in saved.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == shape_of(parameters[name]) and key != STEP:
                found.setdefault(key, value.dtype if value.dtype.is_floating_point else torch.float32)
    return found


def _common_numbers(values: Sequence[Mapping[str, Any]], names: Sequence[str], tensors: set[str]) -> dict[str, Any]:
    """Returns the non-elementwise state of a group, of which DeepSpeed keeps one value for all parameters.

    Raises:
        CheckpointMismatchError: values other than ``step`` differ between parameters.
    """
    common: dict[str, Any] = {}
    for own in values:
        for key, value in own.items():
            if key in tensors:
                continue
            if is_dtensor(value):
                value = gathered(value)
            if key == STEP:
                common[key] = max(float(value), common.get(key, 0.0))
                continue
            if key in common and float(common[key]) != float(value):
                raise CheckpointMismatchError(
                    f"optimizer state with {key} {float(common[key]):g} of some parameters and {float(value):g} of "
                    f"others of one group ({', '.join(names[:3])}, ...), of which DeepSpeed keeps one; put parameters "
                    "that began to train at different times into groups of their own"
                )
            common.setdefault(key, value)
    return common


def _behind(saved: Mapping[str, Any], names: Sequence[str], number: Mapping[str, Any]) -> dict[str, int]:
    """Returns, by FQN, how many of a group's steps a parameter missed because it had no gradient."""
    if STEP not in number:
        return {}
    own = {name: saved.get(name, {STEP: 0.0}).get(STEP, number[STEP]) for name in names}
    missed = {name: int(number[STEP] - float(gathered(steps))) for name, steps in own.items()}
    return {name: steps for name, steps in missed.items() if steps}


def group_options(optimizer: Optimizer, groups: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Returns the options of each group, with the FQNs of its parameters."""
    pairs = zip(optimizer.param_groups, groups, strict=True)
    return [{**group, PARAMS: list(names)} for group, names in pairs]


def _load_options(engine: Any, layout: PartitionLayout, state: Mapping[str, Any]) -> None:
    """Loads the saved options that each group of the optimizer has."""
    optimizer = engine.basic_optimizer
    for group, options in zip(optimizer.param_groups, fitted_groups(optimizer, layout.groups, state), strict=True):
        group.update({key: value for key, value in options.items() if key in group or key == "initial_lr"})
