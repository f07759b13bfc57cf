"""Tied parameters: names of a module's parameters that are one tensor."""

from collections.abc import Iterable, Mapping, Sequence
from logging import getLogger
from typing import Any

import torch
from torch import nn

_LOG = getLogger(__name__)
_RECORDED = "_accel_ties"


def find_tied_parameters(model: nn.Module, **_: Any) -> list[list[str]]:
    """Groups of names that are the same parameter, each sorted; empty without ties.

    The parameters may be on the meta device: a tie is the identity of the object, not equality of the values.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Makes each group of names one parameter again: the first of them that is not on the meta device, or the first."""
    for group in tied_params:
        owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in group]
        found = [parameter for owner, leaf in owners if (parameter := getattr(owner, leaf, None)) is not None]
        if not found:
            continue
        chosen = next((each for each in found if each.device.type != "meta"), found[0])
        for owner, leaf in owners:
            if isinstance(chosen, nn.Parameter):
                setattr(owner, leaf, chosen)
            else:
                owner.register_parameter(leaf, nn.Parameter(chosen, requires_grad=chosen.is_floating_point()))


def record_ties(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Keeps groups of names that cannot be one parameter now, because they are on several devices."""
    if groups := [list(group) for group in tied_params]:
        model.__dict__[_RECORDED] = groups


def forget_ties(model: nn.Module) -> list[list[str]]:
    """Groups that ``record_ties`` kept, which are no longer kept."""
    found: list[list[str]] = model.__dict__.pop(_RECORDED, [])
    return found


def retie_equal_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Makes those of each group one parameter again that are on one device with equal values; others stay apart."""
    for group in tied_params:
        left = [name for name in group if not model.get_parameter(name).is_meta]
        while left:
            first = model.get_parameter(left[0])
            alike = [name for name in left if _equal(model.get_parameter(name), first)]
            retie_parameters(model, [alike])
            left = [name for name in left[1:] if name not in alike]


def _equal(one: nn.Parameter, other: nn.Parameter) -> bool:
    return one is other or (one.device == other.device and one.dtype == other.dtype and torch.equal(one, other))


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether the configuration of a transformers model requests tied embeddings (or a tied encoder and decoder)."""
    config: Any = getattr(model, "config", None)
    output_of: Any = getattr(model, "get_output_embeddings", None)
    if config is None or output_of is None:
        return False
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    embeddings = bool(getattr(text, "tie_word_embeddings", False)) and output_of() is not None
    both = bool(getattr(config, "is_encoder_decoder", False)) and bool(getattr(config, "tie_encoder_decoder", False))
    return embeddings or both


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, int | str | torch.device]
) -> None:
    """Logs a warning for each group of tied names that the map places on more than one device."""
    for group in tied_params:
        places = {name: device for name in group if (device := device_of(name, device_map)) is not None}
        if len(set(places.values())) > 1:
            _LOG.warning("Tied parameters are on different devices: %s; place them on one device", places)


def device_of(name: str, device_map: Mapping[str, Any]) -> Any | None:
    """Device of the longest entry of the map that covers ``name``; None if no entry does."""
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return device_map[name]
