"""Parameters that ``prepare`` has replaced: their hooks move to the successors, and optimizers that hold them fail."""

from collections.abc import Callable, Mapping
from typing import NoReturn, final
from weakref import ref

from torch import nn
from torch.optim import Optimizer

from accel_backends.core.rebind import ConvertState, keep_parameters, rebind
from accel_backends.private import move_accumulation_hooks
from accel_state.errors import BackendError


@final
class Replaced(nn.Parameter):
    """A replaced parameter, whose ``grad`` raises BackendError, because every optimizer reads ``grad`` in its step.

    Attributes:
        what: its name and its model.
        successor: returns the parameter in its place, or None once that is gone; None if this rank has none.
    """

    what: str
    successor: Callable[[], nn.Parameter | None] | None

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
            parameter.__dict__["successor"] = None if successor is None else ref(successor)


def follow_successors(optimizer: Optimizer, *, convert: ConvertState | None = None) -> None:
    """Puts successors into the place of an optimizer's replaced parameters, see ``rebind``.

    Replaced parameters without a successor on this rank are taken out. Those whose successor is gone stay.
    """
    held = [one for group in optimizer.param_groups for one in group["params"]]
    replaced = [one for one in held if isinstance(one, Replaced)]
    away = {id(one) for one in replaced if one.successor is None}
    if away:
        keep_parameters(optimizer, {id(one) for one in held} - away)
    before: dict[str, nn.Parameter] = {}
    after: dict[str, nn.Parameter] = {}
    for one in replaced:
        successor = None if one.successor is None else one.successor()
        if successor is not None:
            before[str(id(one))], after[str(id(one))] = one, successor
    rebind(optimizer, before, after, convert=convert)
