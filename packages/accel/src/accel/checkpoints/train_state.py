"""Names for everything that must resume, and the saving and loading of each."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import getattr_static, isfunction
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, final, runtime_checkable

from torch import nn

from accel.loop.accumulator import DIVISORS_KEY
from accel_backends.ops.fqn import named_parameters
from accel_backends.roles.prepared_states import ModelState
from accel_state.errors import CheckpointMismatchError, ConfigError

if TYPE_CHECKING:
    from accel.loop.accumulator import StepClock
    from accel_ckpt import Terms
    from accel_ckpt.io.storage import Location


# Kinds of parts of which a rank may have its own.
_OWN = ("optimizer", "scheduler", "custom")
_APART = (
    "copies of a model that have come apart are not saved as one. Inside LocalSGD save right after the step that "
    "averages them (num_steps is a multiple of local_sgd_steps), or after the block"
)


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be saved and loaded: its state is nested dicts and lists of tensors and JSON values."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@final
@dataclass(frozen=True, slots=True)
class LoaderState:
    """A prepared loader's position, which all ranks share, and what an opaque dataset of one rank needs besides.

    ``allow_changed_data``: a position inside an epoch of data that have changed is loaded; None: as the loader's
    options say.
    """

    PRIVATE: ClassVar[str] = "private"

    loader: Any
    allow_changed_data: bool | None = None

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.loader.state_dict().items() if key != self.PRIVATE}

    def private(self) -> Any:
        """This rank's own part of the position, None nearly always."""
        return self.loader.state_dict().get(self.PRIVATE)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state, allow_changed_data=self.allow_changed_data)

    def undo(self) -> Callable[[], None]:
        """Returns a function that undoes what is loaded from now on; a pass that is under way goes on counting."""
        undo: Callable[[], None] = self.loader.undo()
        return undo


@final
@dataclass(frozen=True, slots=True)
class ClockState:
    """Micro-batches of all windows, and the divisors of summed losses, which are saved for any layout.

    A divisor is the sum of the weights of all ranks. ``copies``, the ranks that read the same samples (a tensor-,
    context- or pipeline-parallel group), is how many times it has each weight; a checkpoint has it once.
    """

    clock: "StepClock"
    copies: float

    def state_dict(self) -> dict[str, object]:
        return _with_divisors(self.clock.state_dict(), lambda divisor: divisor / self.copies)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.clock.load_state_dict(_with_divisors(state, lambda divisor: divisor * self.copies))

    def undo(self) -> Callable[[], None]:
        """Returns a function that undoes what is loaded from now on."""
        return self.clock.undo()


@final
@dataclass(frozen=True, slots=True)
class SideState:
    """JSON that goes with a checkpoint and is not needed to load it: an older one lacks it, another run ignores it.

    Only the main process's is saved; every process is given it.
    """

    save: Callable[[], Any]
    load: Callable[[Any], None]


@final
class TrainState(Mapping[str, Stateful]):
    """The parts of a run by name: ``model``, ``model_1``, ``optimizer``, ``scheduler``, ``loader``, ``custom``, ...

    Parts are numbered in the order in which they were prepared or registered; the first has no number.
    """

    def __init__(self) -> None:
        self._parts: dict[str, Stateful] = {}

    def add(self, kind: str, parts: Sequence[Stateful]) -> "TrainState":
        """Names ``parts`` after their kind and position."""
        for position, part in enumerate(parts):
            self._parts[kind if position == 0 else f"{kind}_{position}"] = part
        return self

    def collect(self) -> dict[str, Any]:
        """The state of every part, models first."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def terms(
        self,
        fill: "Callable[[Location], object] | None" = None,
        *,
        apart: "Collection[nn.Module]" = (),
        sharded: bool = False,
    ) -> "Terms":
        """What a save does where ranks have different values of a part.

        Each keeps its own optimizer, schedule and registered objects. Copies of a model that are not trained ``apart``
        should be equal: they may have drifted on unlike devices, so the first rank's are saved, with a warning. Those
        that are trained apart are no state to go on from. ``fill`` adds files. ``sharded``: a rank may hold the state
        of some of an optimizer's parameters only.
        """
        from accel_ckpt import Terms
        from accel_ckpt.format.tree import tensor_name

        @cache
        def parameters() -> frozenset[str]:
            models = ((name, part.model) for name, part in self._parts.items() if isinstance(part, ModelState))
            found = ((name, model) for name, model in models if model in apart)
            return frozenset(tensor_name((name, own)) for name, model in found for own in named_parameters(model))

        def refused(place: str) -> str | None:
            return _APART if place in parameters() else None

        own = [name for name in self._parts if name.startswith(_OWN)]
        in_parts = [name for name in own if sharded and name.startswith(_OWN[0])]
        return Terms(own=own, in_parts=in_parts, refused=refused, fill=fill)

    def check_names(self, saved: Sequence[str], *, ignored: Collection[str] = ()) -> None:
        """Raises unless the checkpoint holds exactly the parts that are here, ``ignored`` ones left out.

        Raises:
            CheckpointMismatchError: names of what the checkpoint lacks and of what nothing here takes.
        """
        missing = sorted(set(self._parts) - set(saved) - set(ignored))
        unexpected = sorted(set(saved) - set(self._parts))
        if missing or unexpected:
            parts = []
            if missing:
                parts.append(f"it holds no {', '.join(missing)}")
            if unexpected:
                parts.append(f"nothing here takes its {', '.join(unexpected)}")
            raise CheckpointMismatchError(
                f"the checkpoint belongs to another run: {'; '.join(parts)}. Prepare and register the same objects, "
                "in the same order, as when it was saved, or name the parts to load: load_state(parts=['model'])"
            )

    def __getitem__(self, name: str) -> Stateful:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _with_divisors(state: Mapping[str, Any], change: Callable[[float], float]) -> dict[str, object]:
    """The state of a clock with each of its divisors changed."""
    divisors = {
        text: [None if one is None else change(one) for one in pair]
        for text, pair in state.get(DIVISORS_KEY, {}).items()
    }
    return {**state, DIVISORS_KEY: divisors} if divisors else dict(state)


def check_stateful(objects: Sequence[object]) -> None:
    """Refuses objects that cannot be saved, when they are registered rather than when they are saved.

    Raises:
        ConfigError: lists every object without ``state_dict`` and ``load_state_dict``, and classes in place of
            objects.
    """
    bad = [f"Item at index {index}, {_named(item)}" for index, item in enumerate(objects) if not _is_stateful(item)]
    if bad:
        raise ConfigError(
            "objects registered for checkpointing need `state_dict` and `load_state_dict`; these have not: "
            + "; ".join(bad)
        )


def _is_stateful(item: object) -> bool:
    """Whether an object has the methods; a class has them only if they are class methods."""
    is_unbound = isinstance(item, type) and isfunction(getattr_static(item, "state_dict", None))
    return isinstance(item, Stateful) and not is_unbound


def _named(item: object) -> str:
    kind = item if isinstance(item, type) else type(item)
    return f"{'the class ' if kind is item else ''}{kind.__module__}.{kind.__qualname__}"
