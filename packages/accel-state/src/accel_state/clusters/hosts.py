"""Host lists in the formats of batch systems."""

import re
from collections.abc import Iterator, Mapping

from accel_state.errors import TopologyError

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_PART = re.compile(r"[^\[\]]*(\[[^\[\]]*\][^\[\]]*)*")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hosts(nodelist: str) -> list[str]:
    """Expands Slurm's short form: ``"node[001-003,7],gpu2"`` gives node001, node002, node003, node7, gpu2.

    Leading zeros are kept; several brackets in one name give the product. Source: hostlist expressions of
    slurm.conf(5).

    Raises:
        TopologyError: unbalanced brackets, an empty element, or a range that is not ascending.
    """
    hosts = [host for part in _split_outside_brackets(nodelist) for host in _expand_part(part, nodelist)]
    if not hosts:
        raise TopologyError(f"the node list {nodelist!r} is empty; expected hosts like 'node[01-04],gpu2'")
    return hosts


def lsf_hosts(env: Mapping[str, str]) -> list[str]:
    """Returns the compute hosts of an LSF job, from ``LSB_MCPU_HOSTS`` ("host slots host slots ...") or ``LSB_HOSTS``.

    With several hosts, a first host with a single slot is dropped: that is the launch node, where jsrun starts no
    process.
    """
    words = env.get("LSB_MCPU_HOSTS", "").split()
    pairs = list(zip(words[::2], words[1::2], strict=False))
    if len(pairs) > 1 and pairs[0][1] == "1":
        pairs = pairs[1:]
    if pairs:
        return [host for host, _ in pairs]
    return list(dict.fromkeys(env.get("LSB_HOSTS", "").split()))


def _split_outside_brackets(nodelist: str) -> list[str]:
    if nodelist.count("[") != nodelist.count("]"):
        raise TopologyError(f"the node list {nodelist!r} has unbalanced brackets")
    parts = re.split(r",(?![^\[]*\])", nodelist.strip())
    return [part.strip() for part in parts if part.strip()]


def _expand_part(part: str, nodelist: str) -> Iterator[str]:
    if not _PART.fullmatch(part):
        raise TopologyError(f"cannot read {part!r} in the node list {nodelist!r}")
    match = _BRACKETS.search(part)
    if match is None:
        yield part
        return
    for item in match[1].split(","):
        for number in _numbers(item.strip(), nodelist):
            yield from _expand_part(part[: match.start()] + number + part[match.end() :], nodelist)


def _numbers(item: str, nodelist: str) -> Iterator[str]:
    match = _RANGE.fullmatch(item)
    first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
    if int(last) < int(first):
        raise TopologyError(f"cannot read the range {item!r} in the node list {nodelist!r}; expected like '001-004'")
    for number in range(int(first), int(last) + 1):
        yield f"{number:0{len(first)}d}"
