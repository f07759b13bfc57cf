"""Architecture of a Transformers model that megatron-core computes: sizes, degrees, and rules of conversion."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch.nn import functional

from accel_megatron.conversion.rules import Rule, stack_name
from accel_state.errors import PrepareError


def gelu_tanh(hidden: torch.Tensor) -> torch.Tensor:
    """GELU by its approximation with tanh."""
    return functional.gelu(hidden, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": functional.relu,
    "silu": functional.silu,
}
EMBEDDING, POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
HEAD = "output_layer.weight"


@final
@dataclass(frozen=True, slots=True)
class Architecture:
    """A model as megatron-core needs to know it.

    Attributes:
        transformer: fields of ``TransformerConfig``; dropouts that are missing have to be among the options of a run.
        model: arguments of megatron-core's model.
        num_layers: number of transformer layers.
        divisible: numbers that the tensor-parallel size has to divide, by their names in the model's configuration.
        divisible_experts: those that the number of ranks that share an expert has to divide.
        layer_rules: rules of layer ``number``, by the names of megatron-core within the layer.
        first: rules of what stands before the layers.
        last: rules of what stands behind the layers; the head is among them if it is not tied.
        head: rule of the head, which a last stage has even if it is tied.
        tied: whether the head is the embedding.
        rotary: whether positions are rotary, not learned.
        num_experts: number of experts in each layer; 0: layers have none.
        expert_rules: rules of expert ``number`` of a layer, by the names of megatron-core within the expert.
        family: name of the family that builds and calls the model.
        layers: name of the layers in megatron-core's model.
        details: what the family needs to know beyond ``model``.
        padding: token whose lookups give its row of the embedding no gradient; None: there is none.
        in_fp32: why the model is not computed in fp64; empty if it can be.
        undivided: why the model has one stage only; empty if its layers can be divided among stages.
    """

    transformer: Mapping[str, Any]
    model: Mapping[str, Any]
    num_layers: int
    divisible: Mapping[str, int]
    layer_rules: Callable[[int], dict[str, Rule]]
    first: Mapping[str, Rule]
    last: Mapping[str, Rule]
    head: Rule
    tied: bool
    rotary: bool = True
    num_experts: int = 0
    divisible_experts: Mapping[str, int] = field(default_factory=dict)
    expert_rules: Callable[[int, int], dict[str, Rule]] = lambda layer, number: {}
    family: str = "gpt"
    layers: str = "decoder.layers"
    details: Mapping[str, Any] = field(default_factory=dict)
    padding: int | None = None
    in_fp32: str = ""
    undivided: str = ""

    def check_degrees(self, tensor: int, pipeline: int, expert: int = 1, of_each: int = 1) -> None:
        """Raises PrepareError for degrees that do not divide the model; ``of_each``: ranks that share an expert."""
        if expert > 1 and not self.num_experts:
            raise PrepareError(
                f"expert_model_parallel_size={expert}, and the layers of the model have no experts; nearest: 1"
            )
        for name, number in self.divisible_experts.items():
            if number % of_each:
                raise PrepareError(
                    f"{name}={number} is not divisible by expert_tensor_parallel_size={of_each}; nearest: "
                    f"{_nearest(number, of_each)}"
                )
        if self.num_experts % expert:
            raise PrepareError(
                f"{self.num_experts} experts are not divisible by expert_model_parallel_size={expert}; nearest: "
                f"{_nearest(self.num_experts, expert)}"
            )
        for name, number in self.divisible.items():
            if number % tensor:
                more = f"; resize_token_embeddings(pad_to_multiple_of={tensor})" if name == "vocab_size" else ""
                raise PrepareError(
                    f"{name}={number} is not divisible by tp_degree={tensor}; nearest: {_nearest(number, tensor)}{more}"
                )
        if pipeline > 1 and self.undivided:
            raise PrepareError(f"pp_degree={pipeline}: {self.undivided}; nearest: pp_degree=1")
        if self.num_layers % pipeline:
            raise PrepareError(
                f"{self.num_layers} layers are not divisible by pp_degree={pipeline}; nearest: "
                f"{_nearest(self.num_layers, pipeline)}"
            )

    @property
    def stacks(self) -> frozenset[str]:
        """FQNs of tensors that stack the weights of all experts of a layer."""
        layers = range(self.num_layers) if self.num_experts else ()
        found = (rule for layer in layers for rule in self.expert_rules(layer, 0).values())
        return frozenset(stack_name(name) for rule in found for name in rule.names)

    def rules(
        self, stage: int, pipeline: int, expert_rank: int = 0, expert_size: int = 1
    ) -> Iterator[tuple[str, Rule]]:
        """Yields the name in megatron-core's model of a stage, and the rule, of each of its tensors.

        Of the experts of a layer, those of rank ``expert_rank`` of ``expert_size`` expert-parallel ranks are among
        them; their FQNs are ``slice_name`` of stacked tensors.
        """
        per_stage, per_rank = self.num_layers // pipeline, self.num_experts // expert_size
        if stage == 0:
            yield from self.first.items()
        for local in range(per_stage):
            for name, rule in self.layer_rules(stage * per_stage + local).items():
                yield f"{self.layers}.{local}.{name}", rule
            for own in range(per_rank):
                expert = self.expert_rules(stage * per_stage + local, expert_rank * per_rank + own)
                for name, rule in expert.items():
                    yield f"{self.layers}.{local}.mlp.experts.local_experts.{own}.{name}", rule
        if stage == pipeline - 1:
            yield from self.last.items()
            if not self.tied or pipeline > 1:
                yield HEAD, self.head

    def owned_rules(
        self, stage: int, pipeline: int, expert_rank: int = 0, expert_size: int = 1
    ) -> Iterator[tuple[str, Rule]]:
        """Yields as ``rules``, without the copy of a tied embedding on the last stage."""
        for name, rule in self.rules(stage, pipeline, expert_rank, expert_size):
            if not (name == HEAD and self.tied):
                yield name, rule


def refuse(name: str, found: object, wanted: object) -> None:
    """Raises PrepareError for an option of a model that megatron-core computes only if it is ``wanted``."""
    if found != wanted:
        raise PrepareError(f"{name}={found!r}, which megatron-core does not compute; nearest: {name}={wanted!r}")


def activation(name: str, value: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the activation function of option ``name``.

    Raises:
        PrepareError: an unknown one.
    """
    if value not in ACTIVATIONS:
        raise PrepareError(f"{name}={value!r}; expected one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[value]


def _nearest(number: int, degree: int) -> int:
    return max(one for one in range(1, degree + 1) if number % one == 0)
