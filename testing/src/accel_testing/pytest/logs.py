"""Log records of a rank, where pytest's own fixture does not work."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heard(name: str, level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collects the messages of the logger ``name`` and its children within the block, from ``level`` up."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
