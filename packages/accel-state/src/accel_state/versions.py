"""The installed version of a library, and comparisons with another version."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import total_ordering
from typing import Any, final

_PATTERN = re.compile(
    r"v?(?:(?P<epoch>\d+)!)?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[-_.]?(?P<pre>alpha|beta|preview|pre|rc|a|b|c)[-_.]?(?P<pre_number>\d*))?"
    r"(?P<post>-(?P<post_bare>\d+)|[-_.]?(?:post|rev|r)[-_.]?(?P<post_number>\d*))?"
    r"(?P<dev>[-_.]?dev[-_.]?(?P<dev_number>\d*))?"
    r"(?:\+(?P<local>[a-z0-9]+(?:[-_.][a-z0-9]+)*))?"
)
_PHASES = {"alpha": "a", "beta": "b", "c": "rc", "pre": "rc", "preview": "rc"}
_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


@final
@total_ordering
@dataclass(frozen=True, eq=False)
class Version:
    """A version that sorts as PEP 440 says: 1.0.dev1 < 1.0a1 < 1.0 < 1.0+local < 1.0.post1 < 1.1.

    Raises:
        ValueError: ``text`` is not a version.
    """

    text: str
    _key: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        match = _PATTERN.fullmatch(self.text.strip().lower())
        if match is None:
            raise ValueError(f"{self.text!r} is not a version; expected like '2.9', '1.0rc1' or '2.13.0+cpu'")
        object.__setattr__(self, "_key", _sort_key(match))

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Version) else NotImplemented

    def __lt__(self, other: "Version") -> bool:
        return bool(self._key < other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        return self.text


def _sort_key(match: re.Match[str]) -> tuple[Any, ...]:
    release = [int(part) for part in match["release"].split(".")]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    dev = int(match["dev_number"] or 0) if match["dev"] else None
    post = int(match["post_bare"] or match["post_number"] or 0) if match["post"] else None
    if match["pre"]:
        pre: tuple[str, int] = (_PHASES.get(match["pre"], match["pre"]), int(match["pre_number"] or 0))
    else:  # a bare development version comes before the first alpha, everything else after the last candidate
        pre = ("", 0) if dev is not None and post is None else ("zz", 0)
    local = tuple(
        (1, int(p), "") if p.isdecimal() else (0, 0, p) for p in re.split(r"[-_.]", match["local"] or "") if p
    )
    return (
        int(match["epoch"] or 0),
        tuple(release),
        pre,
        -1 if post is None else post,
        (1, 0) if dev is None else (0, dev),
        local,
    )


def installed_version(distribution: str) -> Version | None:
    """The version of an installed distribution, or None when there is none of that name."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Version(version(distribution))
    except PackageNotFoundError:
        return None


def compare_versions(library_or_version: object, operation: str, requirement_version: str) -> bool:
    """Whether ``library_or_version operation requirement_version`` holds, as in ``("torch", ">=", "2.9")``.

    A plain ``str`` names an installed distribution; anything else is read by its text: a version object of any
    library, or ``torch.__version__``, which is a subclass of ``str``.

    Raises:
        ValueError: ``operation`` is not one of the six, or a version cannot be read.
        importlib.metadata.PackageNotFoundError: the library is not installed.
    """
    if operation not in _OPERATORS:
        raise ValueError(f"`operation` must be one of {', '.join(_OPERATORS)}; got {operation!r}")
    if type(library_or_version) is str:
        from importlib.metadata import version

        have = Version(version(library_or_version))
    else:
        have = Version(str(library_or_version))
    return _OPERATORS[operation](have, Version(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether this torch's version compares so with ``version``."""
    import torch

    return compare_versions(Version(str(torch.__version__)), operation, version)
