"""Models of megatron-core that a user's own function builds."""

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import torch

from accel_state.collectives.tensors import agree
from accel_state.errors import PrepareError

if TYPE_CHECKING:
    from accel_megatron.config import MegatronConfig

_NEAREST = (
    "it keeps the names of the model that prepare is given; nearest: a subclass of GPTModel, BertModel or T5Model that "
    "computes otherwise with the same parameters"
)


def provided_model(options: "MegatronConfig", config: Any, *, first: bool, last: bool, chunk: int | None) -> Any:
    """Returns the model of a stage, or of a chunk of it, that the plugin's functions build.

    Raises:
        PrepareError: several models, or one in Megatron-LM's wrappers, which are put around it later.
    """
    facts = {
        "pre_process": first,
        "post_process": last,
        "vp_stage": chunk,
        "add_encoder": True,
        "add_decoder": True,
        "config": config,
    }
    assert options.custom_model_provider_function is not None
    provider = _with_facts(options.custom_model_provider_function, facts)
    prepare = options.custom_prepare_model_function
    made = provider() if prepare is None else prepare(provider)
    models = list(made) if isinstance(made, (list, tuple)) else [made]
    if len(models) != 1 or hasattr(models[0], "ddp_config"):
        found = f"{len(models)} models" if len(models) != 1 else f"a {type(models[0]).__name__}"
        raise PrepareError(
            f"custom_prepare_model_function returned {found}; expected one model of megatron-core, around which "
            "Megatron-LM's data-parallel wrapper is put later; nearest: lambda provider: [provider()]"
        )
    return models[0]


def check_parameters(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Raises PrepareError on all ranks where a stage has other parameters than ``weights``.

    Collective: every rank of the group must call this.
    """
    own = {name: p.shape for name, p in model.named_parameters()}
    wanted = {name: value.shape for name, value in weights.items()}
    other = sorted(name for name in own.keys() | wanted.keys() if own.get(name) != wanted.get(name))
    problem = None
    if other:
        sizes = [tuple(one[other[0]]) if other[0] in one else "absent" for one in (own, wanted)]
        problem = PrepareError(
            f"the model of custom_model_provider_function has other parameters, first {other[0]}, which is {sizes[0]} "
            f"there and {sizes[1]} in the converted model; {_NEAREST}"
        )
    agree(problem)


def _with_facts(provider: Callable[..., Any], facts: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the provider with those facts that it has parameters for, unless a call gives them."""
    function = signature(provider)
    anything = any(one.kind is Parameter.VAR_KEYWORD for one in function.parameters.values())
    known = {name: value for name, value in facts.items() if anything or name in function.parameters}

    def call(*args: Any, **arguments: Any) -> Any:
        given = function.bind_partial(*args).arguments
        return provider(*args, **{name: value for name, value in known.items() if name not in given} | arguments)

    return call
