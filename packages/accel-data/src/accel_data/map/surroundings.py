"""The user's samplers and dataset behind a map-style loader: the epochs set on them, their states, their changes."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from accel_data.map.dataloader_parts import DataLoaderParts
from accel_data.order.counter_rng import derive_key
from accel_data.order.cursor import as_integer
from accel_data.order.orders import owned
from accel_state.errors import DataError

_BASIS = ("weights", "indices", "num_samples", "replacement", "shuffle", "order")


@final
class Basis:
    """Attributes from which a sampler's order was computed, to detect that the user has changed the sampler."""

    def __init__(self, sampler: Any) -> None:
        self._values = [(name, _content(getattr(sampler, name, None))) for name in _BASIS]

    def differs(self, sampler: Any) -> bool:
        """Whether an attribute was assigned another value, or a tensor, array or list was changed in place."""
        for name, before in self._values:
            now = getattr(sampler, name, None)
            if isinstance(before, torch.Tensor):
                now = _content(now)
                same = isinstance(now, torch.Tensor) and torch.equal(before, now)
            else:
                same = before is now or (isinstance(before, int) and before == now)
            if not same:
                return True
        return False


def _content(value: Any) -> Any:
    """Returns a copy of a tensor, array or list of numbers; another value itself."""
    if not isinstance(value, torch.Tensor | list | tuple) and not hasattr(value, "__array__"):
        return value
    try:
        return owned(value, torch.float64)
    except (TypeError, ValueError, RuntimeError):  # a sampler of the user's own may call anything by these names
        return value


def _chain_of(parts: DataLoaderParts) -> list[Any]:
    """Returns the user's batch sampler, its sampler, and the samplers that they wrap, outermost first."""
    found: list[Any] = []
    candidates: list[Any] = [parts.batch_sampler, parts.sampler]
    while candidates:
        candidate = candidates.pop(0)
        if candidate is None or any(candidate is known for known in found):
            continue
        found.append(candidate)
        candidates += [getattr(candidate, name, None) for name in ("batch_sampler", "sampler")]
    return found


def generator_in(parts: DataLoaderParts) -> torch.Generator | None:
    """Returns the generator of the user's samplers, the outermost if there are several; None if they have none."""
    return next((found for found in map(_generator_of, _chain_of(parts)) if found is not None), None)


def _generator_of(sampler: Any) -> torch.Generator | None:
    """Returns the generator that a sampler has as an attribute, or None."""
    generator = getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


@final
class Surroundings:
    """The user's samplers and dataset that have a ``set_epoch`` or a state.

    Collected once, because the start of a pass must be fast.

    Attributes:
        dataset_listens: whether the dataset has a ``set_epoch``.
    """

    def __init__(self, parts: DataLoaderParts, dataset: object, *, walked: bool) -> None:
        samplers = _chain_of(parts)
        self._listeners = [it for it in [*samplers, dataset] if callable(getattr(it, "set_epoch", None))]
        self._epochs: dict[int, int | None] = {n: 0 for n, it in enumerate(self._listeners) if it is not dataset}
        self.dataset_listens = any(it is dataset for it in self._listeners)
        self._walked = samplers if walked else []
        names = ("state_dict", "load_state_dict")
        self._stateful = [it for it in self._walked if all(callable(getattr(it, name, None)) for name in names)]

    def begin(self, epoch: int, seed: int) -> None:
        """Calls ``set_epoch`` on all of them, and seeds the generators of samplers that are iterated."""
        for listener in self._listeners:
            listener.set_epoch(epoch)
        self._epochs = {number: self._epoch_of(number) for number in self._epochs}
        for number, generator in self._generators():
            generator.manual_seed(derive_key(seed, epoch, number))

    def _generators(self) -> list[tuple[int, torch.Generator]]:
        """Returns the generators of the samplers that are iterated, with the numbers of the samplers."""
        found = [(number, _generator_of(sampler)) for number, sampler in enumerate(self._walked)]
        return [(number, generator) for number, generator in found if generator is not None]

    def kept(self) -> Callable[[], None]:
        """Returns a function that restores the current states of the samplers and their generators."""
        states, generators = self.states(), [(one, one.get_state()) for _, one in self._generators()]

        def restore() -> None:
            self.load(states)
            for generator, state in generators:
                generator.set_state(state)

        return restore

    def announce(self, epoch: int) -> None:
        """Sets the epoch of the next pass on the samplers whose epoch can be read."""
        for number in self._epochs:
            if self._epoch_of(number) not in (None, epoch):
                self._listeners[number].set_epoch(epoch)
            self._epochs[number] = self._epoch_of(number)

    def epoch_chosen(self) -> int | None:
        """Returns the epoch that the script has set on a sampler since the last of these calls; None if it set none."""
        for number, known in self._epochs.items():
            epoch = self._epoch_of(number)
            if epoch is not None and epoch != known:
                self._epochs[number] = epoch
                return epoch
        return None

    def _epoch_of(self, number: int) -> int | None:
        return as_integer(getattr(self._listeners[number], "epoch", None))

    @property
    def keeps_state(self) -> bool:
        """Whether a sampler has a state."""
        return bool(self._stateful)

    def states(self) -> list[Any]:
        """Returns copies of the states of the stateful samplers, outermost first."""
        return [copy.deepcopy(sampler.state_dict()) for sampler in self._stateful]

    def load(self, states: Sequence[Any]) -> None:
        """Restores the states of the stateful samplers, which may go on to change what they are given."""
        for sampler, state in zip(self._stateful, states, strict=False):
            sampler.load_state_dict(copy.deepcopy(state))


def fingerprint_of(dataset: Any) -> str | None:
    """Returns the string ``fingerprint`` (attribute or method) that identifies a dataset or sampler, or None."""
    value = getattr(dataset, "fingerprint", None)
    if callable(value):
        value = value()
    if value is not None and not isinstance(value, str):
        raise DataError(
            f"{type(dataset).__name__}.fingerprint gives {type(value).__name__}; it must give a string, or None"
        )
    return value
