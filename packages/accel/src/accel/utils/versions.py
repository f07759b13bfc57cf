"""Versions of installed libraries."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from packaging.version import Version as Version

STR_OPERATION_TO_FUNC: Mapping[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def installed_version(distribution: str) -> Version | None:
    """Returns the version of an installed distribution, or None if there is no distribution of that name."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Version(version(distribution))
    except PackageNotFoundError:
        return None


def compare_versions(library_or_version: object, operation: str, requirement_version: str) -> bool:
    """Returns whether ``library_or_version operation requirement_version`` holds, as in ``("torch", ">=", "2.9")``.

    A plain ``str`` names an installed distribution; other arguments are parsed as text: a version object of any
    library, or ``torch.__version__``, which is a subclass of ``str``. Versions are ordered by PEP 440.

    Raises:
        ValueError: ``operation`` is not one of the six, or a version cannot be parsed.
        importlib.metadata.PackageNotFoundError: the library is not installed.
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(f"`operation` must be one of {', '.join(STR_OPERATION_TO_FUNC)}; got {operation!r}")
    if type(library_or_version) is str:
        from importlib.metadata import version

        have = Version(version(library_or_version))
    else:
        have = Version(str(library_or_version))
    return STR_OPERATION_TO_FUNC[operation](have, Version(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Returns whether this torch's version satisfies ``operation version``."""
    import torch

    return compare_versions(Version(str(torch.__version__)), operation, version)
