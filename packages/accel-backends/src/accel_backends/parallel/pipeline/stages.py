"""Stages of a pipeline, which share the modules of one model."""

import copy
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast, final

import torch
import torch.distributed as dist
from torch import nn

from accel_backends.parallel.pipeline.causal_lm import CausalLM
from accel_backends.parallel.pipeline.faults import Faults
from accel_backends.parallel.pipeline.router_sums import Routers, RouterSums
from accel_backends.parallel.router_loss import MASK, ROUTER_LOGITS
from accel_state.errors import BackendError

InPrecision = Callable[[nn.Module], nn.Module]
"""Function that makes calls of a module compute in the precision of the run."""


@final
@dataclass(frozen=True, slots=True)
class Feed:
    """Inputs of the micro-batches of one batch, and what is done with the output of each.

    Attributes:
        inputs: keyword arguments of the model for each micro-batch.
        shape: samples and tokens of each micro-batch.
        finish: called on the last stage with the number and the output of a micro-batch; returns its loss.
        routers: sums of the load-balancing loss, to which all stages add; None: the call does not have that loss.
        labelled: in evaluation, whether there are labels.
    """

    inputs: Sequence[Mapping[str, Any]]
    shape: tuple[int, ...]
    finish: Callable[[int, Any], torch.Tensor]
    routers: RouterSums | None = None
    labelled: bool | None = None


@final
@dataclass(frozen=True, slots=True)
class _Traits:
    """Properties of activations beside the number of samples and tokens."""

    rest: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, shape: tuple[int, ...]) -> "_Traits | None":
        """Returns the traits of a tensor; None if its shape does not begin with ``shape``."""
        if tensor.shape[: len(shape)] != shape:
            return None
        return cls(tuple(tensor.shape[len(shape) :]), tensor.dtype, tensor.requires_grad)

    def example(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a tensor without values that has these traits."""
        return torch.empty(*shape, *self.rest, dtype=self.dtype, device="meta", requires_grad=self.trained)


def make_stages(
    causal_lm: CausalLM, ranges: Sequence[range], held: Sequence[int], in_precision: InPrecision = lambda module: module
) -> list["Stage"]:
    """Makes the stages ``held`` of a model that has all its modules.

    The model keeps its modules; the first and the last block of each stage get a hook.
    """
    return [Stage(causal_lm, index, ranges[index], in_precision) for index in held]


def drop_other_stages(causal_lm: CausalLM, ranges: Sequence[range], held: Collection[int]) -> None:
    """Replaces the modules of other stages by ones without parameters, which cannot be called.

    A tied weight stays under all its names on the ranks of the first and the last stage, so that it has the same name
    in the states of both.
    """
    model, base, blocks = causal_lm.model, causal_lm.base, causal_lm.blocks
    first, last = 0 in held, len(ranges) - 1 in held
    kept = {position for index in held for position in ranges[index]}
    for position in set(range(len(blocks))) - kept:
        blocks[position] = Elsewhere(f"{causal_lm.base_name}.{causal_lm.blocks_name}.{position}")
    embedding = cast(Any, model).get_input_embeddings()
    head = model.get_submodule(causal_lm.head_name)
    both = causal_lm.tied is not None and (first or last)
    for name in causal_lm.embeddings:
        if not first and not (both and base.get_submodule(name) is embedding):
            setattr(base, name, Elsewhere(f"{causal_lm.base_name}.{name}"))
    for name in causal_lm.behind:
        if not last:
            setattr(base, name, Elsewhere(f"{causal_lm.base_name}.{name}"))
    if not last and not (both and all(one is causal_lm.tied for one in head.parameters())):
        setattr(model, causal_lm.head_name, Elsewhere(causal_lm.head_name))


@final
class Elsewhere(nn.Module):
    """A module that another rank of the pipeline has."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *args: Any, **options: Any) -> NoReturn:
        """Raises BackendError."""
        here = f" (this is rank {dist.get_rank()})" if dist.is_initialized() else ""
        raise BackendError(
            f"{self.name} is on another rank of the pipeline; call the model that prepare returned, which computes all "
            f"stages{here}"
        )

    def _load_from_state_dict(self, *_: Any) -> None:
        """Leaves the tensors of the module in a full state dict to the other rank."""


@final
class Placeholder(nn.Module):
    """A module of another stage, which returns its first argument; has the plain attributes of that module."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        plain = {key: value for key, value in vars(original).items() if isinstance(value, str | int | float)}
        self.__dict__.update(plain)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Returns the activations unchanged."""
        return hidden_states


@final
class _NoEmbedding(nn.Module):
    """Placeholder for an embedding on stages after the first, which do not use its output."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, indices: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Returns zeros; ignores further arguments, such as a mask and positions."""
        return torch.zeros(*indices.shape, self.features, device=indices.device)


@final
class Stage(nn.Module):
    """One stage: numbers of micro-batches or received activations in, activations to send or losses out.

    The model's own forward runs on every stage, so that it prepares masks and positions for the blocks. It runs on
    shallow copies of the model and its base model, in which the modules of other stages are placeholders, so that a
    rank can have several stages. On stages after the first, the activations replace the input of the stage's first
    block, whatever the model has made of its inputs; on stages before the last, the output of the stage's last block is
    the result.
    """

    def __init__(self, causal_lm: CausalLM, number: int, mine: range, in_precision: InPrecision) -> None:
        super().__init__()
        blocks, self.number = causal_lm.blocks, number
        self.faults: Faults | None = None
        self._features = _features(causal_lm)
        before = [causal_lm.base.get_submodule(name) for name in causal_lm.embeddings] + list(blocks)[: mine.start]
        self._follows_trained = any(one.requires_grad for module in before for one in module.parameters())
        self.first, self.last = mine.start == 0, mine.stop == len(blocks)
        self.feed: Feed | None = None
        base = _shell(causal_lm.base)
        own = nn.ModuleList(block if n in mine else Placeholder(block) for n, block in enumerate(blocks))
        parts: dict[str, nn.Module] = {causal_lm.blocks_name: own}
        for name in () if self.first else causal_lm.embeddings:
            parts[name] = _NoEmbedding(cast(nn.Embedding, base._modules[name]).embedding_dim)
        for name in () if self.last else causal_lm.behind:
            parts[name] = Placeholder(cast(nn.Module, base._modules[name]))
        base._modules.update(parts)
        model = _shell(causal_lm.model)
        model._modules[causal_lm.base_name] = base
        if not self.last:
            model._modules[causal_lm.head_name] = Placeholder(cast(nn.Module, model._modules[causal_lm.head_name]))
        # Outside of the registries of modules, so that every module is registered once.
        self.__dict__.update(_sources=((causal_lm.model, model), (causal_lm.base, base)))
        self.target = in_precision(model if self.last else base)
        self._accepted = None if self.last else _accepted_by_base(causal_lm.model, causal_lm.base)
        self._has_routers = Routers.of(causal_lm.model) is not None
        if self._has_routers:
            causal_lm.base.register_forward_pre_hook(self._record_routers, with_kwargs=True)
        self._received: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None
        # By whether there is a backward: traits of what the stage was given, and of its result.
        self._traits: dict[bool, tuple[_Traits | None, _Traits | None]] = {}
        if not self.first:
            blocks[mine.start].register_forward_pre_hook(self._replace_input, with_kwargs=True)
        if not self.last:
            blocks[mine.stop - 1].register_forward_hook(self._keep_output)

    def forward(self, given: torch.Tensor, *, number: torch.Tensor) -> torch.Tensor:
        """Computes the stage for the micro-batch of this number; zeros after an error of this rank."""
        assert self.faults is not None
        if self.faults.error is None:
            try:
                return self._computed(given, int(number))
            except Exception as error:
                self.faults.note(error, f"forward of micro-batch {int(number)} of pipeline stage {self.number}")
        self._received = self._sent = None
        return self._zeros(given)

    def _computed(self, given: torch.Tensor, index: int) -> torch.Tensor:
        assert self.feed is not None
        inputs = dict(self.feed.inputs[index])
        for source, own in self.__dict__["_sources"]:
            own.training = source.training
        if not self.first:
            self._received = given
            inputs.pop("input_ids", None)
            inputs["inputs_embeds"] = given.detach()
        if self._has_routers:
            inputs[ROUTER_LOGITS] = False  # the last stage would compute the loss of its own layers
        if self._accepted is not None:
            inputs = {key: value for key, value in inputs.items() if self._accepted(key)}
        output = self.target(**inputs, use_cache=False, return_dict=True)
        self._received = None
        if self.last:
            result = torch.stack([self.feed.finish(index, output)])
        else:
            assert self._sent is not None
            result, self._sent = self._sent, None
        if self.feed.routers is not None:
            result = self.feed.routers.attach(index, result, output, self.feed.inputs[index].get(MASK))
        shapes = ((1,) if self.first else self.feed.shape, (1,) if self.last else self.feed.shape)
        traits = (_Traits.of(given, shapes[0]), _Traits.of(result, shapes[1]))
        self._traits[torch.is_grad_enabled()] = traits
        return result

    def _zeros(self, given: torch.Tensor) -> torch.Tensor:
        """Zeros like the result, with a graph to what was given."""
        assert self.feed is not None
        _, known = self._traits.get(torch.is_grad_enabled(), (None, None))
        if self.first:
            trained = torch.is_grad_enabled()
            shape = (1,) if self.last else (*self.feed.shape, *(known.rest if known else self._features[0]))
            dtype = known.dtype if known else self._features[1]
            return torch.zeros(shape, dtype=dtype, device=given.device, requires_grad=trained) * 1
        result = (given * 0).nan_to_num()
        result = result.sum().reshape(1) if self.last else result
        return result.to(known.dtype) if known else result

    def example_tensors(
        self, shape: tuple[int, ...], *, backward: bool, alone: bool = False
    ) -> dict[str, torch.Tensor]:
        """Tensors without values like the input and the result of the stage for micro-batches of ``shape``.

        Empty before the first run, in which torch finds them by running one micro-batch more and asking the stages
        before. If this rank is ``alone``, those before the first run are as embeddings and blocks that keep them.
        """
        given, result = self._traits.get(backward, self._assumed_traits(backward) if alone else (None, None))
        if given is None or result is None:
            return {}
        return {
            "input_args": given.example((1,) if self.first else shape),
            "output_args": result.example((1,) if self.last else shape),
        }

    def _assumed_traits(self, backward: bool) -> tuple[_Traits, _Traits]:
        """Traits of the input and of the result of a stage that has received nothing yet."""
        kept = _Traits(*self._features, trained=backward and self._follows_trained)
        given = _Traits((), torch.int64, trained=False) if self.first else kept
        own = backward and (self._follows_trained or any(one.requires_grad for one in self.target.parameters()))
        return given, _Traits((), torch.float32, own) if self.last else replace(kept, trained=own)

    def _record_routers(
        self, base: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**options, ROUTER_LOGITS: self.feed is not None and self.feed.routers is not None}

    def _replace_input(
        self, block: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._received is None:
            raise BackendError("a block was called outside of its pipeline stage; call the model that prepare returned")
        if args:
            return (self._received, *args[1:]), options
        return args, {**options, "hidden_states": self._received}

    def _keep_output(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        sent = output[0] if isinstance(output, tuple) and len(output) == 1 else output
        if not isinstance(sent, torch.Tensor):
            raise BackendError(
                f"blocks of class {type(block).__name__} return a {type(output).__name__}; expected one tensor, which "
                "the next pipeline stage receives"
            )
        self._sent = sent


def _features(causal_lm: CausalLM) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape, without samples and tokens, and dtype of the embeddings, which blocks keep."""
    weight = cast(Any, causal_lm.model).get_input_embeddings().weight
    return tuple(weight.shape[1:]), weight.dtype


def _shell(module: nn.Module) -> nn.Module:
    """Copy of a module that shares everything with it except the mapping of its children."""
    shell = copy.copy(module)
    shell.__dict__["_modules"] = dict(module._modules)
    return shell


def _accepted_by_base(model: nn.Module, base: nn.Module) -> Callable[[str], bool]:
    """Whether an argument of the model is one of its base model too, by the signatures of their forwards."""
    own, inner = (inspect.signature(type(module).forward).parameters for module in (model, base))
    others = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in inner.values())
    return lambda name: name in inner or (others and name not in own)
