"""Registry of the models that a backend has prepared, and of their parameters."""

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, final
from weakref import WeakSet, ref

import torch
from torch import nn

from accel_backends.ops.clip import listed
from accel_backends.ops.fqn import innermost, named_parameters
from accel_state.errors import BackendError


@final
class Ownership:
    """Weak references to prepared models and their parameters.

    Attributes:
        models: innermost modules, before and after preparing.
    """

    def __init__(self) -> None:
        self.models: WeakSet[nn.Module] = WeakSet()
        # Parameters by id; entries are removed with their parameters, because ids are reused.
        self._parameters: dict[int, ref[nn.Parameter]] = {}

    @property
    def parameters(self) -> Collection[int]:
        """Ids of the parameters."""
        return self._parameters.keys()

    def add(self, original: nn.Module, model: nn.Module) -> None:
        """Adds a model and the prepared model."""
        self.models.update((original, innermost(model)))
        for parameter in model.parameters():
            self._parameters[id(parameter)] = ref(parameter, partial(_forget, self._parameters, id(parameter)))

    def drop(self, model: nn.Module) -> None:
        """Removes a prepared model and its parameters."""
        inner = innermost(model)
        self.models.discard(inner)
        for parameter in inner.parameters():
            self._parameters.pop(id(parameter), None)

    def clear(self) -> None:
        """Removes all models and parameters."""
        self.models.clear()
        self._parameters.clear()

    def checked(
        self, parameters: "torch.Tensor | Iterable[torch.Tensor]", *, added: bool = False
    ) -> list[torch.Tensor]:
        """Returns the parameters as a list; ``added``: they may be those that a prepared model has gained since.

        Raises:
            BackendError: a parameter belongs to no prepared model, or something else than parameters was given.
        """
        given = listed(parameters)
        if not all(map(self._parameters.__contains__, map(id, given))):
            others = [one for one in given if not isinstance(one, torch.Tensor)]
            if others:
                raise BackendError(
                    f"clipping was given a {type(parameters).__name__} of {type(others[0]).__name__}; expected "
                    "parameters, such as those of model.parameters()"
                )
            gained = self.names() if added else {}
            foreign = [p for p in given if id(p) not in self._parameters and id(p) not in gained]
            if not foreign:
                return given
            raise BackendError(
                f"{len(foreign)} of {len(given)} parameters to clip belong to no prepared model, the first of "
                f"shape {tuple(foreign[0].shape)}; clip the parameters() of a model that prepare returned"
            )
        return given

    def check_added(self, parameters: "torch.Tensor | Iterable[Any]") -> None:
        """Refuses parameters added to an optimizer (named or not) whose gradients would not be averaged over ranks.

        Raises:
            BackendError: with the names of parameters that prepared models have gained since, or with shapes.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        bare = [one[1] if isinstance(one, tuple) else one for one in given]
        foreign = [p for p in bare if id(p) not in self._parameters]
        if foreign:
            named = {id(p): f"{n} of {type(m).__name__}" for m in self.models for n, p in named_parameters(m).items()}
            found = ", ".join(named.get(id(p), f"one of shape {tuple(p.shape)}") for p in foreign[:3])
            raise BackendError(
                f"add_param_group was given parameters that no model had when it was prepared: {found}; their "
                "gradients are not averaged over ranks. Add layers before prepare, or call free_memory() and prepare "
                "the model and a new optimizer again"
            )

    def names(self) -> dict[int, str]:
        """Returns the names of the parameters by id."""
        return {id(p): name for model in self.models for name, p in named_parameters(model).items()}


def _forget(owned: dict[int, Any], key: int, _: object) -> None:
    owned.pop(key, None)
