"""Reader of the folders that DeepSpeed's ``engine.save_checkpoint`` writes, of any stage and number of ranks.

The files are pickles. Only tensors, plain values and a few of DeepSpeed's classes are accepted, and DeepSpeed does not
have to be installed.
"""

import math
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, final

import torch

from accel_backends.ops.state_dicts import GROUPS, PARAMS, STATE
from accel_deepspeed.config.ds_json import near
from accel_deepspeed.engine.loss_scale import COUNTS, scale_state
from accel_deepspeed.tensor_parallel.partition_map import PartMap
from accel_state.errors import CheckpointError

Shapes = Sequence[Mapping[str, torch.Size]]
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt$")
_EXPERT = re.compile(r"layer_\d+_expert_\d+_mp_rank_00_model_states\.pt$")
_EXPERTS_STATES = "expp_rank_0_mp_rank_00_optim_states.pt"


@final
@dataclass(frozen=True, slots=True)
class Folder:
    """One model and its optimizer, as full tensors in host memory.

    Attributes:
        model: tensors by FQN, in fp32 if the optimizer has master weights.
        optimizer: as ``ReplicatedStates.optimizer`` returns it; None if none was saved, or without names.
        counts: taken and skipped steps, by DeepSpeed's names.
        scale: loss scale of fp16, in the form of ``LossScaler.state_dict``; None without a loss scale.
    """

    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any] | None
    counts: dict[str, int]
    scale: dict[str, float | int] | None


class _Noted:
    """Placeholder of an instance of a DeepSpeed class; the pickled attributes are its attributes."""


class _Stage(IntEnum):
    """Placeholder of DeepSpeed's ``ZeroStageEnum``, with the same members."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


def _member(stages: Any, name: str) -> _Stage:
    """Placeholder of ``getattr``, with which some versions of Python 3.11 pickle enum members."""
    if stages is not _Stage or name not in _Stage.__members__:
        raise pickle.UnpicklingError(f"getattr({stages!r}, {name!r})")
    return _Stage[name]


_STAND_INS: Mapping[str, Any] = {
    "builtins.getattr": _member,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _Stage,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _Noted,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _Noted,
    "deepspeed.utils.tensor_fragment.fragment_address": _Noted,
}


def read_folder(folder: str | Path, tag: str | None = None, *, groups: Sequence[Sequence[str]] | None = None) -> Folder:
    """Reads a checkpoint by its tag; None: the tag in the file ``latest``.

    Args:
        folder: the folder that was passed to ``save_checkpoint``.
        tag: tag of the checkpoint.
        groups: FQNs of the parameters in each param group, which a stage 0 folder does not contain; None: those of the
            full model in its order.

    Raises:
        CheckpointError: no such checkpoint; a rank's file is missing; a file has objects of other classes; or states
            are split over pipeline or expert ranks, or over tensor-parallel ranks without a partition map.
    """
    place = _tagged(Path(folder), tag)
    names = sorted(path.name for path in place.iterdir())
    other = [name for name in names if re.match("layer_|.*expert|.*expp_rank", name)]
    other = [name for name in other if name != _EXPERTS_STATES and not _EXPERT.match(name)]
    if other:
        raise CheckpointError(
            f"{place} is spread over pipeline or expert ranks ({other[0]}), which is not read; convert it with "
            "DeepSpeed's ds_to_universal, or save it with save_state"
        )
    sharing = {int(found[1]) for name in names if (found := re.search(r"mp_rank_(\d+)", name))}
    if missing := sorted(set(range(max(sharing, default=0) + 1)) - sharing):
        raise CheckpointError(f"{place} lacks the states of tensor-parallel rank {missing[0]}")
    parts = [_read_rank(place, names, rank, groups) for rank in sorted(sharing)]
    facts = parts[0][1]
    if len(parts) != (ranks := int(facts.get("mp_world_size") or 1)):
        raise CheckpointError(f"{place} was saved by {ranks} tensor-parallel ranks, and has the states of {len(parts)}")
    full = parts[0][0] if len(parts) == 1 else _put_together(place, [part for part, _ in parts], facts)
    full.model.update({name: full.model[first] for name, first in _aliases(facts).items() if first in full.model})
    return full


def _read_rank(
    place: Path, names: Sequence[str], sharing: int, groups: Sequence[Sequence[str]] | None
) -> tuple[Folder, Mapping[str, Any]]:
    """Reads the states of one tensor-parallel rank; also returns the contents of its first file."""
    optim = _by_rank(place, names, "optim", sharing)
    models = _by_rank(place, names, "model", sharing) or [_load(place / f"mp_rank_{sharing:02d}_model_states.pt")]
    facts = models[0]
    _add_experts(place, names, facts)
    if not optim:
        if facts.get("param_shapes"):
            raise CheckpointError(f"{place} was saved with ZeRO, and lacks the optim states of its ranks")
        state, optimizer, scale = _full_state(facts, groups)
    elif int(optim[0]["optimizer_state_dict"]["zero_stage"]) == 3:
        state, optimizer, scale = _sharded(models, [one["optimizer_state_dict"] for one in optim])
    else:
        state, optimizer, scale = _partitioned(facts, [one["optimizer_state_dict"] for one in optim])
    for name in _aliases(facts):
        state.pop(name, None)
    counts = {name: int(facts[name]) for name in COUNTS if name in facts}
    return Folder(state, optimizer, counts, scale), facts


def _add_experts(place: Path, names: Sequence[str], facts: dict[str, Any]) -> None:
    """Adds the experts of ``deepspeed.moe`` to the other parameters of a model; every rank has to have all experts."""
    experts: dict[str, torch.Tensor] = {}
    for name in filter(_EXPERT.match, names):
        experts |= _load(place / name)
    if (groups := facts.get("param_shapes")) and (spread := experts.keys() - {name for one in groups for name in one}):
        raise CheckpointError(
            f"{place} has experts of which each rank had some ({min(spread)}), which is not read; DeepSpeed's "
            "load_checkpoint reads it with as many ranks"
        )
    facts["module"] |= experts
    if _EXPERTS_STATES in names:
        facts |= _load(place / _EXPERTS_STATES)


def _aliases(facts: Mapping[str, Any]) -> dict[str, str]:
    """Maps further names of tied parameters to the first name; files store the further ones with rounded values."""
    found: dict[str, str] = dict(facts.get("shared_params") or {})
    seen: dict[Any, str] = {}
    for name, value in facts["module"].items():
        if not isinstance(value, torch.Tensor):
            continue
        place = value.untyped_storage().data_ptr(), value.storage_offset(), value.shape
        if value.numel() and (first := seen.setdefault(place, name)) != name:
            found[name] = first
    return found


def _tagged(folder: Path, tag: str | None) -> Path:
    if tag is None:
        latest = folder / "latest"
        if not latest.is_file():
            raise CheckpointError(f"{folder} has no file 'latest' that names a checkpoint of DeepSpeed; give its tag")
        tag = latest.read_text().strip()
    if not (folder / tag).is_dir():
        known = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        raise CheckpointError(
            f"{folder} has no checkpoint {tag!r}; it has {', '.join(known) or 'none'}{near(tag, known)}"
        )
    return folder / tag


def _by_rank(place: Path, names: Sequence[str], kind: str, sharing: int) -> list[dict[str, Any]]:
    matches = [match for name in names if (match := _RANK.search(name))]
    found = {int(one[1]): one.string for one in matches if one[3] == kind and int(one[2]) == sharing}
    if missing := sorted(set(range(max(found, default=-1) + 1)) - set(found)):
        raise CheckpointError(f"{place} lacks the {kind} states of rank {missing[0]}")
    parts = [_load(place / found[rank]) for rank in sorted(found)]
    if parts and kind == "optim":
        count = parts[0]["optimizer_state_dict"]["partition_count"]
        ranks = max(count) if isinstance(count, list | tuple) else int(count)
        if ranks != len(parts):
            raise CheckpointError(f"{place} was saved by {ranks} ranks, and has the {kind} states of {len(parts)}")
    return parts


def _load(path: Path) -> dict[str, Any]:
    allowed = [(stand_in, name) for name, stand_in in _STAND_INS.items()]
    try:
        with torch.serialization.safe_globals(allowed):  # type: ignore[arg-type]
            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} lacks {path.name}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, which is not let in: {str(error).splitlines()[0]}"
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return found


# --------------------------------------------------------------------------------------------- tensor parallelism


def _put_together(place: Path, parts: Sequence[Folder], facts: Mapping[str, Any]) -> Folder:
    """Assembles full tensors from the shards of the tensor-parallel ranks."""
    told = facts.get("universal_checkpoint_info") or {}
    maps = told.get("affine_map", {}).get("params", {})
    if told.get("affine_map", {}).get("version") != 1:
        raise CheckpointError(
            f"{place} is spread over {len(parts)} tensor-parallel ranks, and does not say what each of them has, as "
            "AutoTP of DeepSpeed 0.19 does; convert it with DeepSpeed's ds_to_universal, or save it with save_state"
        )
    buffers = set(facts.get("buffer_names") or ())

    def join(name: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
        described = maps.get(f"^{re.escape(name)}$")
        if described is None and name in buffers:
            return values[0]
        try:
            if described is None:
                reasons = told.get("autotp_unsupported_parameter_patterns") or {}
                raise ValueError(reasons.get(f"^{re.escape(name)}$", "nothing is said of it"))
            found = PartMap.of(described)
            return found.join(values) if found.cut else values[0]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{place}: {name} cannot be put together of ranks' parts: {error}") from error

    first, *others = parts
    for other in others:
        if other.model.keys() != first.model.keys() or _states(other).keys() != _states(first).keys():
            raise CheckpointError(f"{place}: its tensor-parallel ranks have parameters of other names")
    model = {name: join(name, [part.model[name] for part in parts]) for name in first.model}
    if first.optimizer is None:
        return Folder(model, None, first.counts, first.scale)
    state = {
        name: {
            key: join(name, [_states(part)[name][key] for part in parts])
            if isinstance(value, torch.Tensor) and value.dim()
            else value
            for key, value in values.items()
        }
        for name, values in _states(first).items()
    }
    return Folder(model, {**first.optimizer, STATE: state}, first.counts, first.scale)


def _states(part: Folder) -> Mapping[str, dict[str, Any]]:
    """Returns the optimizer's state by FQN."""
    return {} if part.optimizer is None else part.optimizer[STATE]


# ------------------------------------------------------------------------------------------------------- by stage


def _states_of(
    first: Mapping[str, Any], names: Iterable[str], join: Callable[[str], Iterator[tuple[str, torch.Tensor]]]
) -> dict[str, dict[str, Any]]:
    """Returns optimizer states by FQN, from those of the first rank's first flat tensor.

    ``join``: returns the values of all parameters ``names`` for an elementwise state.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in names} if first else {}
    for key, value in first.items():
        elementwise = isinstance(value, torch.Tensor) and value.dim()
        for name, own in join(key) if elementwise else [(name, _own(value)) for name in found]:
            found[name][key] = own
    return found


def _full_state(
    facts: Mapping[str, Any], groups: Sequence[Sequence[str]] | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None, Any]:
    """Reads a stage 0 state: unsharded parameters and states, in 16 bits with fp32 master weights beside."""
    model = dict(facts["module"])
    saved = facts.get("optimizer")
    if saved is None:
        return model, None, None
    inner = saved.get("optimizer_state_dict", saved)
    further = {*(facts.get("buffer_names") or ()), *_aliases(facts)}
    names = [name for here in groups for name in here] if groups else [name for name in model if name not in further]
    held = [index for group in inner[GROUPS] for index in group[PARAMS]]
    if len(held) != len(names) and groups is None:
        return model, None, None
    if len(held) != len(names):
        raise CheckpointError(
            f"the optimizer of this folder of stage 0 has {len(held)} parameters, and {len(names)} are known "
            f"({', '.join(names[:3])}, ...); build the optimizer that was saved"
        )
    options = [{**group, PARAMS: [names[index] for index in group[PARAMS]]} for group in inner[GROUPS]]
    state = {names[index]: dict(values) for index, values in inner[STATE].items()}
    copies = [tensor.detach() for group in saved.get("fp32_groups", ()) for tensor in group]
    model.update(zip(names, copies, strict=False))
    scale = scale_state(saved) if saved.get("dynamic_loss_scale") else None
    return model, {STATE: state, GROUPS: options}, scale


def _partitioned(
    facts: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, torch.Tensor], dict[str, Any], Any]:
    """Reads a stage 1 or 2 state: each group is flattened, and each rank has the next slice of it."""
    model = dict(facts["module"])
    bases = [rank["base_optimizer_state"] for rank in ranks]
    state: dict[str, dict[str, Any]] = {}
    options: list[dict[str, Any]] = []
    for number, shapes in enumerate(facts["param_shapes"]):
        options.append({**bases[0][GROUPS][number], PARAMS: list(shapes)})
        model.update(_cut(_line([rank["single_partition_of_fp32_groups"][number] for rank in ranks]), shapes))
        states = [base[STATE].get(number, {}) for base in bases]
        state |= _states_of(states[0], shapes, lambda key: _cut(_line([one[key] for one in states]), shapes))  # noqa: B023
    return model, {STATE: state, GROUPS: options}, _scale_of(ranks[0])


def _cut(flat: torch.Tensor, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    start = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        yield name, flat.narrow(0, start, size).view(shape).detach().clone()
        start += size


def _sharded(
    models: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, torch.Tensor], dict[str, Any], Any]:
    """Reads a stage 3 state: every parameter is split into as many equal slices as there are ranks."""
    facts = models[0]
    buffers = set(facts.get("buffer_names") or ())
    model = {name: value for name, value in facts["module"].items() if name in buffers}
    for name, shape in (facts.get("frozen_param_shapes") or {}).items():
        fragments = [one["frozen_param_fragments"][name].view(-1) for one in models]
        model[name] = torch.cat(fragments)[: shape.numel()].view(shape).detach().clone()
    inner = [rank["optimizer_state_dict"] for rank in ranks]
    shapes: Shapes = facts["param_shapes"]
    options = [{**group, PARAMS: list(names)} for group, names in zip(inner[0][GROUPS], shapes, strict=True)]
    every = {name: shape for group in shapes for name, shape in group.items()}
    model.update(_joined([_line(rank["fp32_flat_groups"]) for rank in ranks], every))
    order = sorted(inner[0][STATE])
    state = _states_of(
        inner[0][STATE][order[0]] if order else {},
        every,
        lambda key: _joined([_line([one[STATE][index][key] for index in order]) for one in inner], every),
    )
    return model, {STATE: state, GROUPS: options}, _scale_of(ranks[0])


def _own(value: Any) -> Any:
    """Copies a step counter for each parameter, because torch increments counters in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _line(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([piece.view(-1) for piece in pieces])


def _joined(lines: Sequence[torch.Tensor], shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    start = 0
    for name, shape in shapes.items():
        size = -(-shape.numel() // len(lines))
        full = torch.cat([line.narrow(0, start, size) for line in lines])
        yield name, full[: shape.numel()].view(shape).detach().clone()
        start += size


def _scale_of(rank: Mapping[str, Any]) -> dict[str, float | int] | None:
    return scale_state(vars(rank["loss_scaler"])) if rank.get("dynamic_loss_scale") else None
