"""Families by their names, and what they import."""

from collections.abc import Mapping

from accel_megatron.conversion.architecture import Architecture
from accel_megatron.families.bert import BertFamily
from accel_megatron.families.family import Family
from accel_megatron.families.gpt import GPTFamily
from accel_megatron.families.t5 import T5Family

FAMILIES: Mapping[str, Family] = {"gpt": GPTFamily(), "bert": BertFamily(), "t5": T5Family()}


def family_of(architecture: Architecture) -> Family:
    """Returns the family that builds and calls a model of this architecture."""
    return FAMILIES[architecture.family]
