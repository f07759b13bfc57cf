"""Construction of engines, and the record of each."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel_backends.ops.fqn import WRAPS, named_parameters
from accel_deepspeed.library import count_alike, forget_module, library, local_rank, share_weights
from accel_deepspeed.tensor_parallel.replicated_gradients import FirstGradients
from accel_deepspeed.tensor_parallel.shards import shape_of
from accel_deepspeed.zero.full_tensors import put_full
from accel_deepspeed.zero.gradients import Gradients, gradients_of
from accel_deepspeed.zero.left_out import LeftOut
from accel_deepspeed.zero.parameter_edits import Edits, refuse_loading
from accel_deepspeed.zero.partitions import OwnParts, Partitions, parts_of
from accel_precision.policy import PrecisionPolicy
from accel_state.errors import BackendError, PrepareError
from accel_state.pytree.operations import map_leaves
from accel_state.watchdog.decorator import recorded

if TYPE_CHECKING:
    from accel_state.session import Session


class Handle(Protocol):
    """A hook or a replaced method, which ``remove`` undoes."""

    def remove(self) -> None: ...


# Metadata key of the autograd nodes of an engine's outputs; its value is the id of the engine's ``Prepared``.
_ENGINE = "accel_engine"


@final
@dataclass(slots=True, eq=False)
class Prepared:
    """One engine and the facts about it.

    Attributes:
        engine: DeepSpeed's engine, which is the prepared model.
        optimizer: the optimizer inside, whose param groups schedulers change.
        gradients: accumulated gradients; None for an engine that does not train.
        parts: partitions of weights and states; None if the optimizer updates the parameters themselves.
        groups: FQNs of each param group's parameters.
        clip: norm to which the configuration clips (0: none), and the origin of that value.
        saves_16bit: full weights are returned in the compute dtype.
        handles: hooks on the model and its optimizer.
        open: a forward with a graph has run since the last backward.
        first: comparison of the first backward's gradients; None if there is none, or if it is done.
        edits: finds values that the training loop writes into parameters.
    """

    engine: Any
    optimizer: Optimizer | None
    gradients: Gradients | None
    parts: Partitions | None
    groups: tuple[tuple[str, ...], ...]
    clip: tuple[float, str]
    edits: Edits
    saves_16bit: bool = False
    handles: list[Handle] = field(default_factory=list)
    open: bool = False
    first: FirstGradients | None = None

    def compare_first(self) -> None:
        """Compares gradients within the tensor-parallel group after the first backward.

        Collective: every rank of the group must call this.
        """
        if self.first is not None:
            first, self.first = self.first, None
            first.check(self.engine.device)

    def release(self) -> None:
        """Destroys the engine; the user's module remains."""
        for handle in self.handles:
            handle.remove()
        if self.first is not None:
            self.first.remove()
        if self.gradients is not None:
            self.gradients.remove()
        self.engine.destroy()
        forget_module(self.engine.module)
        self.engine.__dict__.pop(WRAPS, None)


def start_engine(
    session: "Session", model: nn.Module, optimizer: Optimizer | Callable[..., Any] | None, config: Mapping[str, Any]
) -> Any:
    """Creates the engine of a model that is on its device; changes the model in place.

    Collective: every rank of the group must call this.

    Raises:
        PrepareError: DeepSpeed refuses, with its message.
    """
    deepspeed = library(session.device.type)
    count_alike(session)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        with local_rank(session):
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                model_parameters=trainable if optimizer is None else None,
                config=dict(config),
                dist_init_required=False,
            )
    except (AssertionError, ValueError, NotImplementedError, ImportError) as error:
        raise PrepareError(f"DeepSpeed cannot prepare this {type(model).__name__}: {error}") from error
    except Exception as error:
        if type(error).__module__.startswith("deepspeed"):
            raise PrepareError(f"DeepSpeed cannot prepare this {type(model).__name__}: {error}") from error
        raise
    engine.__dict__[WRAPS] = "module"
    return engine


def take_engine(
    engine: Any, groups: tuple[tuple[str, ...], ...], policy: PrecisionPolicy, clip: tuple[float, str]
) -> Prepared:
    """Creates the ``Prepared`` of a new engine, with its hooks."""
    trains = engine.basic_optimizer is not None
    if hasattr(engine.optimizer, "single_partition_of_fp32_groups"):
        share_weights(engine.optimizer)
    parts = parts_of(engine) if trains else None
    gradients = gradients_of(engine, parts) if trains else None
    if gradients is not None:
        engine.lr_scheduler = None  # the user's loop steps schedulers
        if parts is not None and not isinstance(parts, OwnParts):
            gradients.left_out = LeftOut(engine.basic_optimizer, parts)
    prepared = Prepared(engine, engine.basic_optimizer, gradients, parts, groups, clip, Edits(engine, parts))
    prepared.handles += [prepared.edits, *_dtype_hooks(engine, policy), *refuse_loading(engine)]
    if trains:
        prepared.handles.append(engine.register_forward_hook(_Remember(prepared)))
    return prepared


def keep_values(prepared: Prepared, values: Mapping[str, torch.Tensor], session: "Session") -> None:
    """Writes rank 0's fp32 values into the master weights, which DeepSpeed creates from rounded weights."""
    import torch.distributed as dist

    parts = prepared.parts
    if parts is None:
        return
    for name, parameter in named_parameters(prepared.engine).items():
        if name in values and parts.holds(parameter):
            value = values[name].to(prepared.engine.device)
            if session.world_size > 1:
                dist.broadcast(value, 0)
            put_full(parts, parameter, value.view(shape_of(parameter)))


def forget_first_step(prepared: Prepared) -> None:
    """Undoes the step with zero gradients with which DeepSpeed fills the optimizer's states at stage 0 in 16 bits.

    Otherwise that step would count as a step, and decay the weights.
    """
    if hasattr(prepared.engine.optimizer, "fp16_groups") and prepared.optimizer is not None:
        prepared.optimizer.state.clear()


def engine_of_graph(candidates: list[Prepared], loss: torch.Tensor) -> list[Prepared]:
    """Returns the engines whose outputs a loss was computed from, in the order of ``candidates``."""
    wanted = set(map(id, candidates))
    found: set[int] = set()
    seen: set[Any] = set()
    stack: list[Any] = [loss.grad_fn]
    while stack and found != wanted:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        owner = node.metadata.get(_ENGINE)
        if owner in wanted:
            found.add(owner)
        stack += [below for below, _ in node.next_functions]
    return [prepared for prepared in candidates if id(prepared) in found]


def run_backward(engines: list[Prepared], loss: torch.Tensor, *, retain_graph: bool = False) -> None:
    """Runs one backward through all engines that a loss depends on.

    Raises:
        BackendError: several engines with fp16 loss scales, which differ, or of stage 0; or a graph that stage 3 cannot
            retain.
    """
    whole = [one for one in engines if not one.engine.zero_optimization()]
    if len(engines) > 1 and any(one.engine.fp16_enabled() for one in engines):
        raise BackendError(
            f"a loss that goes through {len(engines)} engines in fp16, each with a loss scale of its own; nearest: "
            "mixed_precision='bf16'"
        )
    if len(whole) > 1:
        raise BackendError(
            f"a loss that goes through {len(whole)} engines of stage 0, of which DeepSpeed runs the backward of one; "
            "nearest: zero_stage=1, or strategy='ddp'"
        )
    if retain_graph and any(one.engine.zero_optimization_partition_weights() for one in engines):
        raise BackendError(
            "retain_graph through a DeepSpeed engine of ZeRO stage 3, which frees the gathered parameters in the first "
            "backward; add the losses and call backward once, or use zero_stage=2"
        )
    first = (whole or engines)[0]
    gradients = [one.gradients for one in engines if one.gradients is not None]
    assert first.gradients is not None
    for one in gradients:
        one.begin()
    # The other engines run their parts of a backward in hooks on their outputs.
    reducing = next((one.arrivals for one in gradients if one.arrivals is not None), None)
    run = _backward if reducing is None else _reducing_backward
    run(first.engine, "" if reducing is None else reducing.modules, first.gradients.scaled(loss), retain_graph)
    for one in gradients:
        one.end()
    for prepared in engines:
        prepared.compare_first()


def _backward(engine: Any, modules: str, loss: torch.Tensor, retain_graph: bool) -> None:
    engine.backward(loss, retain_graph, False)


# At stages 2 and 3 a backward waits for other ranks, which have to compute the same modules.
_reducing_backward = recorded("backward", lambda engine, modules, *call: modules)(_backward)


def refuse_steps(prepared: Prepared, optimizers: Iterable[Optimizer]) -> None:
    """Makes ``step`` of these optimizers raise BackendError, except within a step of the engine.

    Any other step would have no gradients, or those of one rank, and its updates would not reach the other ranks.
    """

    def look(optimizer: Optimizer, *_: object) -> None:
        if prepared.gradients is None or not prepared.gradients.stepping:
            raise BackendError(
                f"step() of the {type(optimizer).__name__} that was given to prepare, which is inside of a DeepSpeed "
                "engine since then and has no gradients of its own; step the optimizer that prepare returned: "
                "model, optimizer = accelerator.prepare(model, optimizer)"
            )

    alone = {id(one): one for one in optimizers}.values()
    prepared.handles += [one.register_step_pre_hook(look) for one in alone]


@final
class _Remember:
    """Forward hook that marks the autograd nodes of an engine's outputs; the marks live as long as the graph."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._prepared.open = True
        if isinstance(output, torch.Tensor):
            self._note(output)
        else:
            map_leaves(self._note, output)

    def _note(self, leaf: Any) -> Any:
        node: Any = leaf.grad_fn if isinstance(leaf, torch.Tensor) else None
        if node is not None:
            node.metadata[_ENGINE] = id(self._prepared)
        return leaf


def _dtype_hooks(engine: Any, policy: PrecisionPolicy) -> list[RemovableHandle]:
    """Registers hooks that convert inputs to the compute dtype, and outputs to the policy's output dtype."""
    compute, output = policy.compute, policy.output
    if compute is None or compute.itemsize > 2:
        return []

    def convert(dtype: torch.dtype, data: Any) -> Any:
        def one(leaf: Any) -> Any:
            return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

        return map_leaves(one, data)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return convert(compute, args), convert(compute, kwargs)

    handles = [engine.module.register_forward_pre_hook(before, with_kwargs=True)]
    if output is not None:
        handles.append(engine.module.register_forward_hook(lambda module, args, result: convert(output, result)))
    return handles
