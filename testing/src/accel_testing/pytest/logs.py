"""Log records of a rank, where pytest's own fixture does not reach."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heard(name: str, level: int = logging.WARNING) -> Iterator[list[str]]:
    """The messages that the logger called ``name``, and those below it, are given meanwhile, from ``level`` up."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
