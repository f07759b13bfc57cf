"""Construction of engines, and the record of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel_backends.ops.fqn import WRAPS, named_parameters
from accel_deepspeed.checkpoint.state_dicts import put_full
from accel_deepspeed.library import forget_module, library, local_rank
from accel_deepspeed.private import joined_backward, partitioned_as_given
from accel_deepspeed.tensor_parallel.replicated_gradients import FirstGradients
from accel_deepspeed.tensor_parallel.shards import shape_of
from accel_deepspeed.zero.gradients import Gradients
from accel_deepspeed.zero.missing_gradients import LeftOut
from accel_deepspeed.zero.parameter_edits import Edits, NativeLoads, hook_loading
from accel_deepspeed.zero.partitions import OwnParts, PartitionedParts, Partitions, ShardedParts, parts_of
from accel_deepspeed.zero.stage0 import FullGradients
from accel_deepspeed.zero.stage3 import ShardedGradients
from accel_deepspeed.zero.stage12 import PartitionedGradients
from accel_precision.policy import PrecisionPolicy
from accel_state.errors import BackendError, PrepareError
from accel_state.pytree.operations import map_leaves

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
        """Compares gradients within the tensor-parallel group after the first backward; collective then."""
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
        with local_rank(session), partitioned_as_given():
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


def count_alike(session: "Session") -> None:
    """Synchronises DeepSpeed's counter of parameters over ranks.

    Collective: every rank of the group must call this.

    Stage 3 numbers the parameters of all engines of a process, and orders its all-gathers by the numbers; they differ
    if one rank had an engine of its own before.
    """
    if session.world_size == 1:
        return
    import torch.distributed as dist
    from deepspeed.runtime.zero.partition_parameters import Init

    most = torch.tensor(Init.param_id, device=session.device.torch)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=session.group)
    Init.param_id = int(most)


def take_engine(
    engine: Any, groups: tuple[tuple[str, ...], ...], policy: PrecisionPolicy, clip: tuple[float, str]
) -> Prepared:
    """Creates the ``Prepared`` of a new engine, with its hooks."""
    trains = engine.basic_optimizer is not None
    parts = parts_of(engine) if trains else None
    gradients = gradients_of(engine, parts) if trains else None
    if gradients is not None:
        engine.lr_scheduler = None  # the user's loop steps schedulers
        if parts is not None and not isinstance(parts, OwnParts):
            gradients.left_out = LeftOut(engine.basic_optimizer, parts)
    prepared = Prepared(engine, engine.basic_optimizer, gradients, parts, groups, clip, Edits(engine, parts))
    native = NativeLoads(engine, prepared.edits)
    prepared.handles += [prepared.edits, *_dtype_hooks(engine, policy), native, *hook_loading(engine, native)]
    if trains:
        prepared.handles.append(engine.register_forward_hook(_Remember(prepared)))
    return prepared


def gradients_of(engine: Any, partitions: Partitions | None) -> Gradients:
    """Returns the accumulated gradients of an engine, by the kind of its partitions."""
    if isinstance(partitions, ShardedParts):
        return ShardedGradients(engine, partitions)
    if isinstance(partitions, PartitionedParts):
        return PartitionedGradients(engine, partitions)
    return FullGradients(engine, partitions)


def keep_values(engine: Any, parts: Partitions, values: Mapping[str, torch.Tensor]) -> None:
    """Writes rank 0's fp32 values into the master weights, which DeepSpeed creates from rounded weights."""
    import torch.distributed as dist

    for name, parameter in named_parameters(engine).items():
        if name in values and parts.holds(parameter):
            value = values[name].to(engine.device)
            if dist.get_world_size() > 1:
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
        BackendError: several engines with fp16 loss scales, which differ.
    """
    first, *others = engines
    assert first.gradients is not None
    if not others:
        scaled = first.gradients.scaled(loss)
        first.gradients.backward(lambda: first.engine.backward(scaled, retain_graph, False))
        first.compare_first()
        return
    if any(one.engine.fp16_enabled() for one in engines):
        raise BackendError(
            f"a loss that goes through {len(engines)} engines in fp16, each with a loss scale of its own; nearest: "
            "mixed_precision='bf16'"
        )
    run = partial(run_backward, [first], loss, retain_graph=retain_graph)
    for one in reversed(others):
        run = partial(_within, one, run)
    run()


def _within(one: Prepared, run: Callable[[], None]) -> None:
    """Runs a backward within the backward bookkeeping of another engine that it goes through."""
    assert one.gradients is not None

    def joined() -> None:
        with joined_backward(one.engine):
            run()

    one.gradients.backward(joined)
    one.compare_first()


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
