"""Shared state: every instance of a class has the attributes of one dictionary."""

from typing import Any


class SharedAttributes:
    """Base of the classes whose instances share their attributes.

    A subclass has a dictionary ``_shared_state`` of its own, and names the attributes in ``_known_attrs`` that exist
    once it is initialised.
    """

    _shared_state: dict[str, Any] = {}
    _known_attrs: frozenset[str] = frozenset()
    _shown: str = ""

    def __init__(self) -> None:
        self.__dict__ = self._shared_state

    def __reduce__(self) -> Any:
        return _of_this_process, (type(self),)

    def __getattr__(self, name: str) -> Any:
        if name in self._known_attrs:
            raise AttributeError(
                f"`{self._shown}` object has no attribute `{name}`. This happens if `{self._shown}._reset_state()` was "
                "called and an `Accelerator` or `PartialState` was not reinitialized."
            )
        raise AttributeError(f"'{self._shown}' object has no attribute '{name}'")


def _of_this_process(kind: type[SharedAttributes]) -> SharedAttributes:
    """Returns the instance of another process's object here: the state is that of the process that reads it."""
    made = object.__new__(kind)
    SharedAttributes.__init__(made)
    return made
