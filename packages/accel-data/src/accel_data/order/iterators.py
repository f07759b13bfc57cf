"""Iterators of user code, whose ``__iter__`` may begin again or not."""

from collections.abc import Iterator
from types import FunctionType
from typing import TypeVar

ItemT = TypeVar("ItemT")


def is_consumed_once(items: object) -> bool:
    """Whether ``items`` is a generator or a built-in iterator, which cannot begin again.

    A class whose ``__iter__`` returns itself may begin again there.
    """
    return isinstance(items, Iterator) and not isinstance(type(items).__iter__, FunctionType)


def continuing(iterator: Iterator[ItemT]) -> Iterator[ItemT]:
    """Returns an iterator over the rest of ``iterator``, which continues when ``iter`` is called on it.

    ``islice`` and ``for`` call it. The iterator of a user's class is often the object itself, whose ``__iter__`` begins
    again.
    """
    return iterator if is_consumed_once(iterator) else _items_of(iterator)


def _items_of(iterator: Iterator[ItemT]) -> Iterator[ItemT]:
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item
