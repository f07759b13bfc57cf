"""Partitions: the slice of each parameter that a rank's optimizer updates, and the optimizer's tensor that holds it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import nn

from accel_deepspeed.private import share_memory
from accel_state.errors import BackendError


@final
@dataclass(frozen=True, slots=True)
class Partition:
    """This rank's slice of one parameter.

    Attributes:
        start: first element of the slice in the flattened parameter.
        size: number of elements of the slice; 0: none.
        flat: the optimizer's tensor that contains the slice, which is the key of the optimizer's state.
        offset: first element of the slice in ``flat``.
    """

    start: int
    size: int
    flat: torch.Tensor | None
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the slice of a tensor shaped like ``flat``: its weights, or one of its states."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.size)


class Partitions(ABC):
    """Partitions of an engine's parameters.

    Attributes:
        spread: whether ranks hold different slices, not replicas.
        behind: number of steps, counted by the flat tensor, that a parameter has missed.
    """

    spread: ClassVar[bool] = True

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.state: Any = engine.basic_optimizer.state
        self.behind: dict[nn.Parameter, int] = {}

    @contextmanager
    def held(self, parameter: nn.Parameter, *, changed: bool = False) -> Iterator[Partition]:
        """Context with the partition in memory; its tensors are written back if ``changed``."""
        yield self.part(parameter)

    @contextmanager
    def opened(self, flat: torch.Tensor) -> Iterator[None]:
        """Context with one of the optimizer's tensors and its states in memory; written back on exit."""
        yield

    @abstractmethod
    def part(self, parameter: nn.Parameter) -> Partition:
        """Returns this rank's partition of the parameter."""

    def flats(self) -> list[torch.Tensor]:
        """Returns the optimizer's tensors. Default: those of its param groups."""
        return [flat for group in self.engine.basic_optimizer.param_groups for flat in group["params"]]

    def gradients(self, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yields parameters and this rank's slices of the gradients of the optimizer's tensors; none that are on disk.

        Only with offloading have the optimizer's tensors gradients before the step.
        """
        for parameter in filter(self.holds, parameters):
            part = self.part(parameter)
            if part.size and part.flat is not None and part.flat.grad is not None:
                yield parameter, part.of(part.flat.grad)

    def group_numbers(self) -> dict[int, int]:
        """Returns the param-group index of each of the optimizer's tensors, by id."""
        groups = enumerate(self.engine.basic_optimizer.param_groups)
        return {id(flat): index for index, group in groups for flat in group["params"]}

    @abstractmethod
    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer updates the parameter (on any rank)."""

    @abstractmethod
    def refresh(self) -> None:
        """Copies the optimizer's weights to the model's. Collective: every rank of the group must call this."""

    def states_changed(self) -> None:
        """Called when the optimizer's state has other tensors than before. Default: does nothing."""

    def group(self, parameter: nn.Parameter) -> Any:
        """Returns the process group over which the parameter is partitioned."""
        return getattr(self.optimizer, "dp_process_group", None)


@final
class OwnParts(Partitions):
    """Stage 0 in fp32: the optimizer updates this rank's parameters themselves."""

    spread: ClassVar[bool] = False

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._known: frozenset[int] = frozenset()

    def part(self, parameter: nn.Parameter) -> Partition:
        return Partition(0, parameter.numel(), parameter, 0)

    def holds(self, parameter: nn.Parameter) -> bool:
        if len(self._known) != sum(len(group["params"]) for group in self.optimizer.param_groups):
            self._known = frozenset(self.group_numbers())
        return id(parameter) in self._known

    def refresh(self) -> None:
        """Does nothing: the optimizer's weights are the model's."""


@final
class CopiedParts(Partitions):
    """Stage 0 in 16 bits: every rank has all master weights, one by one or flattened by group."""

    spread: ClassVar[bool] = False

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._found: dict[int, Partition] = {}
        flat_groups = getattr(self.optimizer, "fp32_groups_flat", None)
        for index, group in enumerate(self.optimizer.fp16_groups):
            offset = 0
            for position, parameter in enumerate(group):
                size = parameter.numel()
                flat = flat_groups[index] if flat_groups is not None else self.optimizer.fp32_groups[index][position]
                self._found[id(parameter)] = Partition(0, size, flat, offset if flat_groups is not None else 0)
                offset += size

    def part(self, parameter: nn.Parameter) -> Partition:
        return self._found[id(parameter)]

    def holds(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._found

    def refresh(self) -> None:
        for group in self.optimizer.fp16_groups:
            for parameter in group:
                part = self.part(parameter)
                assert part.flat is not None
                parameter.data.view(-1).copy_(part.of(part.flat))


@final
class PartitionedParts(Partitions):
    """Stages 1 and 2: each param group is flattened and split into equal slices over ranks, across parameters.

    If the model computes in fp32 on the optimizer's device, the optimizer updates the model's own memory instead of a
    copy, so that the training loop may write to parameters in any way.

    Attributes:
        ranks: this rank's number in the process group of each group of parameters.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        optimizer = self.optimizer
        self._groups = {id(one): index for index, group in enumerate(optimizer.bit16_groups) for one in group}
        self.ranks = [torch.distributed.get_rank(group) for group in optimizer.real_dp_process_group]
        if not optimizer.cpu_offload:
            pieces = zip(optimizer.parallel_partitioned_bit16_groups, self.ranks, strict=True)
            share_memory(optimizer, [one[rank] for one, rank in pieces])

    def part(self, parameter: nn.Parameter) -> Partition:
        """Returns the part of the parameter that lies in this rank's slice of its group."""
        optimizer, index = self.optimizer, self.group_of(parameter)
        rank, key = self.ranks[index], optimizer.get_param_id(parameter)
        start = optimizer.grad_start_offset[index][rank].get(key)
        if start is None:
            return Partition(0, 0, None, 0)
        offset = int(optimizer.grad_partition_insertion_offset[index][rank][key])
        size = min(parameter.numel() - int(start), int(optimizer.partition_size[index]) - offset)
        return Partition(int(start), size, optimizer.single_partition_of_fp32_groups[index], offset)

    def group_of(self, parameter: nn.Parameter) -> int:
        """Returns the number of the parameter's group."""
        return self._groups[id(parameter)]

    def holds(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._groups

    def group(self, parameter: nn.Parameter) -> Any:
        """Returns the process group over which the parameter's group is partitioned; experts have their own."""
        return self.optimizer.real_dp_process_group[self.group_of(parameter)]

    def refresh(self) -> None:
        """All-gathers the updated slices of all ranks into the model's parameters."""
        self.optimizer.update_lp_params()

    def states_changed(self) -> None:
        """Makes DeepSpeed's functions for one parameter's state (``safe_get_full_optimizer_state``) see the tensors."""
        from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state

        for group, flat in zip(self.optimizer.bit16_groups, self.flats(), strict=True):
            lazy_init_hp_params_optimizer_state(group, flat, self.state)


@final
class ShardedParts(Partitions):
    """Stage 3: each parameter is split into equal slices over ranks, the last one padded.

    Optimizer tensors that are offloaded to disk are read from it, and written back if they were changed.
    """

    @contextmanager
    def held(self, parameter: nn.Parameter, *, changed: bool = False) -> Iterator[Partition]:
        index = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)][0]
        with self._in_memory(index, changed=changed):
            yield self.part(parameter)

    @contextmanager
    def opened(self, flat: torch.Tensor) -> Iterator[None]:
        index = next(number for number, one in enumerate(self.flats()) if one is flat)
        with self._in_memory(index, changed=True):
            yield

    @contextmanager
    def _in_memory(self, index: int, *, changed: bool) -> Iterator[None]:
        optimizer, flat = self.optimizer, self.optimizer.fp32_partitioned_groups_flat[index]
        size = optimizer.fp16_partitioned_groups_flat_numel[index]
        if not (optimizer.swap_optimizer and optimizer.optimizer_swapper.is_swappable_tensor(None, numel=size)):
            yield
            return
        swapper = optimizer.optimizer_swapper
        swapper.swap_in_optimizer_state(parameter=flat, async_parameter=None)
        try:
            yield
        finally:
            if changed:
                more = optimizer.next_swappable_fp32_partitioned_groups[index] is not None
                swapper.swap_out_optimizer_state(parameter=flat, async_swap=more)
            else:
                swapper.release_swap_buffers(parameter=flat)
            flat.grad = None

    def part(self, parameter: nn.Parameter) -> Partition:
        optimizer = self.optimizer
        index, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = size * torch.distributed.get_rank(self.group(parameter))
        total: int = parameter.ds_numel  # type: ignore[attr-defined]
        flat = optimizer.fp32_partitioned_groups_flat[index]
        return Partition(min(start, total), max(0, min(size, total - start)), flat, offset)

    def flats(self) -> list[torch.Tensor]:
        """Returns this rank's flat tensors, one for each sub-group that DeepSpeed updates at once."""
        return list(self.optimizer.fp32_partitioned_groups_flat)

    def group_numbers(self) -> dict[int, int]:
        """Returns the param-group index of each flat tensor; one group may have several sub-groups."""
        return {id(flat): self.optimizer.sub_group_to_group_id[index] for index, flat in enumerate(self.flats())}

    def holds(self, parameter: nn.Parameter) -> bool:
        return hasattr(parameter, "ds_id") and self.optimizer.get_param_id(parameter) in self.optimizer.grad_position

    def group(self, parameter: nn.Parameter) -> Any:
        return getattr(parameter, "ds_process_group", self.optimizer.dp_process_group)

    def refresh(self) -> None:
        """Copies the optimizer's slices to the tensors that forward all-gathers."""
        optimizer = self.optimizer
        for index, _ in enumerate(optimizer.fp16_groups):
            with self._in_memory(index, changed=False):
                self._copy_to_model(index)
        persistent = optimizer.persistent_parameters
        if persistent:
            persistent[0].partition(persistent, has_been_updated=False)
            persistent[0].all_gather(persistent)

    def _copy_to_model(self, index: int) -> None:
        """Copies a sub-group's weights to the partitions of its parameters, in memory or on disk."""
        flat = self.optimizer.fp32_partitioned_groups_flat[index].detach()
        there = self.optimizer.fp16_partitioned_groups_flat[index]
        if there is not None:
            there.data.copy_(flat)
            return
        group = self.optimizer.fp16_groups[index]
        sizes = [one.ds_tensor.ds_numel for one in group]
        slices = flat.narrow(0, 0, sum(sizes)).split(sizes)
        away = [(one, values) for one, values in zip(group, slices, strict=True) if not _took(one.ds_tensor, values)]
        if away:
            parameters, values = map(list, zip(*away, strict=True))
            group[0].nvme_swapper.swap_out_partitioned_params(dst_fp16_params=parameters, src_fp32_params=values)


def _took(partition: Any, values: torch.Tensor) -> bool:
    """Copies values to a stage 3 parameter's partition; False if that is on disk."""
    in_memory: bool = partition.status.name == "AVAILABLE"
    if in_memory:
        partition.data.copy_(values)
    return in_memory


def parts_of(engine: Any) -> Partitions | None:
    """Returns the partitions of an engine; None if its optimizer updates full parameters themselves (stage 0, fp32).

    Raises:
        BackendError: an unsupported optimizer of DeepSpeed.
    """
    optimizer = engine.optimizer
    if optimizer is engine.basic_optimizer:
        return OwnParts(engine) if engine.autotp_size() > 1 else None
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return ShardedParts(engine)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return PartitionedParts(engine)
    if hasattr(optimizer, "fp16_groups"):
        return CopiedParts(engine)
    raise BackendError(
        f"DeepSpeed's {type(optimizer).__name__} is not supported; it is used at stage 1 in bf16 with "
        "data_types.grad_accum_dtype fp32: leave that out, or use stage 2"
    )
