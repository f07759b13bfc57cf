"""Plan of tensor parallelism: a style for each pattern of module names, with the reason for it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, final

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from accel_backends.parallel.styles import STYLES, Style
from accel_state.errors import PrepareError


@final
@dataclass(frozen=True, slots=True)
class StyleChoice:
    """Style of the modules whose names match ``pattern``; a ``*`` stands for one component of a name."""

    pattern: str
    style: Style | ParallelStyle
    reason: str

    def matches(self, name: str) -> bool:
        """Whether the pattern matches a module's name, component by component."""
        ours, theirs = self.pattern.split("."), name.split(".")
        return len(ours) == len(theirs) and all(fnmatchcase(b, a) for a, b in zip(ours, theirs, strict=True))


@final
@dataclass(frozen=True, slots=True)
class TensorParallelPlan:
    """Choices, in the order in which they are applied; modules that none matches are replicated."""

    choices: tuple[StyleChoice, ...]

    @classmethod
    def parse(cls, patterns: Mapping[str, Any], reason: str = "given") -> "TensorParallelPlan":
        """Plan from patterns to styles: names of styles, ``Style`` or torch's ``ParallelStyle``.

        Raises:
            PrepareError: a style that does not exist.
        """
        return cls(tuple(StyleChoice(pattern, _style(pattern, style), reason) for pattern, style in patterns.items()))

    def modules(self, model: nn.Module) -> list[tuple[str, nn.Module, StyleChoice]]:
        """Modules of the model with their choices, in the order of the plan.

        Raises:
            PrepareError: a pattern that matches no module.
        """
        named = dict(model.named_modules())
        found: list[tuple[str, nn.Module, StyleChoice]] = []
        for choice in self.choices:
            names = [name for name in named if choice.matches(name)]
            if not names:
                near = get_close_matches(choice.pattern, wildcards(named), n=3, cutoff=0.3)
                raise PrepareError(
                    f"the tensor-parallel plan names {choice.pattern!r}, and {type(model).__name__} has no such "
                    f"module; nearest: {', '.join(near) or 'none'}"
                )
            found.extend((name, named[name], choice) for name in names)
        return found

    def __str__(self) -> str:
        """Table with one line for each choice: pattern, style, reason."""
        rows = [(choice.pattern, _describe(choice.style), choice.reason) for choice in self.choices]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)


def model_plan(model: nn.Module) -> TensorParallelPlan:
    """Plan that a model brings along: ``tp_plan`` of transformers' models, which includes ``base_model_tp_plan``.

    Raises:
        PrepareError: the model has no plan, or its plan has a style that is not supported.
    """
    patterns = getattr(model, "tp_plan", None)
    if not patterns:
        raise PrepareError(
            f'{type(model).__name__} has no tp_plan of its own; nearest: plan="derive", or a mapping from patterns of '
            "module names to styles"
        )
    parameters = wildcards(name for name, _ in model.named_parameters())
    for pattern, style in patterns.items():
        if style not in STYLES or pattern in parameters:
            raise PrepareError(
                f"the tp_plan of {type(model).__name__} gives {pattern} the style {style!r}, which is not supported "
                f'{"for parameters" if style in STYLES else "here"}; nearest: plan="derive", which leaves such modules '
                "replicated, or a mapping of your own"
            )
    return TensorParallelPlan.parse(patterns, f"tp_plan of {type(model).__name__}")


def wildcards(names: Iterable[str]) -> list[str]:
    """The names with each number replaced by ``*``, each once, in order."""
    return list(dict.fromkeys(wildcard(name) for name in names))


def wildcard(name: str) -> str:
    """The name with each number replaced by ``*``."""
    return ".".join(_components(name))


def _components(name: str) -> Iterator[str]:
    for component in name.split("."):
        yield "*" if component.isdecimal() else component


def _style(pattern: str, style: Any) -> Style | ParallelStyle:
    if isinstance(style, Style | ParallelStyle):
        return style
    if isinstance(style, str) and style in STYLES:
        return STYLES[style]
    raise PrepareError(f"no style {style!r} (for {pattern!r}); styles: {', '.join(sorted(STYLES))}")


def _describe(style: Style | ParallelStyle) -> str:
    names = [name for name, known in STYLES.items() if known == style]
    return names[0] if names else repr(style) if isinstance(style, Style) else type(style).__name__
