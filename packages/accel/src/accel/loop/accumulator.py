"""The accumulation clock: the end of each optimizer step, and the share of each micro-batch in it."""

import dataclasses
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, final

from accel_state.errors import ConfigError

if TYPE_CHECKING:
    import torch

Key = tuple[int, ...]
"""Which models a window accumulates for, by their position among the prepared ones; empty: all of them."""

STEPS_KEY = "steps"
PATIENCE = 100
"""Rounds for which an unfinished window keeps the loss scale from changing; past them it counts as abandoned."""


@dataclass(frozen=True, slots=True)
class GradientAccumulationPlugin:
    """How micro-batches make an optimizer step.

    ``num_steps`` micro-batches form one step. ``sync_with_dataloader`` ends the window with the loader's last batch,
    ``sync_each_batch`` reduces gradients after every micro-batch (slower, but holds no unreduced gradient), and
    ``adjust_scheduler`` lets schedulers step once per optimizer step (on) or once per micro-batch (off).

    Raises:
        ConfigError: ``num_steps`` is not a whole number of at least 1.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.num_steps, bool) or not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise ConfigError(
                f"gradient_accumulation_steps is {self.num_steps!r}; it counts the micro-batches of one optimizer "
                "step and must be a whole number of at least 1 (1: no accumulation)"
            )


class WindowFacts(Protocol):
    """Where a batch stands in an accumulation window that its loader has laid out (elastic global batches)."""

    @property
    def index(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def share(self) -> float: ...


class ActiveLoader(Protocol):
    """What the clock asks of the loader that is being iterated, about the batch just delivered."""

    @property
    def end_of_dataloader(self) -> bool: ...
    @property
    def remainder(self) -> int: ...
    @property
    def batches_left(self) -> int | None: ...
    @property
    def real_counts(self) -> tuple[int, ...] | None: ...
    @property
    def window(self) -> WindowFacts | None: ...
    @property
    def weight(self) -> float: ...
    def claim(self) -> None: ...
    def disclaim(self) -> None: ...


class Scaling(Protocol):
    """What adapts a loss scale: a backend."""

    def update_scaler(self, *, hold: bool = False) -> None: ...
    def overflow_dropped(self) -> bool: ...


class AccumulationWindow:
    """One accumulation window of one group of models: its position, and the weights given to ``backward``.

    Attributes:
        step: micro-steps since the last end of a loader.
        position: micro-batches of this window so far, of ``size`` that are expected.
        weight: sum of the weights given on this rank; None: none yet.
        denominator: what summed losses are divided by in this window so far.
        reference: the denominator that the next window starts with.
        stepped: an optimizer has stepped since the loss scale was last adapted.
        rounds: of steps of other groups since this one's last micro-batch.
        cleared: optimizers (ids) whose gradients were cleared since the last weighted loss.
        seen: the models held gradients after the last weighted loss.
        reached: models (positions) of no group of their own that losses of this window have reached.
    """

    __slots__ = (
        "cleared",
        "denominator",
        "position",
        "reached",
        "reference",
        "rounds",
        "seen",
        "size",
        "step",
        "stepped",
        "weight",
    )

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.position = 0
        self.size = 1
        self.weight: torch.Tensor | None = None
        self.denominator: torch.Tensor | None = None
        self.reference: torch.Tensor | None = None
        self.stepped = False
        self.rounds = 0
        self.cleared: set[int] = set()
        self.seen = False
        self.reached: set[int] = set()

    @property
    def open(self) -> bool:
        """It holds gradients of a step that is not due yet."""
        return 0 < self.position < self.size

    def restart(self, size: int) -> None:
        """Begins the next window, of ``size`` micro-batches as far as can be known."""
        self.position = 0
        self.size = size
        if self.reached:
            self.reached.clear()
        if self.weight is not None or self.denominator is not None or self.seen:
            self.close()

    def close(self) -> None:
        """Forgets the weights given so far: their step was taken, their gradients dropped, or a window begins."""
        self.weight = None
        self.denominator = None
        self.seen = False


@final
class StepClock:
    """Counts micro-steps; the optimizer, the scheduler and ``backward`` ask it, the loaders report to it.

    It belongs to one Accelerator, so two of them never disturb each other. Each group of models given to
    ``accumulate`` has a window of its own: a GAN's two networks, accumulated in turn, each step when theirs is full.

    Attributes:
        due: the current micro-batch ends an optimizer step. True before the first tick, so that a loop without
            ``accumulate`` steps every time.
        share: what the mean loss of the current micro-batch is multiplied with, so that the window's gradients add
            up to that of one big batch.
        key: the group of models that is being accumulated for; its window is ``window``.
        claimed: the models (positions) of all such groups.
        num_models: how many models there were when all of them were accumulated for last.
        unclaimed: a pass of a loader has begun since the last backward or step.
        unstepped: since a backward that a step was due after, no optimizer has stepped, and no gradients were cleared.
        correction: what the gradients must be multiplied with after the last backward of the window, because it
            turned out shorter than could be known (a stream that ended); 1.0 nearly always.
    """

    __slots__ = (
        "_loaders",
        "_windows",
        "claimed",
        "correction",
        "due",
        "key",
        "num_models",
        "plugin",
        "share",
        "unclaimed",
        "unstepped",
        "window",
    )

    def __init__(self, plugin: GradientAccumulationPlugin) -> None:
        self.plugin = plugin
        self.due = True
        self.share = 1.0 / plugin.num_steps
        self.correction = 1.0
        self._loaders: list[weakref.ref[ActiveLoader]] = []
        self.unclaimed = False
        self.unstepped = False
        self._windows: dict[Key, AccumulationWindow] = {}
        self.key: Key = ()
        self.num_models = 0
        self.claimed: set[int] = set()
        self.window = self._windows.setdefault((), AccumulationWindow())

    @property
    def step(self) -> int:
        """Micro-steps counted in the current group of models since the last end of a loader."""
        return self.window.step

    @step.setter
    def step(self, value: int) -> None:
        self.window.step = value

    @property
    def num_steps(self) -> int:
        """Micro-batches of one optimizer step."""
        return self.plugin.num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self.plugin = dataclasses.replace(self.plugin, num_steps=value)
        self.share = 1.0 / value

    @property
    def scale(self) -> float:
        """``share``, times what this rank's part weighs where ranks share the sequences of a batch."""
        loader = self.active_loader if self._loaders else None
        return self.share if loader is None else self.share * loader.weight

    @property
    def open(self) -> bool:
        """Some group of models holds gradients of a window that has not ended yet."""
        return any(window.open for window in self._windows.values())

    def stepped(self) -> None:
        """An optimizer has stepped for the current group of models, or has left the step out."""
        if self.unclaimed:
            self.claim_passes()
        self.unstepped = False
        window = self.window
        if window.weight is not None or window.denominator is not None or window.seen:
            window.close()
        window.stepped = True

    def cleared(self, optimizer: object) -> None:
        """Notes that the gradients of an optimizer were cleared, so that losses of no step are forgotten."""
        self.unstepped = False
        if self.window.weight is not None:
            self.window.cleared.add(id(optimizer))

    def settle_scale(self, scaling: Scaling) -> None:
        """Adapts the loss scale, before a backward, if a round of steps is over: some group begins its next window.

        The optimizers of one group, and groups that step in turn (a GAN's), make one round and one change of the
        scale. While another group holds gradients of an unfinished window, the scale has to stay as it is in them.
        Clearing gradients that overflowed, instead of stepping, ends a round, too.
        """
        if not self.window.stepped and not scaling.overflow_dropped():
            return
        others = [window for window in self._windows.values() if window is not self.window]
        scaling.update_scaler(hold=any(window.open and window.rounds < PATIENCE for window in others))
        self.window.stepped = False
        for window in others:
            window.stepped = False
            window.rounds += 1

    def tick(self, key: Key = ()) -> bool:
        """Enters the next micro-batch of the models ``key``; returns whether it ends their window."""
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = self._continued(key) or AccumulationWindow()
            self.claimed.update(key)
        window.rounds = 0
        self.window = window
        self.key = key
        loader = self.active_loader if self._loaders else None
        planned = loader.window if loader is not None else None
        if planned is not None:
            return self._tick_planned(window, planned)
        at_end = loader is not None and self.plugin.sync_with_dataloader and loader.end_of_dataloader
        if window.position == 0 or window.position >= window.size:
            window.restart(self._expected(loader, window))
        window.position += 1
        if at_end:
            window.step = 0
            due = True
        else:
            window.step += 1
            due = window.step % self.plugin.num_steps == 0
        self.share = 1.0 / window.size
        self.correction = window.size / window.position if due else 1.0
        if due:
            window.size = window.position
        self.due = due
        return due

    def _continued(self, key: Key) -> AccumulationWindow | None:
        """The open window of all models, if these were all of them then; it becomes theirs alone."""
        if key != tuple(range(self.num_models)) or not self._windows[()].open:
            return None
        window, self._windows[()] = self._windows[()], AccumulationWindow()
        return window

    def _tick_planned(self, window: AccumulationWindow, planned: WindowFacts) -> bool:
        if planned.index == 0:
            window.restart(planned.size)
        window.position = planned.index + 1
        window.step += 1
        self.due = window.position == planned.size
        self.share = planned.share
        self.correction = 1.0
        return self.due

    def _expected(self, loader: ActiveLoader | None, window: AccumulationWindow) -> int:
        """How many micro-batches the window that begins now will hold."""
        full = self.plugin.num_steps - window.step % self.plugin.num_steps
        if loader is None or not self.plugin.sync_with_dataloader:
            return full
        left = loader.batches_left
        return full if left is None else min(full, left + 1)

    def began(self, loader: ActiveLoader) -> None:
        """A prepared loader starts a pass; it is the active one until it ends or another starts inside it.

        The pass is taken for an evaluation until there is a backward or a step in it.
        """
        self._loaders.append(weakref.ref(loader))
        loader.disclaim()
        self.unclaimed = True

    def claim_passes(self) -> None:
        """The passes under way train: a run that is resumed goes on inside them. To be called by what trains."""
        if not self.unclaimed:
            return
        self.unclaimed = False
        for reference in self._loaders:
            loader = reference()
            if loader is not None:
                loader.claim()

    def ended(self, loader: ActiveLoader) -> None:
        """A pass is over or was abandoned: what was active before it is active again."""
        for position in range(len(self._loaders) - 1, -1, -1):
            if self._loaders[position]() is loader:
                del self._loaders[position]
                break

    @property
    def active_loader(self) -> ActiveLoader | None:
        """The innermost prepared loader being iterated, or None."""
        while self._loaders:
            loader = self._loaders[-1]()
            if loader is not None:
                return loader
            self._loaders.pop()
        return None

    def reset(self) -> None:
        """Forgets every window, as at the start."""
        self._windows.clear()
        self.claimed.clear()
        self.key = ()
        self.window = self._windows.setdefault((), AccumulationWindow())
        self.due = True
        self.unstepped = False
        self.share = 1.0 / self.plugin.num_steps
        self.correction = 1.0

    def state_dict(self) -> dict[str, object]:
        """Micro-steps by group of models, JSON only. Positions inside open windows come with their gradients."""
        steps = {
            ",".join(map(str, key)): [window.step, window.position, window.size]
            for key, window in self._windows.items()
        }
        return {STEPS_KEY: steps}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continues where ``state_dict`` was taken."""
        steps = state[STEPS_KEY]
        assert isinstance(steps, Mapping)
        self.reset()
        for text, (step, position, size) in steps.items():
            key = tuple(int(part) for part in text.split(",") if part)
            window = self._windows.setdefault(key, AccumulationWindow())
            self.claimed.update(key)
            window.step, window.position, window.size = step, position, size
        self.window = self._windows[()]
