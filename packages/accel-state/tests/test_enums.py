"""Enums print, compare and contain as clients of Accelerate rely on."""

import json

import pytest

from accel_state import (
    DEVICE_KINDS,
    DDPCommunicationHookType,
    DistributedType,
    LoggerType,
)


def test_distributed_type_is_text_that_prints_with_its_class():
    assert DistributedType.NO == "NO"
    assert json.dumps(DistributedType.NO) == '"NO"'
    assert str(DistributedType.MULTI_GPU) == "DistributedType.MULTI_GPU"


@pytest.mark.parametrize("kind", DEVICE_KINDS.values(), ids=lambda kind: kind.type)
def test_every_device_type_has_a_family(kind):
    assert DistributedType(kind.family)


@pytest.mark.parametrize("enum", [LoggerType, DDPCommunicationHookType])
def test_lenient_enums_say_what_they_contain(enum):
    values = enum.list()
    assert all(value in enum for value in values)
    assert "no such thing" not in enum
    assert None not in enum
    assert [str(member) for member in enum] == values
