"""Enums of Accelerate's settings contain and compare as its clients rely on."""

import pytest

from accel.utils import DynamoBackend, FP8BackendType, PrecisionType, RNGType


@pytest.mark.parametrize("enum", [PrecisionType, RNGType, DynamoBackend])
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
