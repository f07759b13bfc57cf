"""Accumulation clock: the micro-batch that ends each optimizer step, and the weight of each micro-batch in it."""

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, final

from accel.loop.window import AccumulationWindow
from accel_state.errors import ConfigError

Key = tuple[int, ...]
"""Models for which a window accumulates, as positions among the prepared ones; empty: all models."""

STEPS_KEY, DIVISORS_KEY, LEFT_KEY, REACHED_KEY = "steps", "divisors", "left", "reached"
PATIENCE = 100
"""Rounds for which an unfinished window keeps the loss scale from changing; afterwards it counts as abandoned."""


@dataclass(frozen=True, slots=True)
class GradientAccumulationPlugin:
    """Options of gradient accumulation.

    ``num_steps`` micro-batches form one step. ``sync_with_dataloader`` ends the window with the loader's last batch,
    ``sync_each_batch`` reduces gradients after every micro-batch (slower, but keeps no unreduced gradients), and
    ``adjust_scheduler`` makes schedulers step once per optimizer step (on) or once per micro-batch (off).

    Raises:
        ConfigError: ``num_steps`` is not an integer of at least 1.
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
    """Position of a batch in an accumulation window that its loader has planned (elastic global batches)."""

    @property
    def index(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def share(self) -> float: ...


class ActiveLoader(Protocol):
    """Interface of the loader that is being iterated: facts about the batch just delivered."""

    @property
    def end_of_dataloader(self) -> bool: ...
    @property
    def remainder(self) -> int: ...
    @property
    def batches_left(self) -> int | None: ...
    @property
    def real_counts(self) -> tuple[int, ...] | None: ...
    @property
    def batch_rows(self) -> int | None: ...
    @property
    def window(self) -> WindowFacts | None: ...
    @property
    def weight(self) -> float: ...
    def claim(self) -> None: ...
    def disclaim(self) -> None: ...


class Clearing(Protocol):
    """Interface of an optimizer whose gradients the clock clears."""

    def clear(self, set_to_none: bool) -> None: ...


class Scaling(Protocol):
    """Interface of a loss scale that adapts between rounds of steps."""

    def update(self, *, hold: bool = False) -> None: ...
    def overflow_dropped(self) -> bool: ...


@final
class StepClock:
    """Counts micro-batches for the optimizer, the scheduler and ``backward``; loaders report their passes to it.

    Each Accelerator has its own. Each group of models passed to ``accumulate`` has its own window: a GAN's two
    networks, accumulated in turn, each step when their window is full.

    Attributes:
        due: the current micro-batch ends an optimizer step. True before the first tick, so that a loop without
            ``accumulate`` steps every time.
        share: factor of the mean loss of the current micro-batch, with which the window's gradients add up to that of
            one global batch.
        key: the group of models of the current micro-batch; its window is ``window``.
        claimed: positions of the models of all such groups.
        num_models: number of models when ``accumulate`` was last entered for all of them.
        unclaimed: a pass of a loader has begun since the last backward or step.
        unstepped: after a backward whose step was due, no optimizer has stepped and no gradients were cleared.
        complete: weak reference to the function that reduces and divides gradients that are ``window.unreduced``.
        postponed: calls of ``zero_grad`` in the last micro-batch of a window, before its backward: optimizers and their
            ``set_to_none``. Without a backward or a step until the micro-batch ends, they drop the window.
        era: an object for the time since the last load or reset. An optimizer that has stepped in an earlier one has no
            gradients of that step left to clear.
        resumed: a window is open in the loaded checkpoint, and no micro-batch has been entered since.
        uncleared: optimizers that had stepped and not cleared their gradients when the loaded checkpoint was saved.
            The next ``zero_grad`` of each clears, unless its ``step`` is called before.
        correction: factor for the gradients after the last backward of a window that was shorter than expected (the end
            of a stream), or has gradients of one before; nearly always 1.0.
    """

    __slots__ = (
        "_loaders",
        "_pass",
        "_windows",
        "claimed",
        "complete",
        "correction",
        "due",
        "era",
        "key",
        "num_models",
        "plugin",
        "postponed",
        "resumed",
        "share",
        "unclaimed",
        "uncleared",
        "unstepped",
        "window",
    )

    def __init__(self, plugin: GradientAccumulationPlugin) -> None:
        self.plugin = plugin
        self.due = True
        self.share = 1.0 / plugin.num_steps
        self.correction = 1.0
        self._loaders: list[weakref.ref[ActiveLoader]] = []
        self._pass: weakref.ref[ActiveLoader] | None = None  # the loader of the current micro-batch
        self.unclaimed = False
        self.unstepped = False
        self.complete: Callable[[], Callable[[], None] | None] | None = None
        self.postponed: dict[Clearing, bool] = {}
        self.era = object()
        self.resumed = False
        self.uncleared: set[Clearing] = set()
        self._windows: dict[Key, AccumulationWindow] = {}
        self.key: Key = ()
        self.num_models = 0
        self.claimed: set[int] = set()
        self.window = self._windows.setdefault((), AccumulationWindow())

    @property
    def step(self) -> int:
        """Micro-batches counted in the current group of models since a loader last ended."""
        return self.window.step

    @step.setter
    def step(self, value: int) -> None:
        self.window.step = value

    @property
    def num_steps(self) -> int:
        """Micro-batches of one optimizer step; a window that is open keeps the number that it began with."""
        return self.plugin.num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self.plugin = dataclasses.replace(self.plugin, num_steps=value)
        if self.window.position == 0:  # no micro-batch has been entered, which has a share of its window
            self.share = 1.0 / value

    @property
    def scale(self) -> float:
        """``share``, times the weight of this rank's sequence shard under sequence parallelism."""
        loader = self.active_loader if self._loaders else None
        return self.share if loader is None else self.share * loader.weight

    @property
    def passed(self) -> bool:
        """Whether the loop over the loader that gave the current micro-batch has ended."""
        return self._pass is not None and all(one is not self._pass for one in self._loaders)

    @property
    def open(self) -> bool:
        """Whether some group of models holds gradients of an unfinished window."""
        return any(window.open for window in self._windows.values())

    def finish(self) -> None:
        """Completes a window whose last micro-batch had no backward; called before gradients are used.

        Collective for such a window: every rank of the group must call this.
        """
        if self.window.unreduced and self.complete is not None and (complete := self.complete()) is not None:
            complete()
            self.window.unreduced = False
            self.window.several = True

    def stepped(self, optimizer: object) -> None:
        """Called when an optimizer has stepped for the current group of models, or has skipped the step."""
        if self.unclaimed:
            self.claim_passes()
        self.unstepped = False
        window = self.window
        if window.weight is not None or window.denominator is not None or window.seen:
            window.close()
        window.stepped = True
        if window.several:
            window.done.add(id(optimizer))

    def cleared(self, optimizer: object) -> None:
        """Called when the gradients of an optimizer were cleared, so that losses without a step are dropped."""
        self.unstepped = False
        if self.window.weight is not None:
            self.window.cleared.add(id(optimizer))

    def clear_postponed(self) -> None:
        """Clears the gradients of the optimizers in ``postponed``."""
        while self.postponed:
            optimizer, set_to_none = self.postponed.popitem()
            optimizer.clear(set_to_none)

    def settle_scale(self, scaling: Scaling) -> None:
        """Adapts the loss scale before a backward if a round of steps is over: some group begins its next window.

        The optimizers of one group, and groups that step in turn (a GAN's), share one round and one change of the
        scale. While another group holds gradients of an unfinished window, the scale must not change, because it is a
        factor of those gradients. Clearing overflowed gradients instead of stepping ends a round, too.
        """
        if not self.window.stepped and not scaling.overflow_dropped():
            return
        others = [window for window in self._windows.values() if window is not self.window]
        scaling.update(hold=any(window.open and window.rounds < PATIENCE for window in others))
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
        self.resumed = False
        self.window = window
        self.key = key
        loader = self.active_loader if self._loaders else None
        self._pass = None if loader is None else self._loaders[-1]
        planned = loader.window if loader is not None else None
        if planned is not None:
            return self._tick_planned(window, planned)
        at_end = loader is not None and self.plugin.sync_with_dataloader and loader.end_of_dataloader
        if window.position == 0 or window.position >= window.size:
            window.restart(self._expected(loader))
        window.position += 1
        window.step = 0 if at_end else window.step + 1
        due = at_end or window.position == window.size
        self.share = 1.0 / window.size
        self.correction = window.size / window.position if due else 1.0
        if due:
            window.size = window.position
        self.due = due
        return due

    def _continued(self, key: Key) -> AccumulationWindow | None:
        """The open window of all models, if ``key`` are all models of that time; it becomes the window of ``key``."""
        if key != tuple(range(self.num_models)) or not self._windows[()].open:
            return None
        window, self._windows[()] = self._windows[()], AccumulationWindow()
        return window

    def _tick_planned(self, window: AccumulationWindow, planned: WindowFacts) -> bool:
        if planned.index == 0:
            if window.open:  # its pass was left, and its gradients are still there
                window.left += window.position / window.size
            else:
                window.restart(planned.size)
        # Another number of ranks, which resumes inside the window, divides it into other micro-batches.
        window.position, window.size = planned.index + 1, planned.size
        window.step += 1
        self.due = window.position == planned.size
        self.share = planned.share
        self.correction = 1.0 / (1.0 + window.left) if self.due else 1.0
        return self.due

    def _expected(self, loader: ActiveLoader | None) -> int:
        """Expected number of micro-batches of the window that begins now."""
        full = self.plugin.num_steps
        if loader is None or not self.plugin.sync_with_dataloader:
            return full
        left = loader.batches_left
        return full if left is None else min(full, left + 1)

    def began(self, loader: ActiveLoader) -> None:
        """Called when a prepared loader starts a pass; it is active until the pass ends or another starts inside it.

        The pass counts as an evaluation until a backward or a step happens in it.
        """
        self._loaders.append(weakref.ref(loader))
        loader.disclaim()
        self.unclaimed = True

    def claim_passes(self) -> None:
        """Marks the current passes as training, so that a resumed run continues inside them; called by training."""
        if not self.unclaimed:
            return
        self.unclaimed = False
        for reference in self._loaders:
            loader = reference()
            if loader is not None:
                loader.claim()

    def ended(self, loader: ActiveLoader) -> None:
        """Called when a pass ended or was abandoned: the previously active loader becomes active again."""
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
        """Resets all windows to the initial state."""
        self._windows.clear()
        self.claimed.clear()
        self.key = ()
        self.window = self._windows.setdefault((), AccumulationWindow())
        self.due = True
        self._pass = None
        self.unstepped = False
        self.postponed.clear()
        self.era = object()
        self.resumed = False
        self.uncleared = set()
        self.share = 1.0 / self.plugin.num_steps
        self.correction = 1.0

    def state_dict(self) -> dict[str, object]:
        """Micro-batches, divisors of summed losses, shares of earlier windows, reached models, by group, as JSON.

        Gradients of open windows, and the weights of each rank in them, are saved separately.
        """
        windows = self.windows()
        steps = {text: [window.step, window.position, window.size] for text, window in windows.items()}
        divisors = {
            text: [None if one is None else float(one) for one in (window.denominator, window.reference)]
            for text, window in windows.items()
            if window.reference is not None
        }
        left = {text: window.left for text, window in windows.items() if window.left}
        reached = {text: sorted(window.reached) for text, window in windows.items() if window.open and window.reached}
        optional = {DIVISORS_KEY: divisors, LEFT_KEY: left, REACHED_KEY: reached}
        return {STEPS_KEY: steps, **{key: value for key, value in optional.items() if value}}

    def windows(self) -> dict[str, AccumulationWindow]:
        """Returns the windows by their groups of models, as text."""
        return {",".join(map(str, key)): window for key, window in self._windows.items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restores what ``state_dict`` returned."""
        steps, divisors, left = state[STEPS_KEY], state.get(DIVISORS_KEY, {}), state.get(LEFT_KEY, {})
        reached = state.get(REACHED_KEY, {})
        assert isinstance(steps, Mapping)
        assert isinstance(divisors, Mapping)
        assert isinstance(left, Mapping)
        assert isinstance(reached, Mapping)
        self.reset()
        for text, (step, position, size) in steps.items():
            key = tuple(int(part) for part in text.split(",") if part)
            window = self._windows.setdefault(key, AccumulationWindow())
            self.claimed.update(key)
            window.step, window.position, window.size = step, position, size
            window.denominator, window.reference = divisors.get(text, (None, None))
            window.left = left.get(text, 0.0)
            window.reached = set(reached.get(text, ()))
            window.unreduced = window.open
        self.window = self._windows[()]
        self.resumed = self.open
        self.due = not self.resumed

    def weights(self) -> dict[str, float]:
        """Returns the sum of this rank's weights in each open window that has some, by group of models."""
        windows = self.windows().items()
        return {text: float(window.weight) for text, window in windows if window.open and window.weight is not None}

    def load_weights(self, weights: Mapping[str, float]) -> None:
        """Restores ``weights``, after ``load_state_dict``."""
        windows = self.windows()
        for text, weight in weights.items():
            windows[text].weight = weight

    def undo(self) -> Callable[[], None]:
        """Returns a function that undoes every load from now on, for a load that another object refuses."""
        names = ("due", "share", "correction", "key", "window", "unstepped", "era", "resumed", "uncleared", "_pass")
        before = {name: getattr(self, name) for name in names}
        windows, claimed = dict(self._windows), set(self.claimed)

        def undo() -> None:
            for name, value in before.items():
                setattr(self, name, value)
            self._windows, self.claimed = windows, claimed

        return undo
