"""Layouts: backend, processes, precision and accumulation, parsed from text such as ``ddp:2/bf16/acc=3``."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import prod
from typing import final

PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "fp8")
#: Sizes of the other mesh axes, as ``ParallelismConfig`` names them (without ``_size``).
DEGREES = ("dp_replicate", "dp_shard", "ep", "tp", "cp", "sp", "pp")
_FLAGS = ("weighted", "short")
_ONE_PROCESS = ("xla",)
_EXAMPLE = (
    "BACKEND[:PROCESSES][/PRECISION][/acc=N][/weighted][/short][/tp=N...][/OPTION=VALUE...], as in ddp:2/bf16/acc=3"
)
#: Hybrid sharding: shard degree after the ``x``, number of replicas before it: ``hsdp:2x2``.
_HYBRID = re.compile(r"hsdp:(\d+)x(\d+)")
#: DeepSpeed's ZeRO with its stage: ``ds3:2``.
_ZERO = re.compile(r"ds([0-3])((?::\d+)?)")
#: A model axis with its degree: ``tp:2``. Ranks are the product of all degrees of the layout.
_MODEL_AXIS = re.compile(r"(tp|cp|sp|pp|ep):([1-9]\d*)")
#: A further degree of such a layout in the same form: ``pp:2/tp:2`` is ``pp:2/tp=2``.
_DEGREE = re.compile(rf"^({'|'.join(DEGREES)}):([1-9]\d*)$")


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """One way to train a program over ranks.

    Attributes:
        backend: name of the backend.
        world_size: number of processes; of devices if one process drives all of them (XLA).
        precision: ``fp64`` and ``fp32`` are the dtype of the full program, the others mixed precision of a float32
            one; empty if the caller of ``expand`` decides.
        accumulate: micro-batches of one optimizer step.
        weighted: micro-batches of different sizes, with their weights passed to ``backward``.
        short: the last accumulation window is one micro-batch short.
        degrees: sizes of mesh axes, by name.
        options: of the backend, by name, as in ``cpu_offload=true``.
    """

    backend: str
    world_size: int = 1
    precision: str = ""
    accumulate: int = 1
    weighted: bool = False
    short: bool = False
    degrees: tuple[tuple[str, int], ...] = ()
    options: tuple[tuple[str, str], ...] = ()

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
        """Parses one layout; an unknown word is refused with the nearest known one."""
        head, *words = _spelt_out(text)
        backend, _, processes = head.partition(":")
        if not backend.isidentifier():
            raise ValueError(f"layout {text!r} names no backend; expected {_EXAMPLE}")
        values: dict[str, object] = {"world_size": _number(text, processes) if processes else 1}
        degrees: dict[str, int] = {}
        options: dict[str, str] = {}
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
            elif key.isidentifier() and value:
                options[key] = value
            else:
                raise ValueError(_refusal(text, word))
        return cls(backend, degrees=tuple(degrees.items()), options=tuple(options.items()), **values)  # type: ignore[arg-type]

    @property
    def processes(self) -> int:
        """Number of processes that train it."""
        return 1 if self.backend in _ONE_PROCESS else self.world_size

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables that give a process its devices; must be set before torch_xla is imported."""
        if self.backend in _ONE_PROCESS:
            return {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(self.world_size)}
        return {}

    def __str__(self) -> str:
        words = [f"{self.backend}:{self.world_size}" if self.world_size > 1 else self.backend]
        words += [self.precision] if self.precision else []
        words += [f"acc={self.accumulate}"] if self.accumulate > 1 else []
        words += [flag for flag in _FLAGS if getattr(self, flag)]
        return "/".join([*words, *(f"{name}={value}" for name, value in (*self.degrees, *self.options))])


def expand(layouts: str | Iterable[str | Layout], precisions: Iterable[str] = ("fp64", "fp32")) -> list[Layout]:
    """Expands layouts without a precision to one for each of ``precisions``; a string is split at commas."""
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


def _spelt_out(text: str) -> list[str]:
    """The words of a layout, whose short forms of the head are replaced by a backend and options."""
    head, *words = text.strip().split("/")
    if hybrid := _HYBRID.fullmatch(head):
        replicas, shards = map(int, hybrid.groups())
        return [f"fsdp:{replicas * shards}", f"dp_replicate={replicas}", f"dp_shard={shards}", *words]
    if zero := _ZERO.fullmatch(head):
        return [f"deepspeed{zero[2]}", f"zero_stage={zero[1]}", *words]
    if axis := _MODEL_AXIS.fullmatch(head):
        words = [f"{axis[1]}={axis[2]}", *(_DEGREE.sub(r"\1=\2", word) for word in words)]
        served_by = "pipeline" if any(word.startswith("pp=") for word in words) else "fsdp"
        return [f"{served_by}:{_product_of_degrees(words)}", *words]
    return [head, *words]


def _product_of_degrees(words: Iterable[str]) -> int:
    pairs = (word.partition("=") for word in words)
    return prod(int(value) for name, _, value in pairs if name in DEGREES and value.isdecimal())


def _number(text: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"layout {text!r}: {value!r} is not a number of at least 1; expected {_EXAMPLE}")
    return int(value)


def _refusal(text: str, word: str) -> str:
    known = [*PRECISIONS, *_FLAGS, "acc=", *(f"{name}=" for name in DEGREES)]
    near = get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"layout {text!r}: {word!r} means nothing here; {hint}expected {_EXAMPLE}"
