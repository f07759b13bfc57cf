"""Options of single axes of the mesh: tensor, context, sequence and expert parallelism."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

from accel_state.errors import ConfigError

PREFIX: Final = "PARALLELISM_CONFIG"


@final
@dataclass(frozen=True)
class TorchTensorParallelConfig:
    """Options of tensor parallelism.

    ``plan`` says how layers are sharded: ``"derive"``, from the model's structure; ``"model"``, by the model's own
    ``tp_plan`` (transformers); or a mapping from patterns of module names to styles. ``enable_async_tp``, Accelerate's
    option to overlap collectives with compiled matrix products, can only be False.

    Raises:
        ConfigError: ``enable_async_tp`` is true, or ``plan`` is neither of these.
    """

    enable_async_tp: bool = False
    plan: Mapping[str, Any] | str = "derive"

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            raise ConfigError(
                "enable_async_tp=True: collectives of tensor parallelism are not overlapped with matrix products; "
                "expected False, the default"
            )
        if not (isinstance(self.plan, Mapping) or self.plan in ("derive", "model")):
            raise ConfigError(f"plan={self.plan!r}; expected 'derive', 'model' or a mapping from patterns to styles")


@final
@dataclass(frozen=True)
class TorchTensorParallelPlugin:
    """Degree of tensor parallelism, as ``ParallelismConfig(tp_size=...)`` gives it too.

    ``torch_device_mesh``, Accelerate's mesh of the tensor-parallel ranks, can only be None: the mesh of a run follows
    from the degrees of all axes.

    Raises:
        ConfigError: ``tp_size`` is no whole number above 1, or a mesh is given.
    """

    tp_size: int = 1
    torch_device_mesh: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.tp_size, bool) or not isinstance(self.tp_size, int) or self.tp_size < 2:
            raise ConfigError(
                f"tp_size={self.tp_size!r} of {type(self).__name__}; expected a whole number above 1, or no plugin"
            )
        if self.torch_device_mesh is not None:
            raise ConfigError(
                f"torch_device_mesh={self.torch_device_mesh!r}: the mesh is made from the degrees of all axes; "
                f"nearest: {type(self).__name__}(tp_size={self.tp_size}) without a mesh"
            )


@final
@dataclass(frozen=True)
class TorchContextParallelConfig:
    """Options of context parallelism: exchange of keys and values by ``"allgather"`` or ``"alltoall"`` (a ring).

    ``cp_comm_strategy=None`` reads ``PARALLELISM_CONFIG_CP_COMM_STRATEGY`` (default "allgather"). ``load_balance``
    gives every rank as many scores of causal attention to compute. ``backend`` is the name of the implementation that
    these options are for.
    """

    backend: ClassVar[str] = "torch"

    cp_comm_strategy: str | None = None
    load_balance: bool = True

    def __post_init__(self) -> None:
        strategy = self.cp_comm_strategy or os.environ.get(f"{PREFIX}_CP_COMM_STRATEGY") or "allgather"
        if strategy not in {"allgather", "alltoall"}:
            raise ConfigError(f"Invalid cp_comm_strategy: {strategy}; expected 'allgather' or 'alltoall'")
        object.__setattr__(self, "cp_comm_strategy", strategy)


@final
@dataclass(frozen=True)
class ExpertParallelConfig:
    """Options of expert parallelism.

    ``capacity_factor`` bounds the choices that each expert computes of one rank's micro-batch, while the model trains:
    the factor times their mean number over the experts, rounded up. Further choices are dropped. None: none is dropped.
    It holds for divided experts, and with ``ep_size=1`` for those that each rank has all of.

    Raises:
        ConfigError: ``capacity_factor`` is no finite number above 0.
    """

    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        factor = self.capacity_factor
        number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if factor is not None and not (number and 0 < factor < math.inf):
            raise ConfigError(
                f"capacity_factor={factor!r}; expected a number above 0 such as 1.25, or None to drop no choice"
            )


@final
@dataclass(frozen=True)
class DeepSpeedSequenceParallelConfig:
    """Options of sequence parallelism (Ulysses), by DeepSpeed or another backend: tokens of a sequence, attention.

    Sequences of a length other than ``sp_seq_length`` are refused if ``sp_seq_length_is_variable`` is false.
    ``sp_attn_implementation`` is the attention between the exchanges of heads; None: the model's own.

    Options that are None are read from ``PARALLELISM_CONFIG_SP_SEQ_LENGTH``, ``..._SP_SEQ_LENGTH_IS_VARIABLE`` (default
    true) and ``..._SP_ATTN_IMPLEMENTATION``. ``backend`` is the name of the default implementation, which creates the
    groups of the axis itself.
    """

    backend: ClassVar[str] = "deepspeed"

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        from accel_state.environment import str_to_bool

        length = self.sp_seq_length
        if length is None and (text := os.environ.get(f"{PREFIX}_SP_SEQ_LENGTH")):
            length = whole_number(f"{PREFIX}_SP_SEQ_LENGTH", text)
        varies = self.sp_seq_length_is_variable
        if varies is None:
            varies = bool(str_to_bool(os.environ.get(f"{PREFIX}_SP_SEQ_LENGTH_IS_VARIABLE") or "true"))
        attention = self.sp_attn_implementation or os.environ.get(f"{PREFIX}_SP_ATTN_IMPLEMENTATION")
        if not varies and length is None:
            raise ConfigError("sp_seq_length is needed when sp_seq_length_is_variable is false")
        if attention is not None and not _is_flash_attention(attention):
            raise ConfigError(
                f"Invalid sp_attn_implementation: {attention}; expected flash_attention_2, flash_attention_3, sdpa or "
                "a kernel of the Hub such as 'kernels-community/flash-attn2'"
            )
        object.__setattr__(self, "sp_seq_length", length)
        object.__setattr__(self, "sp_seq_length_is_variable", varies)
        object.__setattr__(self, "sp_attn_implementation", attention)


def _is_flash_attention(name: str) -> bool:
    return name in {"flash_attention_2", "flash_attention_3", "sdpa"} or ("/" in name and "flash-attn" in name)


def whole_number(variable: str, text: str) -> int:
    """Returns ``text`` as an int; raises a ConfigError that names ``variable`` if it is not an integer."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{variable}={text!r} is not a whole number") from None
