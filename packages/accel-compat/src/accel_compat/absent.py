"""Names of Accelerate whose parts accel does not have: importing them works, using them is an error."""

from typing import Any, NoReturn

from accel.absent import advice


def _refuse(name: str) -> NoReturn:
    instead = advice(name).removeprefix(", which Accelerate has: ") or "see docs/reference/differences.md"
    raise RuntimeError(f"{name} of Accelerate has no counterpart in accel-compat; with accel itself: {instead}")


def __getattr__(name: str) -> Any:
    """Returns a class with this name that cannot be instantiated."""
    if name.startswith("__"):
        raise AttributeError(name)

    def __init__(self: object, *args: Any, **kwargs: Any) -> None:
        _refuse(name)

    return type(
        name, (), {"__init__": __init__, "__module__": "accelerate", "__doc__": f"{name} of Accelerate; absent."}
    )
