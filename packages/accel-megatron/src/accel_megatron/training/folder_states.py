"""States of an optimizer in Megatron-LM's folders: one tensor per parameter and state, whatever the degrees are.

Megatron-LM writes them with its plain optimizers, and with its distributed one under
``--dist-ckpt-optim-fully-reshardable``.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist

from accel_backends.ops.state_dicts import GROUPS, PARAMS, STATE, fitted_groups
from accel_megatron.training.gathering import chunk_name
from accel_megatron.training.optimizer import EngineOptimizer
from accel_megatron.training.stage import bare
from accel_precision.convert import accumulation_dtype
from accel_state.errors import CheckpointError

MASTERS = ("fp32_param", "param")
"""Names of master weights: of plain optimizers, and of the distributed one."""

# Several optimizers of a model, as Megatron-LM has them with experts, may be numbered.
_KEY = re.compile(r"(?P<prefix>(?:chained_\d+\.)?optimizer\.state\.(?P<state>[^.]+))\.(?P<name>.+)")
_BUFFERS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_NAMES = "accel_names"


@final
@dataclass(frozen=True, slots=True)
class FolderStates:
    """States that a folder has.

    Attributes:
        prefixes: for each name of a parameter in the folder, what stands before it in the names of its states.
        common: what the folder has beside tensors.
    """

    prefixes: Mapping[str, Mapping[str, str]]
    common: Mapping[str, Any]

    @classmethod
    def of(cls, keys: Collection[str], common: Mapping[str, Any]) -> "FolderStates":
        """Returns those of a folder with tensors of these names."""
        prefixes: dict[str, dict[str, str]] = {}
        for match in filter(None, map(_KEY.fullmatch, keys)):
            prefixes.setdefault(match["name"], {})[match["state"]] = match["prefix"]
        return cls(prefixes, common)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Options of the parameter groups, of all optimizers of the folder."""
        found = [one for one in _values(self.common.get("optimizer"), "param_groups") if isinstance(one, list)]
        return [group for groups in found for group in groups]

    @property
    def step(self) -> torch.Tensor | None:
        """Number of steps; None before the first one, and for optimizers that do not count."""
        counted = [*_values(self.common.get("optimizer"), "common_step"), *(one.get("step") for one in self.groups)]
        known = [one for one in counted if one is not None]
        return torch.tensor(float(known[0])) if known else None

    def wanted(self, model: Mapping[str, Any], trained: Collection[str]) -> dict[str, dict[str, Any]]:
        """Returns the tensors to load, in fp32 or fp64: master weights, and the states of the ``trained`` parameters.

        ``model``: this rank's weights by their names in megatron-core's model, described for megatron-core.
        """
        return {
            name: {
                state: _tensor(one, torch.empty_like(one.data, dtype=accumulation_dtype(one.data.dtype)), prefix)
                for state, prefix in self.prefixes.get(one.key, {}).items()
                if state in MASTERS or name in trained
            }
            for name, one in model.items()
            if isinstance(getattr(one, "data", None), torch.Tensor)
        }

    def options(self, one: EngineOptimizer) -> list[dict[str, Any]] | None:
        """Returns the saved options of each group; None if the folder does not say which parameters a group has.

        Raises:
            CheckpointMismatchError: the parameters or their grouping differ.
        """
        groups = [{**group, PARAMS: group[_NAMES]} for group in self.groups if _NAMES in group]
        aside = {_NAMES, "step", *_IDENTIFIERS}
        saved = [{key: value for key, value in group.items() if key not in aside} for group in groups]
        return fitted_groups(one.optimizer, one.groups, {STATE: {}, GROUPS: saved}) if saved else None


_IDENTIFIERS = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
"""Options by which Megatron-LM tells groups apart."""


def check_states(keys: Collection[str], common: Mapping[str, Any], folder: object) -> None:
    """Raises CheckpointError for a folder that has no states, or none that can be loaded with other degrees."""
    if any(map(_BUFFERS.match, keys)):
        raise CheckpointError(
            f"{folder} has the buffers of a distributed optimizer, which fit its own degrees only; nearest: write it "
            "with --dist-ckpt-optim-fully-reshardable, or load_folder(..., optimizer=False)"
        )
    if "optimizer" not in common:
        raise CheckpointError(
            f"{folder} has no states of an optimizer; nearest: load_folder(..., optimizer=False), which loads weights"
        )


def described_states(one: EngineOptimizer, model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the states of an optimizer as megatron-core saves them, by the optimizer's kind.

    ``model``: see ``FolderStates.wanted``.

    Collective: every rank of the group must call this.

    Raises:
        CheckpointError: a state that is no tensor of the shape of its parameter, or parameters with other numbers of
            steps.
    """
    held = one.held()
    step = _common_step(one, held)
    tensors = {
        name: {state: value for state, value in values.items() if state != "step" and value is not None}
        for name, values in held.items()
    }
    masters = one.masters()
    if one.distributed and not one.engine.in_16_bits:
        masters = {name: p.detach() for name, p in one.parameters.items() if p.requires_grad}
    described = {
        number: {
            state: _tensor(model[name], value, f"optimizer.state.{state}") for state, value in tensors[name].items()
        }
        for number, name in enumerate(tensors)
    }
    groups = list(map(_described_group, one.optimizer.param_groups, one.groups))
    if one.distributed:
        for number, name in enumerate(tensors):
            described[number]["param"] = _tensor(model[name], masters[name], "optimizer.state.param")
        counted = [group | ({} if step is None else {"step": step}) for group in groups]
        return {
            "optimizer": {"param_groups": counted},
            "param_state": described,
            "param_state_sharding_type": "fully_reshardable",
        }
    state: dict[Any, Any] = {**described, **({} if step is None else {"common_step": torch.tensor(step)})}
    plain = {"state": state, "param_groups": groups}
    if not one.engine.in_16_bits:
        return plain
    copies = [[_tensor(model[name], value, "optimizer.state.fp32_param") for name, value in masters.items()]]
    return {"optimizer": plain, "fp32_from_fp16_params": copies}


def load_states(one: EngineOptimizer, states: FolderStates, loaded: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Replaces the states of this rank's parameters, and the options of groups if the folder tells them apart.

    Raises:
        CheckpointMismatchError: see ``FolderStates.options``.
    """
    step, options = states.step, states.options(one)
    for group, values in zip(one.optimizer.param_groups, options or (), strict=options is not None):
        group.update(values)
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(one.trained):
        found[name] = {state: value for state, value in loaded.get(name, {}).items() if state not in MASTERS}
        if found[name] and step is not None:
            found[name]["step"] = step.clone()
    one.load(found)


def described_weights(chunks: Iterable[Any]) -> dict[str, Any]:
    """Returns this rank's weights as megatron-core saves them, by their names in its model."""
    return {
        chunk_name(number, name): value
        for number, chunk in enumerate(chunks)
        for name, value in bare(chunk).sharded_state_dict().items()
    }


def _tensor(weight: Any, value: torch.Tensor, prefix: str) -> Any:
    """Returns a tensor that is split over ranks as a weight is, with the weight's name behind ``prefix``."""
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    return make_sharded_optimizer_tensor(weight, value, prefix)


def _common_step(one: EngineOptimizer, held: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Returns the number of steps of all parameters, of which Megatron-LM's folders have one; None without."""
    kind, problems, steps = type(one.optimizer).__name__, set(), set()
    for name, values in held.items():
        for state, value in values.items():
            if state == "step":
                steps.add(float(value))
            elif value is not None and getattr(value, "shape", None) != one.parameters[name].shape:
                problems.add(f"state {state!r} of {kind} has another shape than its parameter")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (steps, problems))
    steps, problems = (set.union(*(one[part] for one in found)) for part in (0, 1))
    if len(steps) > 1:
        problems.add(f"parameters have {', '.join(f'{one:g}' for one in sorted(steps))} steps of {kind}")
    if problems:
        raise CheckpointError(
            f"{min(problems)}, which Megatron-LM's folders do not hold; nearest: save_folder(..., optimizer=False), "
            "and accelerator.save_state"
        )
    return steps.pop() if steps else None


def _described_group(group: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Returns the options of a group, those by which Megatron-LM knows it, and the names of its parameters."""
    own = {key: value for key, value in group.items() if key != PARAMS}
    identity = {**_IDENTIFIERS, "wd_mult": float(bool(own.get("weight_decay", 0)))}
    return {**identity, **own, _NAMES: list(names)}


def _values(tree: Any, name: str) -> Iterator[Any]:
    """Yields all values under a name in nested dicts."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key == name:
                yield value
            else:
                yield from _values(value, name)
