"""Loggers that know the processes."""

import logging

import pytest

from accel_compat.helpers.logs import get_logger
from accel_compat.state.process_state import SharedPartialState


@pytest.mark.ranks(2)
def test_in_order_logs_on_every_process(rank: int) -> None:
    SharedPartialState(cpu=True)
    seen: list[str] = []
    keeper = logging.Handler()
    keeper.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = get_logger("tests.in_order")
    logger.logger.setLevel(logging.INFO)
    logger.logger.addHandler(keeper)
    logger.info("first")
    logger.info("each", main_process_only=False)
    logger.info("at %d", rank, in_order=True)
    logger.info("also", main_process_only=False, in_order=True)
    assert seen == ["[RANK 0] first"] * (rank == 0) + [
        f"[RANK {rank}] {text}" for text in ("each", f"at {rank}", "also")
    ]
    SharedPartialState._reset_state()
