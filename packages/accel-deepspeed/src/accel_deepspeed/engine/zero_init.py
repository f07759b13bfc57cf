"""Context in which stage 3 partitions modules while they are built."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from accel_deepspeed.engine.engine import count_alike
from accel_deepspeed.library import local_rank
from accel_state.errors import PrepareError

if TYPE_CHECKING:
    from accel_state.session import Session


@contextmanager
def partitioned(session: "Session", config: Mapping[str, Any]) -> Iterator[None]:
    """Context in which modules are partitioned as soon as they are built.

    Collective: every rank of the group must call this.

    Raises:
        PrepareError: a parameter that was built in float64, which DeepSpeed would round.
    """
    from deepspeed.runtime.zero import Init

    count_alike(session)
    with local_rank(session):
        init = Init(config_dict_or_path=dict(config))
    with init, _Doubles() as doubles:
        hook = register_module_parameter_registration_hook(doubles.refuse)
        try:
            yield
        finally:
            hook.remove()


# Functions that convert the dtype of a tensor on purpose.
_NARROWING = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.to, torch.Tensor.type)


@final
class _Doubles(TorchFunctionMode):
    """Records tensors created in float64 and tensors computed from them, because DeepSpeed rounds new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            if func in _NARROWING and result.dtype != torch.float64:
                self._made.pop(id(result), None)
            elif result.dtype == torch.float64 or any(id(one) in self._made for one in args):
                self._made[id(result)] = result
        return result

    def refuse(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Raises PrepareError for a parameter that is one of the recorded tensors."""
        if parameter is None or not parameter.numel():
            return
        if parameter.data_ptr() in {one.data_ptr() for one in self._made.values()}:
            raise PrepareError(
                f"{type(module).__name__}.{name} is built in float64 within building(), and DeepSpeed trains in "
                "float32 at most; build it in float32, or train with strategy='fsdp', which keeps float64"
            )
