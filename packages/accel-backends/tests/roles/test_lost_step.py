"""Steps that a strategy cannot leave."""

import pytest


def test_a_strategy_that_cannot_leave_a_step_says_so() -> None:
    from accel_backends.roles.lost_step import LostStepError, lost_if_failed

    with pytest.raises(LostStepError, match="strategy 'fsdp1' failed with KeyError"), lost_if_failed("fsdp1"):
        raise KeyError("label")
