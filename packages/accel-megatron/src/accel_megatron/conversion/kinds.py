"""Kinds of Transformers models, by their ``model_type``, and the architecture of each."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from accel_megatron.conversion.architecture import Architecture
from accel_megatron.conversion.bert import bert, megatron_bert
from accel_megatron.conversion.gpt import gpt2, llama, mixtral
from accel_megatron.conversion.t5 import t5
from accel_state.errors import PrepareError


def architecture_of(config: Any, names: Collection[str] = ()) -> Architecture:
    """Returns the architecture of a model with this Transformers configuration.

    ``names``: of the model's tensors, in Transformers or in megatron-core, which tell the heads of a BERT.

    Raises:
        PrepareError: another kind of model, or an option that megatron-core computes otherwise.
    """
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in _KINDS:
        raise PrepareError(
            f"Megatron-LM trains models of Transformers with model_type {', '.join(map(repr, _KINDS))}, and this one "
            f"is {kind!r}; nearest: strategy='fsdp'"
        )
    return _KINDS[kind](config, names)


def _without_names(rules: Callable[[Any], Architecture]) -> Callable[[Any, Collection[str]], Architecture]:
    return lambda config, names: rules(config)


_KINDS: Mapping[str, Callable[[Any, Collection[str]], Architecture]] = {
    "llama": _without_names(llama),
    "mixtral": _without_names(mixtral),
    "gpt2": _without_names(gpt2),
    "bert": bert,
    "megatron-bert": megatron_bert,
    "t5": _without_names(t5),
}
