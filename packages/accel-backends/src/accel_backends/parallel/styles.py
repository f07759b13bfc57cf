"""Styles of tensor parallelism: how one module computes with shards of its parameters.

The styles are those of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): a matrix split by columns, whose outputs
are sharded, followed by a matrix split by rows, whose outputs are summed; and sequence parallelism (Korthikanti et al.
2022, arXiv:2205.05198), which shards the activations between them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode

from accel_backends.parallel.exchange import Exchange, exchanged
from accel_backends.parallel.matrices import Matrix, matrix_of
from accel_state.errors import PrepareError

#: Dim of activations that holds the sequence.
SEQUENCE_DIM = 1


@dataclass(frozen=True, slots=True)
class Style(ABC):
    """How one module computes on the ranks of a tensor-parallel group."""

    def check(self, module: nn.Module, name: str, size: int) -> None:
        """Raises PrepareError, which names the module, if ``size`` ranks cannot compute it. Default: every module."""

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        """Placements of the module's own parameters, by name; others stay plain tensors. Default: none."""
        return {}

    @abstractmethod
    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Makes the module compute with its placed parameters. Does not communicate."""


@final
@dataclass(frozen=True, slots=True)
class Replicated(Style):
    """Every rank computes the full module on the same inputs, so gradients are the same without communication."""

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Changes nothing."""


@final
@dataclass(frozen=True, slots=True)
class Colwise(Style):
    """A linear layer whose outputs are sharded: ``Y_r = X W_r``; the gradient of X is summed over the ranks.

    ``output`` is what the module returns: this rank's ``"shard"`` as a plain tensor, the ``"full"`` outputs, or a
    ``"dtensor"`` sharded on its last dim, as ``torch.distributed.tensor.parallel.loss_parallel`` expects logits.
    """

    output: str = "shard"

    def check(self, module: nn.Module, name: str, size: int) -> None:
        """Refuses modules that are no linear layer, and outputs that ``size`` does not divide."""
        _check_divisible(name, "output features", _linear(module, name).outputs, size)

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        """Weight and bias sharded over the outputs."""
        return _present(module, weight=Shard(_linear(module).output_dim), bias=Shard(0))

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Hooks that make DTensors of the inputs, and of the outputs what ``output`` says."""
        target = None if self.output == "dtensor" else Replicate() if self.output == "full" else Shard(-1)
        _hook_inputs(module, mesh, Replicate())
        _hook_outputs(module, target)


@final
@dataclass(frozen=True, slots=True)
class Rowwise(Style):
    """A linear layer whose inputs are sharded: ``Y = sum over r of X_r W_r``, plus the bias once.

    ``input`` says what the module receives: this rank's ``"shard"`` (the outputs of a layer split by columns) or the
    ``"full"`` inputs. With ``scatter_sequence`` each rank receives its shard of the sequence of the sum, by a
    reduce-scatter instead of an all-reduce.
    """

    input: str = "shard"
    scatter_sequence: bool = False

    def check(self, module: nn.Module, name: str, size: int) -> None:
        """Refuses modules that are no linear layer, and inputs that ``size`` does not divide."""
        _check_divisible(name, "input features", _linear(module, name).inputs, size)

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        """Weight sharded over the inputs; every rank has the bias."""
        return _present(module, weight=Shard(_linear(module).input_dim), bias=Replicate())

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Hooks that make sharded DTensors of the inputs, and sum the outputs."""
        _hook_inputs(module, mesh, Shard(-1), given=Replicate() if self.input == "full" else None)
        _hook_outputs(module, Shard(SEQUENCE_DIM) if self.scatter_sequence else Replicate())


@final
@dataclass(frozen=True, slots=True)
class FusedColwise(Style):
    """A linear layer that computes several matrices at once, each of which is split by columns.

    ``parts`` are the output features of each matrix, in order (query, key and value of GPT-2). The weight is a DTensor
    of contiguous shards, so that its full tensor is that of one process; its rows are exchanged in each forward, which
    moves less than exchanging activations once a micro-batch has more tokens than the layer has inputs.
    """

    parts: tuple[int, ...]

    def check(self, module: nn.Module, name: str, size: int) -> None:
        """Refuses parts that are not those of the layer, or that ``size`` does not divide."""
        outputs = _linear(module, name).outputs
        if sum(self.parts) != outputs:
            raise PrepareError(
                f"{name} has {outputs} output features, and its fused parts {self.parts} have {sum(self.parts)}"
            )
        for part in self.parts:
            _check_divisible(name, "output features of a fused part", part, size)

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        """Weight and bias in contiguous shards over the outputs."""
        return _present(module, weight=Shard(_linear(module).output_dim), bias=Shard(0))

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Replaces the forward of this module by one that exchanges the shards of the weight first."""
        matrix, group = _linear(module), mesh.get_group()
        exchange = Exchange.of(self.parts, mesh.get_local_rank(), mesh.size())

        def forward(layer: nn.Module, input: torch.Tensor) -> torch.Tensor:
            # Every rank contributes to the gradient of the replicated inputs by its own outputs.
            x = _distributed(input, mesh, Replicate()).to_local(grad_placements=[Partial()])
            weight = exchanged(_local(layer.weight), matrix.output_dim, exchange, group)
            bias = None if layer.bias is None else exchanged(_local(layer.bias), 0, exchange, group)
            return F.linear(x, weight if matrix.output_dim == 0 else weight.t(), bias)

        module.forward = MethodType(forward, module)


@final
@dataclass(frozen=True, slots=True)
class ShardedEmbedding(Style):
    """An embedding sharded over its ``"rows"`` (the vocabulary) or ``"columns"`` (the features)."""

    over: str = "rows"

    def check(self, module: nn.Module, name: str, size: int) -> None:
        """Refuses modules that are no embedding, sizes that ``size`` does not divide, and options DTensor ignores."""
        if not isinstance(module, nn.Embedding):
            raise PrepareError(
                f"{name} is a {type(module).__name__}, which is not nn.Embedding; nearest: leave it out of the plan"
            )
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            raise PrepareError(
                f"{name} has max_norm, sparse or scale_grad_by_freq, which a sharded embedding would ignore; nearest: "
                "leave it out of the plan"
            )
        rows, columns = module.weight.shape
        if self.over == "rows":
            _check_divisible(name, "rows", rows, size)
        else:
            _check_divisible(name, "columns", columns, size)

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        """Weight sharded over rows or columns."""
        return {"weight": Shard(0 if self.over == "rows" else 1)}

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Replaces the forward of this module by one that looks up this rank's rows or columns.

        DTensor's own gradient of an embedding sharded over its rows is full on every rank. What a class of its own
        computes around the lookup (Gemma scales what it found) stays.
        """
        over_rows = self.over == "rows"
        placement: Placement = Partial() if over_rows else Shard(-1)

        def look_up(layer: nn.Module, input: torch.Tensor) -> torch.Tensor:
            weight = _local(layer.weight)
            first = mesh.get_local_rank() * len(weight) if over_rows else 0
            indices = _distributed(input, mesh, Replicate()).to_local() - first
            elsewhere = _elsewhere(indices, len(weight), mesh) if over_rows else torch.zeros_like(indices).bool()
            padding = None if layer.padding_idx is None else int(cast(Any, layer.padding_idx)) - first
            found = F.embedding(
                indices.masked_fill(elsewhere, 0),
                weight,
                padding if padding is not None and 0 <= padding < len(weight) else None,
            )
            found = found.masked_fill(elsewhere[..., None], 0.0)
            return _plain(_distributed(_distributed(found, mesh, placement), mesh, Replicate()))

        def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
            with _LookUps(layer, look_up):
                found: torch.Tensor = type(layer).forward(layer, *args, **kwargs)
            return found

        plain = type(module).forward is nn.Embedding.forward
        module.forward = MethodType(look_up if plain else forward, module)


@final
class _LookUps(TorchFunctionMode):
    """Replaces lookups in the weight of an embedding."""

    def __init__(self, layer: nn.Module, look_up: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._layer, self._look_up = layer, look_up

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.embedding and args[1] is self._layer.weight:
            return self._look_up(self._layer, args[0])
        return func(*args, **(kwargs or {}))


@final
@dataclass(frozen=True, slots=True)
class PartialGradients(Style):
    """A module between sharded layers, of which every rank computes other heads with the same parameters.

    The gradients of its parameters are summed over the ranks, once for every backward. Examples are norms of the
    queries and keys of each head.
    """

    #: Any dim that the module does not compute over; norms of heads compute over the last one.
    sharded_dim: int = -2

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        """All parameters replicated."""
        return {name: Replicate() for name in module._parameters}

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Hooks that make sharded DTensors of the inputs, and sum the gradients."""
        _hook_inputs(module, mesh, Shard(self.sharded_dim))
        _hook_outputs(module, Shard(self.sharded_dim))
        _sum_gradients(module)


@final
@dataclass(frozen=True, slots=True)
class SequenceSharded(Style):
    """A norm or dropout that computes on this rank's shard of every sequence; gradients are summed over the ranks.

    With ``gather_output`` every rank receives the full sequences.
    """

    gather_output: bool = False

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        """All parameters replicated."""
        return {name: Replicate() for name in module._parameters}

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Hooks that make DTensors sharded over the sequence of the inputs, and sum the gradients."""
        _hook_inputs(module, mesh, Shard(SEQUENCE_DIM))
        _hook_outputs(module, Replicate() if self.gather_output else Shard(SEQUENCE_DIM))
        _sum_gradients(module)


@final
@dataclass(frozen=True, slots=True)
class GatherSequence(Style):
    """A module of sharded layers that receives this rank's shard of every sequence and computes on full sequences."""

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """A hook that all-gathers the sequences; the backward reduce-scatters their gradients."""
        _hook_inputs(module, mesh, Replicate(), given=Shard(SEQUENCE_DIM))


@final
@dataclass(frozen=True, slots=True)
class SplitSequence(Style):
    """A module that receives full sequences, of which it computes on this rank's shard: the first block of a list."""

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """A hook that takes this rank's shard; the backward all-gathers the gradients."""

        def split(input: torch.Tensor) -> torch.Tensor:
            length, size = input.shape[SEQUENCE_DIM], mesh.size()
            if length % size:
                raise PrepareError(
                    f"sequences of {length} tokens do not divide over {size} tensor-parallel ranks, which sequence "
                    f"parallelism needs; nearest: pad them to {length + -length % size}"
                )
            full = DTensor.from_local(input, mesh, [Replicate()], run_check=False)
            return full.redistribute(placements=[Shard(SEQUENCE_DIM)]).to_local()

        _hook_first_tensor(module, split)


@final
@dataclass(frozen=True, slots=True)
class LocalSizes(Style):
    """A module whose sizes of sharded activations, which it has as attributes, become those of one rank."""

    attributes: tuple[str, ...]

    def check(self, module: nn.Module, name: str, size: int) -> None:
        """Refuses attributes that are missing or that ``size`` does not divide."""
        for attribute in self.attributes:
            value = getattr(module, attribute, None)
            if not isinstance(value, int):
                raise PrepareError(f"{name} has no size {attribute!r}, which the plan divides over {size} ranks")
            _check_divisible(name, attribute, value, size)

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Divides the attributes."""
        for attribute in self.attributes:
            setattr(module, attribute, getattr(module, attribute) // mesh.size())


#: Styles by name: those of transformers' ``tp_plan`` that are supported, and those of accel.
STYLES: Mapping[str, Style] = {
    "colwise": Colwise(),
    "colwise_gather_output": Colwise("full"),
    "colwise_loss_parallel": Colwise("dtensor"),
    "colwise_rep": Colwise("full"),
    "embedding_colwise": ShardedEmbedding("columns"),
    "embedding_rowwise": ShardedEmbedding("rows"),
    "gather_sequence": GatherSequence(),
    "replicate": Replicated(),
    "replicated_with_grad_allreduce": PartialGradients(),
    "rowwise": Rowwise(),
    "rowwise_rep": Rowwise("full"),
    "rowwise_scatter_sequence": Rowwise(scatter_sequence=True),
    "rowwise_split_input": Rowwise("full"),
    "sequence_parallel": SequenceSharded(),
    "sequence_parallel_gather_output": SequenceSharded(gather_output=True),
    "split_sequence": SplitSequence(),
}


def _linear(module: nn.Module, name: str = "") -> Matrix:
    found = matrix_of(module)
    if found is None:
        raise PrepareError(
            f"{name} is a {type(module).__name__}, which is no linear layer with a floating-point weight (nn.Linear, "
            "Conv1D); nearest: leave it out of the plan, so that every rank computes it"
        )
    return found


def _check_divisible(name: str, what: str, value: int, size: int) -> None:
    if value % size:
        fitting = max(one for one in range(1, size + 1) if value % one == 0)
        raise PrepareError(
            f"{name} has {value} {what}, which {size} tensor-parallel ranks do not divide; nearest: {fitting} ranks, "
            "or leave the module out of the plan, so that every rank computes it"
        )


def _present(module: nn.Module, **placements: Placement) -> dict[str, Placement]:
    return {name: placement for name, placement in placements.items() if module._parameters.get(name) is not None}


def _local(parameter: Any) -> torch.Tensor:
    local: torch.Tensor = parameter.to_local()
    return local


def _elsewhere(indices: torch.Tensor, rows: int, mesh: DeviceMesh) -> torch.Tensor:
    """Which indices, counted from this rank's first row, other ranks look up.

    Indices that no rank has are left to the first and the last rank, so that they fail as without sharding.
    """
    rank = mesh.get_local_rank()
    below = indices < (0 if rank else torch.iinfo(indices.dtype).min)
    return below | (indices >= (rows if rank < mesh.size() - 1 else torch.iinfo(indices.dtype).max))


def _distributed(tensor: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """DTensor with the placement, from a DTensor or from this rank's shard or replica."""
    if isinstance(tensor, DTensor):
        return tensor if tensor.placements == (placement,) else tensor.redistribute(placements=[placement])
    return DTensor.from_local(tensor, mesh, [placement], run_check=False)


def _hook_first_tensor(module: nn.Module, convert: Any) -> None:
    """Converts the first tensor among the arguments in every call of the module, wherever it stands."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args and isinstance(args[0], torch.Tensor):
            return (convert(args[0]), *args[1:]), kwargs
        name = next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
        return args, {**kwargs, name: convert(kwargs[name])}

    module.register_forward_pre_hook(before, with_kwargs=True)


def _hook_inputs(module: nn.Module, mesh: DeviceMesh, placement: Placement, *, given: Placement | None = None) -> None:
    """Makes the first tensor among the arguments a DTensor with the placement; plain tensors have that of ``given``."""

    def convert(tensor: torch.Tensor) -> DTensor:
        return _distributed(_distributed(tensor, mesh, given or placement), mesh, placement)

    _hook_first_tensor(module, convert)


def _hook_outputs(module: nn.Module, placement: Placement | None) -> None:
    """Makes the output a plain tensor of the placement; with None it stays a DTensor."""
    if placement is None:
        return

    def after(_: nn.Module, __: tuple[Any, ...], output: DTensor) -> torch.Tensor:
        found = output if output.placements == (placement,) else output.redistribute(placements=[placement])
        return _plain(found)

    module.register_forward_hook(after)


def _plain(tensor: DTensor) -> torch.Tensor:
    """This rank's tensor, which a model may change in place, unlike that of ``to_local``; differentiable."""
    local: torch.Tensor = _ToLocal.apply(tensor)  # type: ignore[no-untyped-call]
    return local


class _ToLocal(torch.autograd.Function):
    """``to_local`` without torch's view, which nothing may change in place, not even ``nn.ReLU(inplace=True)``."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> torch.Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, tensor.placements
        return tensor.to_local().detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return DTensor.from_local(grads[0], ctx.mesh, ctx.placements, run_check=False)


def _sum_gradients(module: nn.Module) -> None:
    """Sums the gradient of each parameter over the ranks, once for every backward.

    ``fully_shard`` replaces the parameters, and sums partial gradients itself.
    """

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.redistribute(placements=[Replicate()]) if isinstance(gradient, DTensor) else gradient

    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad:
            parameter.register_hook(summed)
