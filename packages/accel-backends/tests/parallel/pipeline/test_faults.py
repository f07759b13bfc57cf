"""Errors of a stage are raised at once where other ranks wait within the stage, and at the end of the run otherwise."""

import logging

import pytest
import torch

from accel_backends.parallel.pipeline.causal_lm import CausalLM
from accel_backends.parallel.pipeline.faults import Faults
from accel_backends.parallel.pipeline.pipeline import Pipeline, StagePlan
from accel_backends.parallel.pipeline.schedules import schedule_kind
from accel_backends.parallel.pipeline.stages import Feed, make_stages
from accel_testing.equivalence.causal_lms import tiny_llama


class Records(logging.Handler):
    """Keeps the messages of a logger."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.mark.ranks(2)
def test_running_out_of_memory_is_logged_and_kept(rank):
    records, logger = Records(), logging.getLogger(Faults.__module__)
    logger.addHandler(records)
    faults = Faults(immediate=True)
    faults.note(torch.OutOfMemoryError("tried to allocate 2 GiB"), "forward of micro-batch 0 of pipeline stage 1")
    logger.removeHandler(records)
    assert f"rank {rank} failed in the forward of micro-batch 0 of pipeline stage 1, and" in "".join(records.messages)
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        faults.agree(None)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("exchanging", [False, True])
def test_an_error_of_a_stage(rank, exchanging):
    """In a pipeline of one rank, all of which fail."""

    def finish(number, output):
        raise ValueError("no such loss")

    group = next(one for one in [torch.distributed.new_group([other]) for other in (0, 1)] if in_group(one))
    kind, _ = schedule_kind("gpipe", None)
    causal_lm = CausalLM.of(tiny_llama())
    plan = StagePlan([0], 1, group, kind, torch.device("cpu"), None, exchanging)
    pipeline = Pipeline(make_stages(causal_lm, [range(2)], [0]), plan)
    feed = Feed([{"input_ids": torch.zeros(2, 4, dtype=torch.int64)}], (2, 4), finish)
    with pytest.raises(ValueError, match="no such loss") as raised:
        pipeline.run(feed, backward=True)
    assert raised.value.__notes__ == [f"rank {rank} failed in the forward of micro-batch 0 of pipeline stage 0"]
    frames = [one.name for one in raised.traceback]
    assert ("agree" in frames) == (not exchanging)


def in_group(group):
    return torch.distributed.get_rank(group) >= 0
