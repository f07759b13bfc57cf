"""Mixtures of experts: param groups of experts, and layers that stage 3 gathers as one unit."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from accel_deepspeed.config.ds_json import near
from accel_deepspeed.config.dummies import DummyScheduler
from accel_state.errors import BackendError, PrepareError

# Attributes of the modules of ``deepspeed.moe``, which a user's own module with an ``ep_size`` does not have.
_OF_EXPERTS = ("num_local_experts", "expert_group_name")


def expert_groups(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """Splits param groups that mix experts and other parameters, whose gradients are averaged over different ranks."""
    if not _has_experts(model):
        return optimizer
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    for position, group in enumerate(optimizer.param_groups):
        group.setdefault("name", f"group {position}")
    groups: Any = split_params_into_different_moe_groups_for_optimizer(optimizer.param_groups)
    optimizer.param_groups[:] = [group for group in groups if group["params"]]
    return optimizer


def _has_experts(model: nn.Module) -> bool:
    """Whether a model has layers of ``deepspeed.moe``, which mark the parameters of experts."""
    return any(getattr(parameter, "allreduce", True) is False for parameter in model.parameters())


def check_scheduled(optimizers: Iterable[Optimizer], schedulers: Sequence[Any]) -> None:
    """Refuses a scheduler of param groups that ``expert_groups`` is going to split, of which it knows only the first.

    Raises:
        PrepareError: with the function that splits them.
    """
    own = [one for one in schedulers if not isinstance(one, DummyScheduler)]
    kinds = [
        {getattr(p, "group_name", "") if getattr(p, "allreduce", True) is False else "" for p in group["params"]}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    if own and any(len(kind) > 1 for kind in kinds):
        raise PrepareError(
            f"{type(own[0]).__name__} drives a param group of experts and other parameters, which DeepSpeed steps as "
            "groups of their own; split it by deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer "
            "before the optimizer and the scheduler are built"
        )


def check_experts(model: nn.Module, stage: int) -> None:
    """Refuses ``deepspeed.moe`` layers at stage 3, before DeepSpeed does so in the middle of engine construction.

    Raises:
        PrepareError: with alternatives.
    """
    if stage < 3:
        return
    found = next((name for name, p in model.named_parameters() if getattr(p, "allreduce", True) is False), None)
    if found is not None:
        raise PrepareError(
            f"{type(model).__name__}.{found} is of an expert of deepspeed.moe, which DeepSpeed does not train at stage "
            "3; nearest: zero_stage=2, or experts that are ordinary modules, their class in transformer_moe_cls_names"
        )


def check_experts_are_alike(model: nn.Module) -> None:
    """Raises BackendError for state dicts of a model whose ranks have different experts under the same names."""
    if not _has_experts(model):
        return
    layers = [module for module in model.modules() if any(hasattr(module, name) for name in _OF_EXPERTS)]
    size = max((int(getattr(module, "ep_size", None) or 1) for module in layers), default=1)
    if size > 1:
        raise BackendError(
            f"{type(model).__name__}: each rank has experts of its own under the same names (expert parallelism, "
            f"ep_size={size}), which no state tells apart; nearest: export_deepspeed, which writes DeepSpeed's own "
            "files, or ep_size=1"
        )


def mark_leaf_modules(model: nn.Module, names: object) -> None:
    """Makes stage 3 gather each module of these classes as one unit, because ranks run different experts.

    Raises:
        PrepareError: the model has no module of such a class.
    """
    if not names:
        return
    wanted = [one.strip() for one in str(names).split(",")] if isinstance(names, str) else list(names)  # type: ignore[call-overload]
    classes = {type(module).__name__: type(module) for module in model.modules()}
    for name in wanted:
        if name not in classes:
            raise PrepareError(
                f"transformer_moe_cls_names has {name!r}, and {type(model).__name__} no module of such a class"
                f"{near(name, classes)}"
            )
    from deepspeed.utils import set_z3_leaf_modules

    set_z3_leaf_modules(model, [classes[name] for name in wanted])
