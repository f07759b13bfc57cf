"""Hints of error messages."""

import pytest

from accel_state.errors import did_you_mean


@pytest.mark.parametrize(
    ("word", "hint"), [("fspd", "; did you mean 'fsdp'?"), ("FSDP", ""), ("", ""), ("nothing like it", "")]
)
def test_a_hint_names_the_nearest_word_or_nothing(word: str, hint: str) -> None:
    assert did_you_mean(word, ("ddp", "fsdp", "deepspeed")) == hint
    assert did_you_mean(word, iter({"fsdp": 1})) == hint
    assert did_you_mean(word, ()) == ""
