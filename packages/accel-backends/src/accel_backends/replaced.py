"""Parameters that a prepared model no longer has: their hooks go over, and optimizers that hold them are refused."""

from collections.abc import Mapping
from typing import Any, NoReturn, final

from torch import nn

from accel_state.errors import BackendError

_ACCUMULATED = "_post_accumulate_grad_hooks"


@final
class Replaced(nn.Parameter):
    """A parameter of before ``prepare``: what asks for its gradient, as every optimizer does, is refused."""

    what: str

    def _refuse(self, value: object = None) -> NoReturn:
        raise BackendError(
            f"{self.what} was replaced by its shards in prepare, and this optimizer holds the parameter of before, so "
            "its steps would change nothing; call prepare(model, optimizer) and step the optimizer that it returns, "
            "or make the optimizer of the prepared model's parameters()"
        )

    grad = property(_refuse, _refuse, _refuse)


def replace_parameters(before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter], kind: str) -> None:
    """Marks the parameters of ``before`` that ``after`` has no more, of a model of class ``kind``.

    Hooks of after accumulation are their successors' from now on. Parameters of a class of their own stay unmarked.
    """
    for name, parameter in before.items():
        successor = after.get(name)
        if successor is parameter:
            continue
        hooks: Any = getattr(parameter, _ACCUMULATED, None)
        if hooks and successor is not None:
            setattr(successor, _ACCUMULATED, hooks)  # the same mapping: handles to remove them stay good
        if type(parameter) is nn.Parameter:
            parameter.grad = None
            parameter.__class__ = Replaced
            parameter.__dict__["what"] = f"{name} of {kind}"
