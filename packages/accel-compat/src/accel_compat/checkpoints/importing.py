"""``accel ckpt import``: a folder that Accelerate wrote becomes a checkpoint of accel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from accel_ckpt.tools.rank_states import save_for_ranks
from accel_compat.checkpoints.folder import DDP, AccelerateFolder
from accel_compat.checkpoints.optimizer_names import (
    BuiltObjects,
    Shape,
    is_numbered,
    named,
    ordered,
    saved_shapes,
    unordered,
)
from accel_precision import LossScaler
from accel_state.errors import CheckpointError

_GROWTH = ("_growth_tracker", "growth_tracker")
_REMOVED = ("verbose",)
"""Keys of schedules that torch no longer has."""


@final
@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import wrote.

    Attributes:
        path: the checkpoint.
        layout: how Accelerate had saved it.
        states: names of the states.
        ranks: number of ranks with a random state.
        notes: what the run that loads it should know.
    """

    path: str
    layout: str
    states: tuple[str, ...]
    ranks: int
    notes: tuple[str, ...]


def import_folder(
    folder: str | Path, out: str | Path, *, model: Any = None, trust_pickle: bool = False
) -> ImportReport:
    """Writes the checkpoint ``out`` from a folder that ``save_state`` of Accelerate wrote.

    Args:
        folder: the folder, of one process, DDP, FSDP (full, or sharded by torch's distributed checkpoints) or DeepSpeed.
        out: the checkpoint, which must not exist.
        model: what the run prepared, for the names of parameters that an optimizer numbers: a model, a tuple of models
            and optimizers, or a function that builds them, which is called on the meta device.
        trust_pickle: read registered objects that hold more than tensors and plain values, which runs their code.

    Raises:
        CheckpointError: the folder is not readable in full, the names of parameters are ambiguous, or ``out`` exists.
    """
    found = AccelerateFolder.read(Path(folder), trust_pickle=trust_pickle)
    built = None if model is None else _built(model)
    state: dict[str, Any] = {}
    _add(state, "model", _fitting(found.models, built))
    _add(state, "optimizer", [_optimizer(found, built, index) for index in range(len(found.optimizers))])
    _add(state, "scheduler", [_schedule(one) for one in found.schedulers])
    if found.scaler is not None:
        state["scaler"] = _scaler(found.scaler)
    state["clock"] = {"steps": {"": [found.step, 0, 1]}}
    _add(state, "custom", found.custom)
    unknown = ["loader"]
    if found.layout == "deepspeed" and not found.schedulers:
        unknown.append("scheduler")
    metadata = {
        "seed": _seed(found.random[0]["torch_manual_seed"]),
        "unknown": unknown,
        "imported": {"from": "accelerate", "layout": found.layout, "folder": str(found.path)},
        "user": {},
    }
    local = [{"rng": _random(one, rank)} for rank, one in enumerate(found.random)]
    written = save_for_ranks(out, state, local, metadata=metadata)
    names, path = tuple(written.names), str(written.path)
    written.close()
    return ImportReport(path, found.layout, names, len(local), _notes(found, unknown, has_model=built is not None))


def _notes(found: AccelerateFolder, unknown: Sequence[str], *, has_model: bool) -> tuple[str, ...]:
    notes = ["Accelerate saves no position in the data: loaders start at the beginning of an epoch"]
    ranks = len(found.random)
    if found.schedulers and ranks > 1:
        notes.append(
            f"Accelerate moved the schedule {ranks} times per optimizer step, unless split_batches was set: load it into "
            'an Accelerator(scheduler_steps="per_process")'
        )
    for place, weights in enumerate([] if has_model else found.models):
        if weights and all(name.startswith(DDP) for name in weights):
            notes.append(
                f"every name of model {place} begins with {DDP}, as under DDP: give --model MODULE:BUILD if the model's own "
                "names do not"
            )
    if len(found.optimizers) < len(found.models) and found.layout == "deepspeed":
        notes.append(
            "DeepSpeed's stage 0 saves an optimizer without names of its parameters, which is not imported: load with "
            "load_state(parts=...)"
        )
    if "scheduler" in unknown:
        notes.append("a schedule inside of DeepSpeed's engine is not imported: one that the run has starts anew")
    return tuple(notes)


def _built(model: Any) -> BuiltObjects:
    if callable(model) and not isinstance(model, torch.nn.Module):
        with torch.device("meta"):
            model = model()
    return BuiltObjects.of(model)


def _add(state: dict[str, Any], kind: str, parts: Sequence[Any]) -> None:
    for place, part in enumerate(parts):
        state[kind if place == 0 else f"{kind}_{place}"] = part


def _fitting(models: Sequence[Mapping[str, Any]], built: BuiltObjects | None) -> list[dict[str, Any]]:
    """Weights of each model, compared with the names of those that were built."""
    if built is not None and len(built.models) != len(models):
        raise CheckpointError(f"the folder has {len(models)} models, and --model builds {len(built.models)}")
    made = []
    for place, weights in enumerate(models):
        if built is not None:
            known = set(built.models[place].state_dict())
            weights = _unwrapped(weights, known)
            if foreign := sorted(set(weights) - known):
                raise CheckpointError(
                    f"model {place} of the folder has {foreign[0]}, which that of --model does not have; it has "
                    f"{', '.join(sorted(known)[:3])}, ..."
                )
        made.append({name: one for name, one in weights.items() if isinstance(one, torch.Tensor)})
    return made


def _unwrapped(weights: Mapping[str, Any], known: set[str]) -> Mapping[str, Any]:
    """Weights without the prefix of DDP, which wraps the model of a single rank too, if the built model has none."""
    if all(name.startswith(DDP) for name in weights) and not any(name.startswith(DDP) for name in known):
        return {name.removeprefix(DDP): one for name, one in weights.items()}
    return weights


def _optimizer(found: AccelerateFolder, built: BuiltObjects | None, index: int) -> dict[str, Any]:
    """An optimizer's state under the names of its parameters."""
    state = found.optimizers[index]
    if not is_numbered(state):
        return {"state": dict(state["state"]), "param_groups": list(state["param_groups"])}
    groups = None if built is None else built.groups(index)
    if groups is not None:
        return named(state, groups)
    shapes = saved_shapes(state)
    places = [index, *(place for place in range(len(found.models)) if place != index)]
    ways: list[list[list[str]]] | None = []
    for place in places[: len(found.models)] if index < len(found.models) else places[1:]:
        ways = _ways(found, built, place, shapes)
        if ways != []:
            break
    if ways is not None and len(ways) == 1:
        return named(state, ways[0])
    which = "its parameters fit those of no model" if ways == [] else "its parameters could have several names"
    given = "return the optimizer as well: (model, optimizer)" if built is not None else "give --model MODULE:BUILD"
    raise CheckpointError(
        f"{found.path}: optimizer {index} was saved by the numbers of its parameters, and {which}; {given}"
    )


def _ways(
    found: AccelerateFolder, built: BuiltObjects | None, place: int, shapes: Sequence[Sequence[Shape | None]]
) -> list[list[list[str]]] | None:
    if built is not None:
        every = built.shapes(place)
        trained = {name: one for name, one in every.items() if built.models[place].get_parameter(name).requires_grad}
        total = sum(map(len, shapes))
        exact = next((known for known in (every, trained) if len(known) == total), every)
        return ordered(shapes, exact)
    known = {name: tuple(one.shape) for name, one in found.models[place].items()}
    if found.is_ordered[place]:
        return ordered(shapes, known)
    names = unordered(shapes, known)
    return [] if names is None else [names]


def _schedule(state: Mapping[str, Any]) -> dict[str, Any]:
    """A schedule's state with the keys that torch has now."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    base = torch.optim.lr_scheduler.LRScheduler
    made: dict[str, Any] = {name: one for name, one in state.items() if name not in _REMOVED}
    if "last_epoch" in made and "_last_lr" in made:
        now = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([parameter], 1.0), 1).state_dict()
        private = {name: one for name, one in now.items() if name.startswith("_") and name in dir(base)}
        flags = {name: one for name, one in now.items() if name.startswith("_") and isinstance(one, bool)}
        made = {**private, **flags, **made}
    return made


def _scaler(state: Mapping[str, Any]) -> dict[str, Any]:
    """State of accel's loss scaler for that of torch's, or for the loss scale of DeepSpeed."""
    growth = next((state[name] for name in _GROWTH if name in state), 0)
    factors = {name: state[name] for name in LossScaler.FACTORS if name in state}
    return {LossScaler.SCALE: float(state["scale"]), LossScaler.TRACKER: int(growth), **factors}


def _seed(state: torch.Tensor) -> int:
    """Seed from which a random state of torch began."""
    generator = torch.Generator()
    generator.set_state(state.cpu())
    return generator.initial_seed()


def _random(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """One rank's random states, in the form of ``accel_state.rng``."""
    version, words, gauss = state["random_state"]
    made: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "torch": state["torch_manual_seed"].cpu(),
    }
    _, key, place, has_gauss, cached = state["numpy_random_seed"]
    words_of_numpy = torch.tensor([int(word) for word in key], dtype=torch.int64)
    made["numpy"] = {
        "key": words_of_numpy,
        "pos": int(place),
        "has_gauss": int(has_gauss),
        "gauss": float(cached),
    }
    for kind in ("cuda", "xpu", "npu", "hpu", "mlu", "musa", "sdaa"):
        states = state.get(f"torch_{kind}_manual_seed")
        if states is not None:
            listed = list(states) if isinstance(states, list | tuple) else [states]
            made["device"] = {
                "type": kind,
                "current": rank % max(1, len(listed)),
                "states": [one.cpu() for one in listed],
            }
    return made
