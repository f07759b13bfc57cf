"""Order of the blocks of a model: what was computed before, and what will be next by it."""

from collections.abc import Iterator, Sequence
from itertools import islice

# A block that is computed several times in a forward is followed by others each time; what was computed before it tells
# the times apart. The longest context that was seen before decides.
_CONTEXTS = (32, 8, 2, 1)
_KEPT = 8192
"""Blocks of history that are kept; a forward with more is predicted as far as this reaches back."""


class BlockOrder:
    """History of a model's blocks, from which the next ones follow.

    The prediction is what came after the last moment at which the model was where it is now, repeated from there to
    now: the same forward again, or the next step of a decoder. The first forward has the order in which the blocks
    were added as its history.
    """

    def __init__(self) -> None:
        self._history: list[int] = []
        self._seen: dict[tuple[int, ...], int] = {}
        """For each context: where in the history it last ended."""
        self._dropped = 0
        self._since: int | None = None
        """Where the model was last at where it is now: index into the history, counted from its beginning."""

    def expect(self, block: int) -> None:
        """Adds a block to the history as if it had been computed."""
        self._record(block)

    def visit(self, block: int) -> bool:
        """Adds the block that is computed now; returns whether it was predicted."""
        predicted = next(self.upcoming(), None)
        self._since = self._record(block)
        return predicted == block

    def upcoming(self) -> Iterator[int]:
        """The blocks after the present one in predicted order, up to one period; none if nothing is known."""
        if self._since is None:
            return
        yield from islice(self._history, self._since + 1 - self._dropped, None)

    def _record(self, block: int) -> int | None:
        """Adds a block; returns where its longest known context ended before."""
        self._history.append(block)
        end = self._dropped + len(self._history) - 1
        found: int | None = None
        for length in _CONTEXTS:
            if length > len(self._history):
                continue
            context = tuple(self._history[-length:])
            before = self._seen.get(context)
            if found is None and before is not None and before >= self._dropped:
                found = before
            self._seen[context] = end
        if len(self._history) > 2 * _KEPT:
            self._forget()
        return found

    def _forget(self) -> None:
        cut = len(self._history) - _KEPT
        del self._history[:cut]
        self._dropped += cut
        self._seen = {context: end for context, end in self._seen.items() if end >= self._dropped}


def next_uses(upcoming: Sequence[int]) -> dict[int, int]:
    """For each predicted block: the number of blocks before its next use."""
    uses: dict[int, int] = {}
    for distance, block in enumerate(upcoming):
        uses.setdefault(block, distance)
    return uses
