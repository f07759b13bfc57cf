"""How a program is spread: backend, processes, precision, accumulation; read from text such as ``ddp:2/bf16/acc=3``."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import final

PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "fp8")
#: Sizes of the other axes of a mesh, as ``ParallelismConfig`` names them (without ``_size``).
DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp")
_FLAGS = ("weighted", "short")
_EXAMPLE = "BACKEND[:PROCESSES][/PRECISION][/acc=N][/weighted][/short][/tp=N...], as in ddp:2/bf16/acc=3"


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """One way to spread a program.

    Attributes:
        backend: name of the backend.
        world_size: number of processes.
        precision: ``fp64`` and ``fp32`` are the dtype of the whole program, the others mixed precision of a float32
            one; empty where the caller of :func:`expand` decides.
        accumulate: micro-batches of one optimizer step.
        weighted: micro-batches of different sizes, with their weights given to ``backward``.
        short: the last accumulation window is one micro-batch short.
        degrees: sizes of mesh axes, by name.
    """

    backend: str
    world_size: int = 1
    precision: str = ""
    accumulate: int = 1
    weighted: bool = False
    short: bool = False
    degrees: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.accumulate < 1:
            raise ValueError(f"{self}: numbers of processes and of micro-batches are at least 1")
        if self.short and self.accumulate < 2:
            raise ValueError(f"{self}: a window of one micro-batch cannot be short; add acc=2 or more")
        if self.short and self.weighted:
            raise ValueError(
                f"{self}: short windows come from a loader, weighted micro-batches do not; use one of both"
            )

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Reads one layout; a word that means nothing is refused with the nearest that does."""
        head, *words = text.strip().split("/")
        backend, _, processes = head.partition(":")
        if not backend.isidentifier():
            raise ValueError(f"layout {text!r} names no backend; expected {_EXAMPLE}")
        values: dict[str, object] = {"world_size": _number(text, processes) if processes else 1}
        degrees: dict[str, int] = {}
        for word in words:
            key, is_set, value = word.partition("=")
            if word in PRECISIONS and "precision" not in values:
                values["precision"] = word
            elif word in _FLAGS:
                values[word] = True
            elif key == "acc" and is_set:
                values["accumulate"] = _number(text, value)
            elif key in DEGREES and is_set:
                degrees[key] = _number(text, value)
            else:
                raise ValueError(_refusal(text, word))
        return cls(backend, degrees=tuple(degrees.items()), **values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        words = [f"{self.backend}:{self.world_size}" if self.world_size > 1 else self.backend]
        words += [self.precision] if self.precision else []
        words += [f"acc={self.accumulate}"] if self.accumulate > 1 else []
        words += [flag for flag in _FLAGS if getattr(self, flag)]
        return "/".join([*words, *(f"{name}={size}" for name, size in self.degrees)])


def expand(layouts: str | Iterable[str | Layout], precisions: Iterable[str] = ("fp64", "fp32")) -> list[Layout]:
    """The layouts, each that has no precision once in every one of ``precisions``; a string holds them with commas."""
    words: Iterable[str | Layout] = layouts.split(",") if isinstance(layouts, str) else layouts
    parsed = [Layout.parse(one) if isinstance(one, str) else one for one in words if one]
    if not parsed:
        raise ValueError(f"no layouts were given; expected {_EXAMPLE}")
    wanted = tuple(precisions)
    if unknown := [name for name in wanted if name not in PRECISIONS]:
        raise ValueError(f"no precision {unknown[0]!r}; there are: {', '.join(PRECISIONS)}")
    every = [
        replace(layout, precision=precision)
        for layout in parsed
        for precision in ((layout.precision,) if layout.precision else wanted)
    ]
    return list(dict.fromkeys(every))


def _number(text: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"layout {text!r}: {value!r} is not a number of at least 1; expected {_EXAMPLE}")
    return int(value)


def _refusal(text: str, word: str) -> str:
    known = [*PRECISIONS, *_FLAGS, "acc=", *(f"{name}=" for name in DEGREES)]
    near = get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"layout {text!r}: {word!r} means nothing here; {hint}expected {_EXAMPLE}"
