"""Binding of a model, its optimizer and its schedulers to an engine."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.core.bundle import Bundle
from accel_backends.ops import state_dicts as states
from accel_backends.ops.fqn import innermost, named_parameters, sparse_embeddings
from accel_backends.ops.state_dicts import GROUPS, STATE
from accel_deepspeed.checkpoint import state_dicts as deepspeed_states
from accel_deepspeed.config.ds_json import ZERO, find
from accel_deepspeed.config.dummies import DummyOptim, DummyScheduler
from accel_deepspeed.config.plugin import DeepSpeedConfig
from accel_deepspeed.config.resolve_auto import RunFacts, settle, width_of
from accel_deepspeed.engine.activation_checkpointing import guard_checkpointing
from accel_deepspeed.engine.engine import Prepared, forget_first_step, keep_values, start_engine, take_engine
from accel_deepspeed.engine.foreign_steps import GivenSteps
from accel_deepspeed.engine.moe import check_experts, check_scheduled, expert_groups, mark_leaf_modules
from accel_deepspeed.engine.optimizers import (
    check_full,
    check_pieces,
    group_names,
    on_host,
    point_at,
    state_by_name,
    wants_host,
)
from accel_deepspeed.engine.zero_init import partitioned
from accel_deepspeed.library import DISK, build_operation
from accel_deepspeed.tensor_parallel.autotp import kinds_of, settle_cuts
from accel_deepspeed.tensor_parallel.replicated_gradients import FirstGradients
from accel_deepspeed.tensor_parallel.shards import is_cut
from accel_state.errors import PrepareError
from accel_state.logging import get_logger

if TYPE_CHECKING:
    from accel_deepspeed.backend import DeepSpeedBackend

_log = get_logger(__name__)


def check_bundle_pieces(options: DeepSpeedConfig, bundle: Bundle) -> None:
    """Refuses a bundle that cannot become an engine, before any change.

    Raises:
        PrepareError: an optimizer without its model, or models, optimizers and schedulers that contradict each other.
    """
    if bundle.optimizers and not bundle.models:
        raise PrepareError(
            f"{type(bundle.optimizers[0]).__name__} was prepared without its model; with strategy 'deepspeed' an "
            "engine is made of both: prepare(model, optimizer)"
        )
    if not bundle.models:
        return
    check_pieces(options.deepspeed_config, bundle.optimizers, bundle.schedulers)
    model = innermost(bundle.models[0])
    stage = options.zero_stage
    if bundle.optimizers or stage == 3:
        check_values(model)
    check_experts(model, stage)
    check_scheduled(bundle.optimizers, bundle.schedulers)
    for optimizer in bundle.optimizers:
        check_full(optimizer, stage, cut=options.tensor_parallel_size > 1)
    check_sparse(model)
    scalars = [name for name, parameter in named_parameters(model).items() if parameter.dim() == 0]
    if scalars:
        raise PrepareError(
            f"{type(model).__name__}.{scalars[0]} has no dimension, and DeepSpeed cannot send such parameters; give it "
            "the shape (1,)"
        )
    held = {id(p) for optimizer in bundle.optimizers for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in named_parameters(model).items() if p.requires_grad and id(p) not in held]
    if bundle.optimizers and left and stage > 0:
        raise PrepareError(
            f"{type(bundle.optimizers[0]).__name__} lacks {len(left)} parameters of {type(model).__name__} that train "
            f"({', '.join(left[:3])}), whose gradients ZeRO would not reduce; give them to it, or freeze them with "
            "requires_grad_(False)"
        )


def check_sparse(model: nn.Module) -> None:
    """Raises PrepareError for trainable embeddings with sparse gradients, which ZeRO cannot shard."""
    for name, module in sparse_embeddings(model):
        if module.weight.requires_grad:
            raise PrepareError(
                f"{name or type(module).__name__} is an {type(module).__name__} with sparse=True, whose gradients "
                "DeepSpeed cannot spread over ranks; nearest: sparse=False, or strategy='ddp'"
            )


def check_values(model: nn.Module) -> None:
    """Raises PrepareError for float64 parameters, which an engine would silently round to fp32."""
    wide = [name for name, parameter in named_parameters(model).items() if parameter.dtype == torch.float64]
    if wide:
        raise PrepareError(
            f"{type(model).__name__}.{wide[0]} is float64{f' (and {len(wide) - 1} more)' if len(wide) > 1 else ''}, "
            "and DeepSpeed trains in float32 at most; nearest: strategy='fsdp' or 'ddp', which train in float64, or "
            "model.float() first"
        )


def bind_model(owner: "DeepSpeedBackend", bundle: Bundle) -> tuple[Prepared, Bundle]:
    """Creates the engine of a bundle's model; returns it, and the bundle with the engine's optimizer and schedulers.

    Collective: every rank of the group must call this.
    """
    options, session = owner.options, owner.session
    model = bundle.models[0]
    given = bundle.optimizers[0] if bundle.optimizers else None
    parameters = named_parameters(model)
    config, origins = settle(options.deepspeed_config, _run_of(owner, bundle, parameters))
    options.origins.update(origins)
    guard_checkpointing(innermost(model), config)
    mark_leaf_modules(innermost(model), options.transformer_moe_cls_names)
    values = _fp32_values(config, parameters)
    started: dict[str, dict[str, Any]] = {}
    optimizer: Optimizer | None = None
    if given is not None and not isinstance(given, DummyOptim):
        started = state_by_name(given, parameters)
        given.state.clear()
        optimizer = expert_groups(innermost(model), on_host(given) if wants_host(config, given) else given)
    if "nvme" in (find(config, f"{ZERO}.offload_{what}.device") for what in ("optimizer", "param")):
        build_operation(DISK)  # DeepSpeed's own build error does not say that libaio is missing
    groups = () if given is None else group_names(optimizer or given, parameters)
    if bundle.placed[0] and not _partitioned(parameters):
        model.to(owner.device)
    owner.layers.gather_in(model)
    kinds = kinds_of(innermost(model))
    engine = start_engine(session, model, optimizer, config if given is not None else _without_training(config))
    made = engine.lr_scheduler
    handles = settle_cuts(engine, kinds) if owner.layers.size > 1 else []
    prepared = take_engine(engine, groups, owner.policy, _clip(config, options))
    prepared.handles += handles
    if prepared.optimizer is not None:
        stepped = [one for one in (given, prepared.optimizer) if one is not None and not isinstance(one, DummyOptim)]
        prepared.handles.append(GivenSteps(engine, stepped))
    prepared.first = _first_gradients(owner, prepared)
    prepared.saves_16bit = bool(options.zero3_save_16bit_model)
    if prepared.parts is not None:
        forget_first_step(prepared)
        keep_values(prepared.engine, prepared.parts, values)
        prepared.parts.refresh()
    if started:
        _load_started(owner, prepared, started)
    prepared.edits.forget()
    if given is None:
        return prepared, bundle
    assert prepared.optimizer is not None
    schedulers = [_scheduler(one, given, prepared.optimizer, made) for one in bundle.schedulers]
    return prepared, replace(bundle, optimizers=[prepared.optimizer], schedulers=schedulers)


@contextmanager
def zero3_init(owner: "DeepSpeedBackend") -> Iterator[None]:
    """Context in which modules are partitioned as soon as they are built.

    Collective: every rank of the group must call this.
    """
    run = RunFacts(
        owner.policy, _data_ranks(owner), device_type=owner.device.type, tensor_parallel_size=owner.layers.size
    )
    config, _ = settle(owner.options.deepspeed_config, run)
    with partitioned(owner.session, config):
        yield


def _run_of(owner: "DeepSpeedBackend", bundle: Bundle, parameters: Mapping[str, nn.Parameter]) -> RunFacts:
    """Collects the facts about the run."""
    optimizer = bundle.optimizers[0] if bundle.optimizers else None
    dummy = optimizer if isinstance(optimizer, DummyOptim) else None
    stand = next((one for one in bundle.schedulers if isinstance(one, DummyScheduler)), None)
    steps = {"total_num_steps": stand.total_num_steps, "warmup_num_steps": stand.warmup_num_steps} if stand else None
    return RunFacts(
        policy=owner.policy,
        world_size=_data_ranks(owner),
        elements=sum(getattr(p, "ds_numel", p.numel()) for p in parameters.values() if p.requires_grad),
        hidden_size=width_of(getattr(innermost(bundle.models[0]), "config", None)),
        batch_sizes=bundle.batch_sizes,
        smallest=owner.options.is_train_batch_min,
        rates=None if dummy is None else {"lr": dummy.lr, "weight_decay": dummy.weight_decay},
        steps=steps,
        scaler=owner.scaler_options,
        device_type=owner.device.type,
        tensor_parallel_size=owner.layers.size,
    )


def _data_ranks(owner: "DeepSpeedBackend") -> int:
    """Returns the data-parallel size: ranks of a sequence- or tensor-parallel group have the same samples."""
    return owner.session.world_size // (owner.options.sequence_parallel_size * owner.layers.size)


def _first_gradients(owner: "DeepSpeedBackend", prepared: Prepared) -> FirstGradients | None:
    """Returns the comparison of the first gradients within a tensor-parallel group; None without AutoTP."""
    group = owner.layers.group
    if group is None or prepared.gradients is None:
        return None
    whole = {name: one for name, one in named_parameters(prepared.engine).items() if not is_cut(one)}
    return FirstGradients(whole, group, owner.session.group)


def _fp32_values(config: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Copies fp32 parameters that DeepSpeed is going to round, so that master weights can be exact."""
    halves = any(find(config, f"{section}.enabled") is True for section in ("bf16", "fp16"))
    if not halves or _partitioned(parameters):
        return {}
    return {
        name: parameter.detach().clone()
        for name, parameter in parameters.items()
        if parameter.requires_grad and parameter.dtype == torch.float32
    }


def _partitioned(parameters: Mapping[str, nn.Parameter]) -> bool:
    return any(hasattr(parameter, "ds_id") for parameter in parameters.values())


def _without_training(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration of an engine without an optimizer."""
    return {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}


def _clip(config: Mapping[str, Any], options: DeepSpeedConfig) -> tuple[float, str]:
    return float(find(config, "gradient_clipping", 0.0) or 0.0), options.origins.get("gradient_clipping", "default")


def _scheduler(scheduler: Any, before: Optimizer, after: Optimizer, made: Any) -> Any:
    """Returns the scheduler that drives the engine's optimizer."""
    if not isinstance(scheduler, DummyScheduler):
        point_at(scheduler, before, after)
        return scheduler
    return made if scheduler.lr_scheduler_callable is None else scheduler.lr_scheduler_callable(after)


def _load_started(owner: "DeepSpeedBackend", prepared: Prepared, started: Mapping[str, Mapping[str, Any]]) -> None:
    """Loads the state of an optimizer that has stepped before ``prepare`` into the engine."""
    assert prepared.optimizer is not None
    state = {STATE: started, GROUPS: deepspeed_states.group_options(prepared.optimizer, prepared.groups)}
    if prepared.parts is None:
        states.load_optimizer_state(prepared.optimizer, [prepared.engine], state)
    else:
        deepspeed_states.load_optimizer_state(
            prepared.engine, prepared.parts, owner.states.partition_layout(prepared), state
        )
