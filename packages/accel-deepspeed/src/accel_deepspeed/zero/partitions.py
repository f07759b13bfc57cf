"""Partitions: the slice of each parameter that a rank's optimizer updates, and the optimizer's tensor that holds it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import nn

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

    @abstractmethod
    def flats(self) -> list[torch.Tensor]:
        """Returns the optimizer's tensors."""

    def group_numbers(self) -> dict[int, int]:
        """Returns the param-group index of each of the optimizer's tensors, by id.

        Default: one tensor for each group.
        """
        return {id(flat): index for index, flat in enumerate(self.flats())}

    @abstractmethod
    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer updates the parameter (on any rank)."""

    @abstractmethod
    def refresh(self) -> None:
        """Copies the optimizer's weights to the model's. Collective: every rank of the group must call this."""

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
        """Returns the full parameter as the only slice."""
        return Partition(0, parameter.numel(), parameter, 0)

    def flats(self) -> list[torch.Tensor]:
        """Returns the parameters."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def group_numbers(self) -> dict[int, int]:
        """Returns the param-group index of each parameter."""
        groups = enumerate(self.optimizer.param_groups)
        return {id(parameter): index for index, group in groups for parameter in group["params"]}

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is in a param group."""
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
        """Returns the master weight of the full parameter."""
        return self._found[id(parameter)]

    def flats(self) -> list[torch.Tensor]:
        """Returns the master weights."""
        return list({id(part.flat): part.flat for part in self._found.values() if part.flat is not None}.values())

    def group_numbers(self) -> dict[int, int]:
        """Returns the param-group index of each master weight, or of each group's flat tensor."""
        copies = getattr(self.optimizer, "fp32_groups", None)
        if copies is None:
            return super().group_numbers()
        return {id(flat): index for index, group in enumerate(copies) for flat in group}

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter has a master weight."""
        return id(parameter) in self._found

    def refresh(self) -> None:
        """Copies master weights to the model's parameters."""
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
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        optimizer = self.optimizer
        # Not by DeepSpeed's attribute, which stays on parameters of an engine that was destroyed.
        self._ids = {id(parameter) for group in optimizer.bit16_groups for parameter in group}
        if optimizer.cpu_offload:
            return
        groups = zip(optimizer.parallel_partitioned_bit16_groups, optimizer.real_dp_process_group, strict=True)
        for flat, (pieces, group) in zip(optimizer.single_partition_of_fp32_groups, groups, strict=True):
            own = pieces[torch.distributed.get_rank(group)]
            if (own.dtype, own.device) == (flat.dtype, flat.device):
                flat.data = own.data
        optimizer._link_all_hp_params()

    def part(self, parameter: nn.Parameter) -> Partition:
        """Returns the part of the parameter that lies in this rank's slice of its group."""
        mapping: Any = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return Partition(0, 0, None, 0)
        here, there = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
        flat = self.optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        return Partition(here.start, here.numel, flat, there.start)

    def flats(self) -> list[torch.Tensor]:
        """Returns this rank's slice of each group."""
        return list(self.optimizer.single_partition_of_fp32_groups)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is in a param group."""
        return id(parameter) in self._ids

    def group(self, parameter: nn.Parameter) -> Any:
        """Returns the process group over which the parameter's group is partitioned; experts have their own."""
        return getattr(parameter, "_dp_group", self.optimizer.dp_process_group)

    def refresh(self) -> None:
        """All-gathers the updated slices of all ranks into the model's parameters."""
        self.optimizer.update_lp_params()


@final
class ShardedParts(Partitions):
    """Stage 3: each parameter is split into equal slices over ranks, the last one padded."""

    @contextmanager
    def held(self, parameter: nn.Parameter, *, changed: bool = False) -> Iterator[Partition]:
        """Context with the partition in memory, read from disk and written back if offloaded there."""
        index = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)][0]
        with self._in_memory(index, changed=changed):
            yield self.part(parameter)

    @contextmanager
    def opened(self, flat: torch.Tensor) -> Iterator[None]:
        """Context with the tensor in memory, read from disk and written back if offloaded there."""
        index = next(number for number, one in enumerate(self.flats()) if one is flat)
        with self._in_memory(index, changed=True):
            yield

    @contextmanager
    def _in_memory(self, index: int, *, changed: bool) -> Iterator[None]:
        optimizer = self.optimizer
        swapped = optimizer._swappable_optimizer_subgroup(index)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(index)
        try:
            yield
        finally:
            if swapped and changed:
                optimizer._optimizer_states_and_gradient_swap_out(index)
            elif swapped:
                optimizer._release_swap_buffers(index)

    def part(self, parameter: nn.Parameter) -> Partition:
        """Returns this rank's slice, without padding."""
        optimizer = self.optimizer
        index, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = size * optimizer._get_param_partition_rank(parameter)
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
        """Whether DeepSpeed updates the parameter."""
        return hasattr(parameter, "ds_id") and self.optimizer.get_param_id(parameter) in self.optimizer.grad_position

    def group(self, parameter: nn.Parameter) -> Any:
        """Returns the process group over which the parameter is partitioned."""
        return self.optimizer._get_param_partition_group(parameter)

    def refresh(self) -> None:
        """Copies the optimizer's slices to the tensors that forward all-gathers."""
        optimizer = self.optimizer
        for index, _ in enumerate(optimizer.fp16_groups):
            swapped = optimizer._swappable_optimizer_subgroup(index)
            if swapped:
                optimizer._optimizer_states_and_gradient_swap_in(index)
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
            if swapped:
                optimizer._release_swap_buffers(index)
        persistent = optimizer.persistent_parameters
        if persistent:
            persistent[0].partition(persistent, has_been_updated=False)
            persistent[0].all_gather(persistent)


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
    raise BackendError(f"states of DeepSpeed's {type(optimizer).__name__} are not known here")
