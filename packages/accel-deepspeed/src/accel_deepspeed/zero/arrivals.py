"""Record of the gradients that backwards have computed since the last step, compared over ranks."""

from collections import deque
from typing import Any, ClassVar, final

import torch
from torch import nn

from accel_backends.ops.clip import listed
from accel_state.errors import CollectiveMismatchError

_KEPT = 8  # modules that a report names


@final
class Arrivals:
    """Record of the parameters that have received gradients in an engine of stage 2 or 3, and of their order.

    DeepSpeed reduces there in buckets, in the order in which each rank's backward computes gradients, and at stage 3
    all-gathers in the order of the modules. Ranks that compute different modules would sum gradients of one parameter
    with those of another, or compute with values of another, which ``compare`` refuses before a step.

    Args:
        model: the engine's model.
        device: device of the numbers that are compared.

    Attributes:
        received: ids of the parameters that have received a gradient since the last step.
    """

    observes_gradients: ClassVar[bool] = True

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        from deepspeed.utils.z3_leaf_module import z3_leaf_module, z3_leaf_parameter

        self.received: set[int] = set()
        self._device = device
        named = {name: one for name, one in model.named_parameters() if one.requires_grad}
        # DeepSpeed gathers and reduces all parameters of a leaf module together, those without a gradient too.
        self._always = {id(one) for one in named.values() if z3_leaf_parameter(one)}
        alone = {name: one for name, one in named.items() if id(one) not in self._always}
        self._names = {id(one): name for name, one in alone.items()}
        self._places = {key: place for place, key in enumerate(self._names)}
        self._handles = [one.register_post_accumulate_grad_hook(self._note) for one in alone.values()]
        self._hooks = {name: (one, _changing_hooks(one)) for name, one in alone.items()}
        inner = {one for leaf in model.modules() if z3_leaf_module(leaf) for one in leaf.modules()}
        self._modules = {
            one: (place, name)
            for place, (name, one) in enumerate(model.named_modules())
            if one not in inner and any(hasattr(parameter, "ds_id") for parameter in one.parameters(recurse=False))
        }
        self._newest: deque[str] = deque(maxlen=_KEPT)
        self._handles += [one.register_forward_pre_hook(self._enter) for one in self._modules]
        self.forget()

    def forget(self) -> None:
        """Starts the record of the next accumulation window."""
        self.received.clear()
        self.received |= self._always
        self._digest = self._entered = 0
        self._newest.clear()

    def separate(self) -> None:
        """Marks the start of a backward."""
        self._digest = hash((self._digest, -1))

    def _note(self, parameter: torch.Tensor) -> None:
        key = id(parameter)
        self.received.add(key)
        self._digest = hash((self._digest, self._places[key]))

    def _enter(self, module: nn.Module, *_: object) -> None:
        place, name = self._modules[module]
        self._entered = hash((self._entered, place))
        self._newest.append(name)

    @property
    def modules(self) -> str:
        """Text that is equal on ranks that have computed the same modules since the last step, at stage 3."""
        return f"{', '.join(self._newest)} #{self._entered:x}" if self._newest else ""

    @property
    def any(self) -> bool:
        """Whether a backward has run since the last step."""
        return self._digest != 0

    @property
    def late(self) -> str:
        """Name of a parameter with a hook that runs after DeepSpeed has taken the gradient; empty if there is none."""
        return next((name for name, (one, known) in self._hooks.items() if _changing_hooks(one) > known), "")

    def compare(self) -> None:
        """Compares the record with those of the other ranks.

        Collective: every rank of the group must call this.

        Raises:
            CollectiveMismatchError: ranks have computed different modules, or in another order; on all ranks.
        """
        import torch.distributed as dist

        if dist.get_world_size() == 1:
            return
        mine = torch.tensor([self._digest, self._entered], device=self._device)
        extremes = torch.cat([mine, -mine])
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        high, low = extremes.view(2, 2)
        if torch.equal(high, -low):
            return
        here = [name for key, name in self._names.items() if key in self.received]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, here)
        some = sorted({name for names in every for name in names if not all(name in other for other in every)})
        what = f"gradients of {listed(some, 3)} on some ranks only" if some else "modules in different orders"
        raise CollectiveMismatchError(
            f"ranks computed {what}; DeepSpeed reduces gradients of ZeRO stages 2 and 3 in the order in which backward "
            "computes them, and would add up those of different parameters. This step was not taken. Nearest: "
            "zero_stage=1, whose ranks may skip modules, or at stage 3 name the class of the module that chooses in "
            "transformer_moe_cls_names, which gathers it as a whole on every rank"
        )

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()


def _changing_hooks(parameter: nn.Parameter) -> int:
    """Returns the number of post-accumulate-grad hooks that may change the gradient; observers mark themselves."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    return sum(not getattr(getattr(hook, "__self__", None), "observes_gradients", False) for hook in hooks.values())
