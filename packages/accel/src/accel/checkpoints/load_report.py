"""Options of ``load_state``, and the report of what it has loaded."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Self, final

from accel.checkpoints.run_facts import Change
from accel_backends.ops.fqn import few
from accel_backends.roles.saved_state_check import PartReport
from accel_state.errors import CheckpointMismatchError, ConfigError

if TYPE_CHECKING:
    from accel_ckpt.io.storage import Location

RNG = "rng"
"""Name of each rank's random state, in checkpoints and among the parts of ``load_state``."""


@final
@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What ``load_state`` was asked for; the same on all ranks.

    Attributes:
        strict: a checkpoint has every parameter of the run and no other.
        parts: names of what is loaded, as the checkpoint names them; None: everything.
        allow_changed_data: loaders take positions inside an epoch of data that have changed; None: as each loader's
            own options say.
    """

    strict: bool = True
    parts: frozenset[str] | None = None
    allow_changed_data: bool | None = None

    @classmethod
    def of(cls, *, strict: bool, parts: str | Iterable[str] | None, allow_changed_data: bool | None = None) -> Self:
        """The options from a call's arguments.

        Raises:
            ConfigError: ``parts`` names nothing, or holds something that is no name.
        """
        if parts is None:
            return cls(strict, allow_changed_data=allow_changed_data)
        names = [parts] if isinstance(parts, str) or not isinstance(parts, Iterable) else list(parts)
        if not names or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"load_state(parts={parts!r}): expected names of parts, like 'model' or ['model', 'optimizer']; "
                "None loads everything"
            )
        return cls(strict, frozenset(names), allow_changed_data)

    def wants(self, name: str) -> bool:
        """Whether the part of this name is to be loaded."""
        return self.parts is None or name in self.parts


@final
@dataclass(frozen=True, slots=True)
class LoadReport:
    """What ``load_state`` did.

    Attributes:
        path: the checkpoint that was loaded.
        parts: the parts that were loaded, by name; with names within a part for models and optimizers.
        kept: the parts of the run that were not loaded and stay as they were.
        changes: in what this run differs from the one that saved.
    """

    path: "Location"
    parts: Mapping[str, PartReport]
    kept: tuple[str, ...]
    changes: tuple[Change, ...]

    @property
    def complete(self) -> bool:
        """Whether every part of the run was loaded, with nothing missing or left over."""
        return not self.kept and not any(one.missing or one.left_over for one in self.parts.values())

    def lines(self) -> list[str]:
        """What is missing or left over, a line for each part that has any."""
        found = []
        for name, part in self.parts.items():
            said = [f"not in the checkpoint: {few(part.missing)}"] if part.missing else []
            said += [f"left over in the checkpoint: {few(part.left_over)}"] if part.left_over else []
            if said:
                found.append(f"{name}: {len(part.loaded)} loaded, {'; '.join(said)}")
        return found

    def __str__(self) -> str:
        kept = f"; kept: {', '.join(self.kept)}" if self.kept else ""
        return "\n  ".join([f"{self.path}: loaded {', '.join(self.parts) or 'nothing'}{kept}", *self.lines()])


def check_parts(wanted: Collection[str], saved: Sequence[str], here: Sequence[str]) -> None:
    """Refuses a checkpoint without the requested parts, and parts that the run cannot load.

    Raises:
        CheckpointMismatchError: names the first unknown part, the nearest one, and all available ones.
    """
    for names, lacks in ((saved, "the checkpoint holds no part"), (here, "nothing here takes the part")):
        unknown = sorted(set(wanted) - set(names))
        if unknown:
            near = get_close_matches(unknown[0], names, n=1)
            hint = f" (nearest: {near[0]!r})" if near else ""
            holds = "it holds" if names is saved else "prepared or registered here are"
            raise CheckpointMismatchError(
                f"load_state(parts=...): {lacks} {unknown[0]!r}{hint}; {holds} {', '.join(names)}"
            )
