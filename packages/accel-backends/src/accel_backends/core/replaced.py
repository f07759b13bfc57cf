"""Parameters that ``prepare`` has replaced: their hooks move to the successors, and optimizers that hold them fail."""

from collections.abc import Mapping
from typing import NoReturn, final

from torch import nn

from accel_backends.private import move_accumulation_hooks
from accel_state.errors import BackendError


@final
class Replaced(nn.Parameter):
    """A replaced parameter, whose ``grad`` raises BackendError, because every optimizer reads ``grad`` in its step."""

    what: str

    def _refuse(self, value: object = None) -> NoReturn:
        raise BackendError(
            f"{self.what} was replaced by its shards in prepare, and this optimizer holds the parameter of before, so "
            "its steps would change nothing; call prepare(model, optimizer) and step the optimizer that it returns, "
            "or make the optimizer of the prepared model's parameters()"
        )

    grad = property(_refuse, _refuse, _refuse)


def replace_parameters(before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter], kind: str) -> None:
    """Marks the parameters of ``before`` that are not in ``after`` as replaced; ``kind``: class name of the model.

    Post-accumulate-grad hooks move to the successors. Instances of subclasses of ``nn.Parameter`` stay unmarked.
    """
    for name, parameter in before.items():
        successor = after.get(name)
        if successor is parameter:
            continue
        if successor is not None:
            move_accumulation_hooks(parameter, successor)
        if type(parameter) is nn.Parameter:
            parameter.grad = None
            parameter.__class__ = Replaced
            parameter.__dict__["what"] = f"{name} of {kind}"
