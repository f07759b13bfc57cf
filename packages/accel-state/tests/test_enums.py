"""Enums print, compare and contain as clients of Accelerate rely on."""

import json

import pytest

from accel_state import (
    DEVICE_KINDS,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    LoggerType,
    PrecisionType,
    RNGType,
)


def test_distributed_type_is_text_that_prints_with_its_class():
    assert DistributedType.NO == "NO"
    assert json.dumps(DistributedType.NO) == '"NO"'
    assert str(DistributedType.MULTI_GPU) == "DistributedType.MULTI_GPU"


@pytest.mark.parametrize("kind", DEVICE_KINDS.values(), ids=lambda kind: kind.type)
def test_every_device_type_has_a_family(kind):
    assert DistributedType(kind.family)


@pytest.mark.parametrize("enum", [LoggerType, PrecisionType, RNGType, DDPCommunicationHookType, DynamoBackend])
def test_lenient_enums_say_what_they_contain(enum):
    values = enum.list()
    assert all(value in enum for value in values)
    assert "no such thing" not in enum
    assert None not in enum
    assert [str(member) for member in enum] == values


@pytest.mark.parametrize("text", ["te", "TE", "Te"])
def test_fp8_backends_are_understood_in_any_case(text):
    assert FP8BackendType(text) is FP8BackendType.TE


def test_dynamo_backends_are_understood_in_lower_case():
    assert DynamoBackend("inductor") is DynamoBackend.INDUCTOR
    assert "inductor" in DynamoBackend
    with pytest.raises(ValueError, match="nope"):
        DynamoBackend("nope")
