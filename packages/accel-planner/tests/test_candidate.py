"""Candidates: their names, and the optimizers that they take."""

import re

import pytest

from accel_planner import candidates
from accel_planner.candidate import named
from accel_state import ConfigError


def test_candidates_are_found_by_name_or_family() -> None:
    every = candidates(8)
    assert [c.name for c in named(every, ["DDP"])] == ["ddp", "ddp+ckpt"]
    assert [c.name for c in named(every, ["ddp+ckpt"])] == ["ddp+ckpt"]
    with pytest.raises(ConfigError, match="did you mean 'fsdp:full_shard'"):
        named(every, ["fsdp:fullshard"])


@pytest.mark.parametrize(
    ("optimizer", "families"),
    [("adamw", {"ddp", "fsdp", "zero"}), ("Adafactor", {"ddp"}), ("rprop", {"ddp", "zero"}), ("Muon", {"ddp", "fsdp"})],
)
def test_a_candidate_says_which_optimizers_it_takes(optimizer: str, families: set[str]) -> None:
    taken = {re.split("[:+]", candidate.name)[0] for candidate in candidates(8, 2) if candidate.takes(optimizer)}
    assert taken == families


def test_devices_of_xla_have_strategies_of_their_own() -> None:
    assert [c.name for c in candidates(4, kind="xla")] == ["xla", "xla:shard"]
    assert not any(c.backend == "xla" for c in candidates(4))
