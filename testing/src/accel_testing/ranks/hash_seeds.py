"""Hash seeds of a run's processes: random, or derived from one number so that a run can be repeated.

The order of sets depends on the hash seed, which differs between the ranks of real launchers. A run with a number
(``pytest --hash-seed=7``, or the variable below) gives rank r the seed 7 + 1 + r and a launcher the seed 7, in every
process that is started through this package.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "ACCEL_TESTING_HASH_SEED"
_SEEDING = Path(__file__).parent / "hash_seed_site"
_LARGEST = 2**32


def choose(value: str) -> int:
    """Number of a run: the option's value, or a random one for ``random``.

    Raises:
        ValueError: the value is neither.
    """
    if value == "random":
        return secrets.randbelow(1_000_000)
    if not value.isdecimal() or int(value) >= _LARGEST:
        raise ValueError(f"--hash-seed={value}: a number from 0 to {_LARGEST - 1} or 'random' is needed")
    return int(value)


def of_rank(rank: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that set the hash seed of ``rank``'s process; none if the run has no number."""
    run = environment.get(VARIABLE)
    return {} if run is None else {"PYTHONHASHSEED": str((int(run) + 1 + rank) % _LARGEST)}


def of_programs(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that set the hash seeds of Python programs and of the ranks that they start."""
    if VARIABLE not in environment:
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(_SEEDING), *filter(None, [environment.get("PYTHONPATH")])])}
