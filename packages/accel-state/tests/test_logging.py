"""One message instead of W, or W in order, and the caller is who it was."""

import logging

import pytest

from accel_state import Device, Session, SessionError, Topology, get_logger

NAME = "accel_state.tests.logging"


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.DEBUG, logger=NAME)
    return caplog


def on_rank(rank, world_size=2):
    """A session that has this place without any peer: what a logger asks is its topology."""
    return Session(Topology.on_one_node(rank, world_size), Device("cpu"), lease=None, group=None, debug=False)


def test_no_session_is_needed(log):
    get_logger(NAME).info("hello %s", "you")
    assert [record.getMessage() for record in log.records] == ["hello you"]


def test_the_launchers_variables_tell_the_rank(log, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    logger = get_logger(NAME)
    logger.info("hidden")
    logger.info("shown", main_process_only=False)
    assert [record.getMessage() for record in log.records] == ["[RANK 1] shown"]


@pytest.mark.parametrize(("rank", "shown"), [(0, ["[RANK 0] a", "[RANK 0] b"]), (1, ["[RANK 1] b"])])
def test_only_the_main_process_logs_unless_told_otherwise(rank, shown, log):
    with on_rank(rank):
        logger = get_logger(NAME)
        logger.info("a")
        logger.warning("b", main_process_only=False)
    assert [record.getMessage() for record in log.records] == shown


def test_the_caller_is_reported(log):
    logger = get_logger(NAME)
    logger.info("here")
    logger.warning_once("there")
    for record in log.records:
        assert (record.filename, record.funcName) == ("test_logging.py", "test_the_caller_is_reported")
    assert log.records[1].lineno == log.records[0].lineno + 1


def test_a_stack_level_of_the_user_is_respected(log):
    def outer():
        get_logger(NAME).info("here", stacklevel=3)

    outer()
    assert log.records[0].funcName == "test_a_stack_level_of_the_user_is_respected"


def test_a_warning_comes_once_per_text(log):
    logger = get_logger(NAME)
    for text in ("a", "b", "a"):
        logger.warning_once(text)
    assert [record.getMessage() for record in log.records] == ["a", "b"]


@pytest.mark.parametrize("level", ["debug", "ERROR", 30])
def test_the_level_is_set_on_this_logger_alone(level):
    root = logging.getLogger().level
    logger = get_logger(f"{NAME}.level", level)
    assert logger.logger.level == (level if isinstance(level, int) else getattr(logging, level.upper()))
    assert logging.getLogger().level == root


def test_the_level_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    assert get_logger(f"{NAME}.env").logger.level == logging.ERROR


def test_order_needs_a_session(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SessionError, match="needs an open session"):
        get_logger(NAME).error("x", in_order=True)


@pytest.mark.ranks(3)
def test_messages_come_in_order_of_rank(rank, tmp_path):
    logger = get_logger(NAME, "INFO")
    handler = logging.FileHandler(tmp_path / "log")
    logger.logger.addHandler(handler)
    try:
        with Session.open(cpu=True) as session:
            for turn in range(3):
                logger.info("turn %d", turn, in_order=True)
            logger.debug("too low to show, and yet no hang", in_order=True)
            logger.info("all", main_process_only=False)
            session.wait_for_everyone()
    finally:
        logger.logger.removeHandler(handler)
        handler.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[:9] == [f"[RANK {number}] turn {turn}" for turn in range(3) for number in range(3)]
    assert sorted(lines[9:]) == [f"[RANK {number}] all" for number in range(3)]
