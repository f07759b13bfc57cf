"""Description of a run in the metadata of its checkpoints, and the differences between two runs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from accel.loop.accumulator import StepClock
    from accel_backends import Backend
    from accel_ckpt import Checkpoint
    from accel_data import LoaderOptions
    from accel_launch.config.model import AccelConfig
    from accel_precision import PrecisionPolicy
    from accel_state import ParallelismConfig
    from accel_state.session import Session

VERSION_KEY, USER_KEY, COMPANIONS_KEY, SEED_KEY = "accel", "user", "companions", "seed"
UNKNOWN_KEY = "unknown"
"""Kinds of parts that the writer of a checkpoint had no record of; a run that loads it keeps its own."""
CONFIG_KEY, TOPOLOGY_KEY, STRATEGY_KEY, NUMBERS_KEY = "config", "topology", "strategy", "numbers"
_TOPOLOGY = ("world_size", "local_world_size", "num_nodes", "launcher")
_PRECISION, _STEPS = "mixed_precision", "gradient_accumulation_steps"
_LOADING = ("split_batches", "global_batch_size", "even_batches")
_DEGREES = ("tp_size", "cp_size", "sp_size", "ep_size")
_SHARDS, _PROCESSES = "data_shards", "number of processes"
# Entries that change the results by rounding only.
_ROUNDING = frozenset([*_DEGREES, "strategy", "accel", "torch"])


@final
@dataclass(frozen=True, slots=True)
class Change:
    """One difference between the run that saved a checkpoint and the run that loads it."""

    what: str
    saved: Any
    here: Any
    numbers: bool
    """Whether the difference changes the run's results beyond rounding."""

    def __str__(self) -> str:
        return f"{self.what} is {_shown(self.here)} here and was {_shown(self.saved)} when it was saved"


@final
@dataclass(frozen=True, slots=True)
class RunDescription:
    """Facts of an Accelerator that determine how it computes."""

    session: "Session"
    backend: "Backend"
    policy: "PrecisionPolicy"
    clock: "StepClock"
    config: "AccelConfig"
    loading: "LoaderOptions"
    parallelism: "ParallelismConfig"
    data_shards: int
    """Number of ranks that read different samples."""

    def document(self) -> dict[str, Any]:
        """Description stored in a checkpoint, as JSON."""
        topology = self.session.topology
        return {
            VERSION_KEY: _version(),
            CONFIG_KEY: json.loads(self.config.to_document()),
            TOPOLOGY_KEY: {name: getattr(topology, name) for name in _TOPOLOGY},
            STRATEGY_KEY: self.backend.name,
            NUMBERS_KEY: self._numbers(),
        }

    def changes(self, checkpoint: "Checkpoint") -> tuple[Change, ...]:
        """Differences between this run and the one that saved; entries that an older checkpoint lacks are ignored."""
        here = _flat(self.document(), self.session.world_size, _torch_version())
        return differences(_description(checkpoint), here)

    def _numbers(self) -> dict[str, Any]:
        return {
            _PRECISION: self.policy.name,
            _STEPS: self.clock.num_steps,
            **{name: getattr(self.loading, name) for name in _LOADING},
            **{name: getattr(self.parallelism, name) for name in _DEGREES},
            _SHARDS: self.data_shards,
        }


def section(metadata: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns an entry of a checkpoint's metadata that has entries by name; empty if it is another program's entry."""
    found = metadata.get(key)
    return found if isinstance(found, Mapping) else {}


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[Change, ...]:
    """Entries of two flat descriptions that differ; entries that only one of them has are ignored."""
    regrouped = _batches(saved) != _batches(here)
    return tuple(
        Change(what, saved[what], value, regrouped if what == _PROCESSES else what not in _ROUNDING)
        for what, value in here.items()
        if what in saved and saved[what] != value and what != _SHARDS
    )


def _batches(facts: Mapping[str, Any]) -> int:
    """Factor by which the number of processes multiplies a loader's batches."""
    if facts.get("global_batch_size") or facts.get("split_batches"):
        return 1
    shards = facts.get(_SHARDS)
    return int(shards if isinstance(shards, int) else facts[_PROCESSES])


def _description(checkpoint: "Checkpoint") -> dict[str, Any]:
    """A checkpoint's description, flat; that of an older checkpoint has only the numbers in its settings."""
    metadata, writer = checkpoint.metadata, checkpoint.manifest.writer
    given = section(section(metadata, CONFIG_KEY), "values")
    old = {name: given[name] for name in (_PRECISION, _STEPS) if name in given}
    torch = writer.get("torch") if isinstance(writer, Mapping) else None
    numbers = section(metadata, NUMBERS_KEY) if NUMBERS_KEY in metadata else old
    return _flat({**metadata, NUMBERS_KEY: numbers}, checkpoint.world_size, torch)


def _flat(document: Mapping[str, Any], world_size: int, torch: str | None) -> dict[str, Any]:
    named = {"strategy": document.get(STRATEGY_KEY), "accel": document.get(VERSION_KEY), "torch": torch}
    known = {what: value for what, value in named.items() if value is not None}
    return {_PROCESSES: world_size, **document[NUMBERS_KEY], **known}


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def _shown(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, bool) else str(value)


def _version() -> str:
    from accel._version import __version__

    return __version__
