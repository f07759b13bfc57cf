"""Optimizer and scheduler of an engine: the user's, DeepSpeed's host version, or those of the configuration."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.ops.optimizer_support import ON_HOST, steps_by_element
from accel_deepspeed.config.ds_json import ZERO, find
from accel_deepspeed.config.dummies import DummyOptim, DummyScheduler
from accel_deepspeed.library import build_operation, known_processor
from accel_state.errors import PrepareError

_OPTIONS = {"lr", "betas", "eps", "weight_decay", "amsgrad", "initial_lr", "param_names", "lr_decay"}
FORCE = "zero_force_ds_cpu_optimizer"


def check_pieces(config: Mapping[str, Any], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
    """Raises PrepareError for optimizers and schedulers that contradict the configuration or each other."""
    if len(optimizers) > 1:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise PrepareError(
            f"an engine has one optimizer, and {len(optimizers)} were given for one model ({kinds}); put their "
            "parameters into groups of one optimizer"
        )
    dummy = any(isinstance(optimizer, DummyOptim) for optimizer in optimizers)
    stands = [one for one in schedulers if isinstance(one, DummyScheduler)]
    own = [one for one in schedulers if not isinstance(one, DummyScheduler)]
    if "optimizer" in config and optimizers and not dummy:
        raise PrepareError(
            "You cannot specify an optimizer in the config file and in the code at the same time: remove it from the "
            "config file, or prepare accel's DummyOptim instead"
        )
    if dummy and "optimizer" not in config:
        raise PrepareError(
            "You cannot create a `DummyOptim` without specifying an optimizer in the config file; use an optimizer of "
            "torch.optim instead"
        )
    if "scheduler" in config and own:
        raise PrepareError(
            "You cannot specify a scheduler in the config file and in the code at the same time: remove it from the "
            "config file, or prepare accel's DummyScheduler instead"
        )
    if any(one.lr_scheduler_callable is None for one in stands) and "scheduler" not in config:
        raise PrepareError(
            "Either specify a scheduler in the config file or pass in the `lr_scheduler_callable` parameter when using "
            "DummyScheduler"
        )
    if dummy and own:
        raise PrepareError(
            "You can only specify `accel.DummyScheduler` in the code when using `accel.DummyOptim`: the scheduler "
            f"{type(own[0]).__name__} drives an optimizer that will not exist"
        )
    for optimizer in optimizers:
        check_host(config, optimizer)


def check_full(optimizer: Optimizer, stage: int, *, cut: bool = False) -> None:
    """Refuses an optimizer that needs full parameters where ranks have shards, or one that needs a closure.

    ``cut``: tensor parallelism is on, so that no rank has full parameters at any stage.

    Raises:
        PrepareError: with alternatives.
    """
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise PrepareError(
            f"{kind} evaluates a closure several times in a step, and a DeepSpeed engine steps once with the gradients "
            "that it has; nearest: strategy='fsdp' or 'ddp'"
        )
    if _needs_two_backwards(optimizer):
        raise PrepareError(
            f"{kind} computes gradients twice for a step, between which it moves the parameters by gradients that it "
            "looks at; a DeepSpeed engine keeps and reduces them elsewhere; nearest: strategy='ddp'"
        )
    if not (stage or cut) or isinstance(optimizer, DummyOptim) or steps_by_element(optimizer):
        return
    if cut:
        raise PrepareError(
            f"{kind} looks at full parameters, and every tensor-parallel rank has a shard of them; nearest: AdamW, "
            "or tensor_parallel.autotp_size=1"
        )
    raise PrepareError(
        f"{kind} looks at full parameters, and ZeRO stage {stage} leaves every rank a shard of them, "
        "flattened into one tensor; nearest: AdamW, or zero_stage=0, or strategy='ddp'"
    )


def _needs_two_backwards(optimizer: Optimizer) -> bool:
    """Whether a step needs two backwards (SAM and similar), or requires a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    needs = closure is not None and closure.default is closure.empty
    return needs or all(callable(getattr(optimizer, half, None)) for half in ("first_step", "second_step"))


def check_host(config: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raises PrepareError for an optimizer that cannot update offloaded states on the host."""
    if not wants_host(config, optimizer) or is_host(optimizer):
        return
    kind = type(optimizer).__name__
    if type(optimizer).__module__.startswith("torch.optim") and kind in ON_HOST:
        if any(group.get("amsgrad") for group in optimizer.param_groups):
            raise PrepareError(f"{kind}(amsgrad=True) has no counterpart on the host; nearest: amsgrad=False")
        return
    raise PrepareError(
        f"{kind} cannot update optimizer states that are offloaded; {', '.join(ON_HOST)} of torch.optim become "
        f"DeepSpeed's own for the host. To run {kind} there as it is, and slowly, set {FORCE!r}: false in the "
        "DeepSpeed config"
    )


def wants_host(config: Mapping[str, Any], optimizer: Optimizer) -> bool:
    """Whether the optimizer's states are offloaded and DeepSpeed's host optimizer is to update them."""
    offloads = find(config, f"{ZERO}.offload_optimizer.device", "none") != "none"
    return offloads and config.get(FORCE, True) is not False and not isinstance(optimizer, DummyOptim)


def on_host(optimizer: Optimizer) -> Optimizer:
    """Returns DeepSpeed's host version of a torch optimizer, with the same groups, options and parameters.

    Raises:
        BackendError: its op cannot be compiled here.
    """
    if is_host(optimizer):
        return optimizer
    from importlib import import_module

    kind = type(optimizer).__name__
    module, name, operation = ON_HOST[kind]
    build_operation(operation)
    groups = [
        {key: value for key, value in group.items() if key in _OPTIONS or key == "params"}
        for group in optimizer.param_groups
    ]
    for group in groups:
        group["lr"] = float(group["lr"])
    options = {"adamw_mode": kind == "AdamW"} if name == "DeepSpeedCPUAdam" else {}
    with known_processor():
        made: Optimizer = getattr(import_module(module), name)(groups, **options)
    return made


def map_pytorch_optim_to_deepspeed(optimizer: Optimizer) -> Optimizer:
    """Returns DeepSpeed's host version of a torch optimizer, or the optimizer itself if there is none."""
    known = type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in ON_HOST
    return on_host(optimizer) if known else optimizer


def point_at(scheduler: Any, before: Optimizer, after: Optimizer) -> None:
    """Makes a scheduler of ``before`` drive ``after``, those inside of it (``SequentialLR``) by shared param groups."""
    before.param_groups = after.param_groups
    if getattr(scheduler, "optimizer", None) is before:
        scheduler.optimizer = after


def group_names(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> tuple[tuple[str, ...], ...]:
    """Returns the FQNs of the parameters of each non-empty param group."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return tuple(
        tuple(names[id(parameter)] for parameter in group["params"])
        for group in optimizer.param_groups
        if group["params"]
    )


def state_by_name(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Any]]:
    """Returns the states of an optimizer that has stepped already, by FQN."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {
        names[id(parameter)]: dict(values)
        for parameter, values in optimizer.state.items()
        if isinstance(parameter, torch.Tensor) and id(parameter) in names and values
    }


def is_host(optimizer: Optimizer) -> bool:
    """Whether the optimizer is one of DeepSpeed's host optimizers."""
    return type(optimizer).__name__.startswith("DeepSpeedCPU")
