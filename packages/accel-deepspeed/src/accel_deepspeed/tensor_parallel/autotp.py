"""AutoTP: layers are split by rows or columns over a tensor-parallel group of neighbouring ranks."""

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accel_backends.ops.fqn import innermost, named_parameters
from accel_deepspeed.config.consistency import LAYERS, check_groups, largest_divisor
from accel_deepspeed.private import open_tensor_parallel_groups
from accel_deepspeed.tensor_parallel.shards import NOTE, is_cut
from accel_state.errors import BackendError, PrepareError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_state.session import Session

# AutoTP layers whose forward and partition map are known to agree with the layers that they replace.
_SOUND = frozenset(
    [
        "GateUpPack_LinearLayer",
        "HiddenParallelEmbedding",
        "LinearAllreduce",
        "LinearAllreduceWithReplicatedInput",
        "LinearLayer",
        "SubParamLinearAllreduce",
        "SubParamLinearLayer",
        "VocabParallelEmbedding",
        "VocabParallelLinear",
        "fused_LinearLayer",
    ]
)
_INSTEAD = (
    "nearest: say how in tensor_parallel.partition_config, or in _tp_plan of the model, or zero_stage=3 without it"
)


@final
class Layers:
    """Tensor-parallel groups of a run: ``size`` neighbouring ranks each.

    Raises:
        ConfigError: the world size is not divisible by ``size``.
    """

    def __init__(self, session: "Session", size: int) -> None:
        check_groups(session.world_size, size, LAYERS)
        self.session, self.size = session, size

    @property
    def first(self) -> int:
        """First rank of this rank's tensor-parallel group."""
        return self.session.rank // self.size * self.size

    def open(self) -> None:
        """Creates DeepSpeed's tensor-parallel groups, which all engines of a process share.

        Collective on the first call: every rank of the group must call this.

        Raises:
            BackendError: this process has engines with another tensor-parallel size.
        """
        from deepspeed.utils import groups

        found = self.size
        with suppress(AssertionError):  # that there are no groups; under ``python -O`` the group is None
            if groups.get_tensor_model_parallel_group() is not None:
                found = int(groups.get_tensor_model_parallel_world_size())
        if found != self.size:
            raise BackendError(
                f"{LAYERS}={self.size}, and engines of this process have tensor-parallel groups of {found} ranks, "
                "of which DeepSpeed knows one size; close the Accelerator that has them first"
            )
        if self.size > 1:
            open_tensor_parallel_groups(self.size)

    @property
    def group(self) -> "ProcessGroup | None":
        """Tensor-parallel group of this rank, after ``open``; None without tensor parallelism."""
        return self._group("get_tensor_model_parallel_group")

    @property
    def data_group(self) -> "ProcessGroup | None":
        """Data-parallel group: ranks with the same shards of layers and other samples.

        None: no tensor parallelism, all ranks of the session.
        """
        return self._group("get_data_parallel_group")

    def _group(self, name: str) -> "ProcessGroup | None":
        if self.size == 1:
            return None
        from deepspeed.utils import groups

        found: ProcessGroup = getattr(groups, name)()
        return found

    def check(self, model: nn.Module) -> None:
        """Refuses models that cannot be split, before any change.

        Raises:
            PrepareError: a model that was split before, one with fewer key heads than ranks, or with experts of
                DeepSpeed.
        """
        if getattr(model, "ds_autotp_parsed", False):
            raise PrepareError(
                f"this {type(model).__name__} was prepared with {LAYERS} before, and has this rank's parts of layers "
                "only; build it anew"
            )
        if self.size == 1:
            return
        if any(getattr(parameter, "allreduce", True) is False for parameter in model.parameters()):
            raise PrepareError(
                f"{type(model).__name__} has experts of deepspeed.moe beside {LAYERS}={self.size}, whose gradients "
                "would not be those of one process; nearest: leave one of them out"
            )
        heads = _heads(model)
        if heads is not None and heads < self.size:
            raise PrepareError(
                f"{type(model).__name__} has {heads} heads of keys, and {LAYERS}={self.size} would leave ranks without "
                f"any; nearest: {largest_divisor(self.session.world_size, heads)}"
            )

    def gather_in(self, model: nn.Module) -> None:
        """Broadcasts rank 0's parameters and buffers to all ranks, each of which keeps a shard later.

        Also synchronises the random generators of a tensor-parallel group, whose ranks have to draw the same dropout
        masks for replicated activations.

        Collective: every rank of the group must call this.
        """
        if self.size == 1:
            return
        from accel_state.collectives.tensors import broadcast
        from accel_state.rng import synchronize_rng_states

        whole = [one for one in model.parameters() if not hasattr(one, "ds_id")]
        broadcast([one.detach() for one in whole] + list(model.buffers()), group=self.session.group)
        kinds = ["torch"] if self.session.device.type == "cpu" else ["torch", self.session.device.type]
        synchronize_rng_states(kinds, group=self.group)


def kinds_of(model: nn.Module) -> dict[str, type[nn.Module]]:
    """Returns the class of each module by name, for a comparison with the layers that AutoTP creates."""
    return {name: type(module) for name, module in model.named_modules(remove_duplicate=False)}


def settle_cuts(engine: Any, before: Mapping[str, type[nn.Module]]) -> list[RemovableHandle]:
    """Validates the layers that AutoTP created, adds hooks that correct them, and marks parameters for norms.

    Args:
        engine: engine that has just been started.
        before: classes of the modules before.

    Raises:
        PrepareError: nothing is split, or a parameter is split so that it trains wrongly or cannot be assembled.
    """
    model = innermost(engine)
    _check_layers(model, before)
    parameters = named_parameters(model)
    for name, parameter in parameters.items():
        _check_note(type(model).__name__, name, parameter)
    if not any(map(is_cut, parameters.values())):
        raise PrepareError(f"{LAYERS}: AutoTP found no layer of this {type(model).__name__} to shard; {_INSTEAD}")
    # Ranks of a tensor-parallel group have the same samples.
    engine.set_train_batch_size(engine.train_batch_size() // engine.mp_world_size)
    handles: list[RemovableHandle] = []
    for parameter in parameters.values():
        # DeepSpeed's norms sum parameters with this mark over the group, and count others on one rank.
        parameter.tensor_model_parallel = is_cut(parameter)  # type: ignore[attr-defined]
    for module in _shared(model).values():
        handles.append(module.register_forward_pre_hook(_in_order))
    return handles


def _in_order(module: nn.Module, inputs: Any) -> Any:
    """Makes inputs contiguous: of a non-contiguous gradient AutoTP 0.19.8 reduces a copy, but uses the original."""
    return tuple(one.contiguous() if isinstance(one, torch.Tensor) else one for one in inputs)


def _shared(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers that AutoTP created, by name."""
    from deepspeed.module_inject.layers import TensorParallel_Layer

    return {name: one for name, one in model.named_modules() if isinstance(one, TensorParallel_Layer)}


def _check_layers(model: nn.Module, before: Mapping[str, type[nn.Module]]) -> None:
    kind = type(model).__name__
    shared = _shared(model)
    for name, module in shared.items():
        was = before[name]
        if type(module).__name__ not in _SOUND or not issubclass(was, nn.Linear | nn.Embedding):
            raise PrepareError(
                f"{kind}.{name} is a {was.__name__}, which AutoTP would share wrongly; {_INSTEAD}; the model is to be "
                "built anew"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and is_cut(module.weight) and name not in shared:
            raise PrepareError(
                f"{kind}.{name} is an embedding, of which AutoTP gives each rank some columns and puts nothing "
                "together; leave it out of tensor_parallel.partition_config; the model is to be built anew"
            )


def _check_note(kind: str, name: str, parameter: nn.Parameter) -> None:
    """Refuses a split parameter unless its partition map is exact and gives each element to one rank only."""
    if not is_cut(parameter):
        return
    note = getattr(parameter, NOTE)
    described = note["conversion"].get("affine_map")
    pieces = [piece for one in described["ranks"].values() for piece in one["pieces"]] if described else []
    if described is None or any(len(piece["locations"]) > 1 for piece in pieces):
        reason = note["conversion"].get("unsupported_reason") or "ranks share a block of it, and none its gradient"
        raise PrepareError(f"AutoTP cuts {kind}.{name} as nothing here can train or save: {reason}; {_INSTEAD}")
    for rank, one in described["ranks"].items():
        if 0 in one["shard_shape"]:
            raise PrepareError(
                f"{kind}.{name} of {tuple(note['original_shape'])} leaves nothing of it to rank {rank} of a "
                f"tensor-parallel group; nearest: a smaller {LAYERS}"
            )


def _heads(model: nn.Module) -> int | None:
    """Returns the number of key heads in a model's config, which AutoTP does not split."""
    from deepspeed.module_inject.tp_shard import AutoTPMeta

    found: int | None = AutoTPMeta.from_model_config(getattr(model, "config", None)).num_kv_heads
    return found
