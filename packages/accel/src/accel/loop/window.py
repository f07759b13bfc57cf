"""Accumulation window: the micro-batches whose gradients make one optimizer step."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class AccumulationWindow:
    """One accumulation window of one group of models: its position, and the weights passed to ``backward``.

    Attributes:
        step: micro-batches since a loader last ended.
        position: micro-batches of this window so far, of the expected ``size``.
        left: share of an earlier planned window whose pass ended inside it; its gradients are added to this window's.
        weight: sum of the weights given on this rank; None: none yet. A number, as the two divisors, if it was loaded.
        denominator: divisor of summed losses in this window so far.
        reference: the denominator with which the next window starts.
        stepped: an optimizer has stepped since the loss scale was last adapted.
        rounds: steps of other groups since this window's last micro-batch.
        cleared: ids of the optimizers whose gradients were cleared since the last weighted loss.
        seen: the models had gradients after the last weighted loss.
        reached: positions of models without a window of their own that losses of this window have reached.
        unreduced: no backward has reduced the gradients of its last micro-batches yet.
        several: gradients of its last backward were added to those of micro-batches before.
        done: ids of the optimizers that have stepped with the gradients of ``several``.
        dropped: name of an optimizer that has not, and whose gradients were cleared after the last backward.
    """

    __slots__ = (
        "cleared",
        "denominator",
        "done",
        "dropped",
        "left",
        "position",
        "reached",
        "reference",
        "rounds",
        "seen",
        "several",
        "size",
        "step",
        "stepped",
        "unreduced",
        "weight",
    )

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.position = 0
        self.size = 1
        self.left = 0.0
        self.weight: torch.Tensor | float | None = None
        self.denominator: torch.Tensor | float | None = None
        self.reference: torch.Tensor | float | None = None
        self.stepped = False
        self.rounds = 0
        self.cleared: set[int] = set()
        self.seen = False
        self.reached: set[int] = set()
        self.unreduced = False
        self.several = False
        self.done: set[int] = set()
        self.dropped: str | None = None

    @property
    def open(self) -> bool:
        """Whether it holds gradients of a step that is not due yet."""
        return 0 < self.position < self.size

    def restart(self, size: int) -> None:
        """Begins the next window, with the expected number of micro-batches."""
        self.position = 0
        self.size = size
        self.left = 0.0
        self.unreduced = False
        self.several = False
        self.dropped = None
        if self.done:
            self.done.clear()
        if self.reached:
            self.reached.clear()
        if self.weight is not None or self.denominator is not None or self.seen:
            self.close()

    def close(self) -> None:
        """Drops the weights given so far: their step was taken, their gradients were dropped, or a window begins."""
        self.weight = None
        self.denominator = None
        self.seen = False
        self.cleared.clear()
