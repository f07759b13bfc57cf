"""Entry points of installed packages, one for each name of a group."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def find_entry_point(group: str, name: str, error: type[Exception]) -> "EntryPoint | None":
    """Returns the entry point ``name`` of a group; None if no installed package has it.

    Raises:
        error: packages give the name to different objects; the message names both, because which of them the
            environment lists first is chance.
    """
    from importlib.metadata import entry_points

    found = {point.value: point for point in entry_points(group=group, name=name)}
    if len(found) > 1:
        raise error(
            f"{name!r} in the entry-point group {group} is claimed by {' and '.join(map(_owner, found.values()))}; "
            "uninstall all but one of these packages"
        )
    return next(iter(found.values()), None)


def _owner(point: "EntryPoint") -> str:
    package = "a package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
    return f"{package} ({point.value})"
