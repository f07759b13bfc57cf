"""Candidate: a strategy that the planner compares with others."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

from accel_state.errors import ConfigError, did_you_mean

CHECKPOINTING, OFFLOAD = "+ckpt", "+offload"


@final
@dataclass(frozen=True, slots=True)
class Candidate:
    """One strategy.

    Attributes:
        name: its name in tables.
        backend: entry-point name of its backend, and of the cost model that made it.
        options: fields of the backend's configuration.
        checkpointing: activation checkpointing of the repeated blocks.
        wraps_blocks: the repeated blocks have to be made to recompute before the backend prepares the model, because
            the backend has no option for it.
        offload: parameters and optimizer states are kept in host memory, and the optimizer steps there.
        optimizers: names of the classes of torch.optim that it supports; None: all but ``unfit``.
        unfit: names of the classes of torch.optim that it does not support.
    """

    name: str
    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    wraps_blocks: bool = False
    offload: bool = False
    optimizers: frozenset[str] | None = None
    unfit: frozenset[str] = frozenset()

    def takes(self, optimizer: str) -> bool:
        """Returns whether it supports optimizers of the class of that name, ignoring case."""
        name = optimizer.lower()
        allowed = self.optimizers is None or name in map(str.lower, self.optimizers)
        return allowed and name not in map(str.lower, self.unfit)

    def checkpointed(self, options: Mapping[str, Any] | None = None) -> "Candidate":
        """Returns this candidate with activation checkpointing.

        ``options``: the backend's options that apply it; None: the backend has none.
        """
        return replace(
            self,
            name=self.name + CHECKPOINTING,
            options={**self.options, **(options or {})},
            checkpointing=True,
            wraps_blocks=options is None,
        )

    def offloaded(self, options: Mapping[str, Any], optimizers: Collection[str] | None = None) -> "Candidate":
        """Returns this candidate with offloading.

        ``options``: the backend's options that offload. ``optimizers``: see the attribute.
        """
        return replace(
            self,
            name=self.name + OFFLOAD,
            options={**self.options, **options},
            offload=True,
            optimizers=None if optimizers is None else frozenset(optimizers),
        )


def named(candidates: Collection[Candidate], names: Collection[str]) -> list[Candidate]:
    """Returns the candidates of those names, in the order given; a name without ``+`` selects all its variants.

    Raises:
        ConfigError: no candidate has that name.
    """
    chosen: list[Candidate] = []
    for name in names:
        text = name.strip().lower()
        mine = [c for c in candidates if c.name.lower() == text or c.name.lower().partition("+")[0] == text]
        if not mine:
            known = [candidate.name for candidate in candidates]
            hint = did_you_mean(text, known)
            raise ConfigError(f"no candidate {name!r}; there are {', '.join(known)}{hint}")
        chosen += [candidate for candidate in mine if candidate not in chosen]
    return chosen
