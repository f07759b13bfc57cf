"""The part of each parameter that a rank's optimizer updates, and the tensors that it keeps for it."""

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
    """What one rank keeps of one parameter.

    Attributes:
        start: first element of the flattened parameter that is here.
        size: number of elements that are here; 0: none.
        flat: the optimizer's tensor that they lie in, which is the key of the optimizer's state.
        offset: where they start in it.
    """

    start: int
    size: int
    flat: torch.Tensor | None
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements in a tensor of the shape of ``flat``: its weights, or a state of them."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.size)


class Partitions(ABC):
    """Finds the parts of an engine's parameters.

    Attributes:
        spread: whether ranks hold different parts, and not all the same.
        behind: how many steps parameters have missed of those that their tensors count.
    """

    spread: ClassVar[bool] = True

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.state: Any = engine.basic_optimizer.state
        self.behind: dict[nn.Parameter, int] = {}

    @contextmanager
    def held(self, parameter: nn.Parameter, *, changed: bool = False) -> Iterator[Partition]:
        """The part, its tensors in memory meanwhile; they are written back if ``changed``."""
        yield self.part(parameter)

    @contextmanager
    def opened(self, flat: torch.Tensor) -> Iterator[None]:
        """Within it, one of the optimizer's tensors is in memory with its states, and is written back after."""
        yield

    @abstractmethod
    def part(self, parameter: nn.Parameter) -> Partition:
        """Where the parameter's elements are."""

    @abstractmethod
    def flats(self) -> list[torch.Tensor]:
        """The optimizer's tensors."""

    def group_numbers(self) -> dict[int, int]:
        """The number of the group of each of the optimizer's tensors, by its id. Default: one tensor for each group."""
        return {id(flat): index for index, flat in enumerate(self.flats())}

    @abstractmethod
    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer updates the parameter at all (on whatever rank)."""

    @abstractmethod
    def refresh(self) -> None:
        """Makes the weights that the model computes with those of the optimizer; collective."""

    def group(self, parameter: nn.Parameter) -> Any:
        """The ranks that the parts are spread over."""
        return getattr(self.optimizer, "dp_process_group", None)


@final
class OwnParts(Partitions):
    """Stage 0 in fp32: the optimizer updates the parameters themselves, as the rank has them."""

    spread: ClassVar[bool] = False

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._known: frozenset[int] = frozenset()

    def part(self, parameter: nn.Parameter) -> Partition:
        """All of it."""
        return Partition(0, parameter.numel(), parameter, 0)

    def flats(self) -> list[torch.Tensor]:
        """The parameters."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def group_numbers(self) -> dict[int, int]:
        """Of each parameter."""
        groups = enumerate(self.optimizer.param_groups)
        return {id(parameter): index for index, group in groups for parameter in group["params"]}

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether it is in a group."""
        if len(self._known) != sum(len(group["params"]) for group in self.optimizer.param_groups):
            self._known = frozenset(self.group_numbers())
        return id(parameter) in self._known

    def refresh(self) -> None:
        """They are the weights that the model computes with."""


@final
class CopiedParts(Partitions):
    """Stage 0 in 16 bits: every rank has fp32 copies of all parameters, one by one or flattened by group."""

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
        """All of it."""
        return self._found[id(parameter)]

    def flats(self) -> list[torch.Tensor]:
        """The copies."""
        return list({id(part.flat): part.flat for part in self._found.values() if part.flat is not None}.values())

    def group_numbers(self) -> dict[int, int]:
        """Of each copy, or of each group's flattened ones."""
        copies = getattr(self.optimizer, "fp32_groups", None)
        if copies is None:
            return super().group_numbers()
        return {id(flat): index for index, group in enumerate(copies) for flat in group}

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether there is a copy."""
        return id(parameter) in self._found

    def refresh(self) -> None:
        """Copies back."""
        for group in self.optimizer.fp16_groups:
            for parameter in group:
                part = self.part(parameter)
                assert part.flat is not None
                parameter.data.view(-1).copy_(part.of(part.flat))


@final
class PartitionedParts(Partitions):
    """Stages 1 and 2: each group is flattened and cut into as many pieces as there are ranks, wherever that cuts.

    Where the model computes in fp32 on the optimizer's device, the optimizer updates the model's own memory in the
    place of a copy of it, so that a loop may write into parameters in any way.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        optimizer = self.optimizer
        # Not by DeepSpeed's attribute, which parameters keep of an engine that was destroyed.
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
        """What of it is in this rank's piece."""
        mapping: Any = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return Partition(0, 0, None, 0)
        here, there = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
        flat = self.optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        return Partition(here.start, here.numel, flat, there.start)

    def flats(self) -> list[torch.Tensor]:
        """This rank's piece of each group."""
        return list(self.optimizer.single_partition_of_fp32_groups)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether it is in a group."""
        return id(parameter) in self._ids

    def group(self, parameter: nn.Parameter) -> Any:
        """The ranks that its group is spread over: experts have their own."""
        return getattr(parameter, "_dp_group", self.optimizer.dp_process_group)

    def refresh(self) -> None:
        """Every rank copies its piece, and all get all pieces."""
        self.optimizer.update_lp_params()


@final
class ShardedParts(Partitions):
    """Stage 3: each parameter is cut into as many equal pieces as there are ranks, the last one padded."""

    @contextmanager
    def held(self, parameter: nn.Parameter, *, changed: bool = False) -> Iterator[Partition]:
        """The part, read from the disk and written back if it is kept there."""
        index = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)][0]
        with self._in_memory(index, changed=changed):
            yield self.part(parameter)

    @contextmanager
    def opened(self, flat: torch.Tensor) -> Iterator[None]:
        """Read from the disk and written back if it is kept there."""
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
        """This rank's piece, without the padding."""
        optimizer = self.optimizer
        index, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = size * optimizer._get_param_partition_rank(parameter)
        total: int = parameter.ds_numel  # type: ignore[attr-defined]
        flat = optimizer.fp32_partitioned_groups_flat[index]
        return Partition(min(start, total), max(0, min(size, total - start)), flat, offset)

    def flats(self) -> list[torch.Tensor]:
        """This rank's pieces, of as many parameters together as DeepSpeed updates at once."""
        return list(self.optimizer.fp32_partitioned_groups_flat)

    def group_numbers(self) -> dict[int, int]:
        """Several of them may be of one group."""
        return {id(flat): self.optimizer.sub_group_to_group_id[index] for index, flat in enumerate(self.flats())}

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether DeepSpeed updates it."""
        return hasattr(parameter, "ds_id") and self.optimizer.get_param_id(parameter) in self.optimizer.grad_position

    def group(self, parameter: nn.Parameter) -> Any:
        """The ranks that it is spread over."""
        return self.optimizer._get_param_partition_group(parameter)

    def refresh(self) -> None:
        """Copies pieces to where forward gathers them from."""
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
    """The parts of an engine's parameters; None where its optimizer updates whole ones themselves (stage 0, fp32).

    Raises:
        BackendError: an optimizer that keeps them in a way that is not known here.
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
