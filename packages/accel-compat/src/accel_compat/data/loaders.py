"""Loaders that Accelerate makes: each delivers this process's batches on its device."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel_compat.data.samplers import CompatSkipSampler, nested_samplers, set_sampler
from accel_compat.state.accelerator_state import SharedAcceleratorState
from accel_compat.state.gradient_state import SharedGradientState
from accel_compat.state.process_state import SharedPartialState
from accel_data import get_sampler
from accel_state.collectives.tensors import broadcast, broadcast_object_list
from accel_state.enums import DistributedType
from accel_state.pytree.operations import (
    concatenate,
    find_batch_size,
    get_data_structure,
    initialize_tensors,
    send_to_device,
    slice_tensors,
)
from accel_state.rng import synchronize_rng_states


class DataLoaderStateMixin:
    """End of the pass, and number of samples that its last global batch repeats.

    Attributes:
        end_of_dataloader: whether the last batch has been delivered.
        remainder: samples of the last global batch that are not repeated; -1 if unknown, 0 if the batch is full.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    gradient_state: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        cls.end_of_dataloader = False
        cls.remainder = -1

    def reset(self) -> None:
        """Forgets the end of the last pass."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Begins a pass, and becomes the active loader."""
        self.reset()
        try:
            if not self._drop_last:  # type: ignore[attr-defined]
                length = getattr(self.dataset, "total_dataset_length", len(self.dataset))  # type: ignore[attr-defined]
                self.remainder = length % self.total_batch_size  # type: ignore[attr-defined]
        except Exception:
            self.remainder = -1
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Ends a pass; the loader around it is active again."""
        self.gradient_state._remove_dataloader(self)


class DataLoaderAdapter:
    """A loader of torch or torchdata, to which every other attribute is forwarded; an instance of the loader's class.

    Attributes:
        base_dataloader: the loader.
    """

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        kind: type = DataLoader
        if use_stateful_dataloader:
            kind = stateful_loader()
        self.base_dataloader = kind(dataset, batch_sampler=batch_sampler, **kwargs)
        if hasattr(self.base_dataloader, "state_dict"):
            self.dl_state_dict = self.base_dataloader.state_dict()

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self).presented(type(self.base_dataloader))

    @classmethod
    def presented(cls, base: type) -> type:
        """Class that ``isinstance`` sees, which is that of the inner loader."""
        return base

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def state_dict(self) -> Any:
        """State of the inner loader at the last batch that was delivered."""
        return self.dl_state_dict

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads a state into the inner loader."""
        self.base_dataloader.load_state_dict(state_dict)

    def _update_state_dict(self) -> None:
        if hasattr(self.base_dataloader, "state_dict"):
            self.dl_state_dict = self.base_dataloader.state_dict()
            self.dl_state_dict["_iterator_finished"] = self.end_of_dataloader

    def get_sampler(self) -> Any:
        """Returns the sampler of single samples."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replaces the sampler of single samples."""
        set_sampler(self, sampler)

    def __reduce__(self) -> Any:
        return (_rebuilt, (type(self), self.__dict__))


def _rebuilt(kind: type, attributes: dict[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    made.__dict__.update(attributes)
    return made


def stateful_loader() -> type:
    """Returns torchdata's StatefulDataLoader.

    Raises:
        ImportError: torchdata is not installed.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise ImportError(
            "StatefulDataLoader is not available. Please install torchdata version 0.8.0 or higher."
        ) from error
    kind: type = StatefulDataLoader
    return kind


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that reads this process's shard, with one batch of lookahead, and moves batches to ``device``."""

    def __init__(
        self,
        dataset: Any,
        device: Any = None,
        rng_types: Any = None,
        synchronized_generator: Any = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.gradient_state = SharedGradientState()
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.torch_device_mesh = torch_device_mesh
        self.iteration = iteration

    def __iter__(self) -> Iterator[Any]:
        if self.rng_types is not None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self.begin()
        self.set_epoch(self.iteration)
        batches = iter(self.base_dataloader)
        try:
            current = next(batches)
        except StopIteration:
            self.end()
            return
        index = 0
        while not self.end_of_dataloader:
            if self.device is not None:
                current = send_to_device(current, self.device, non_blocking=self._non_blocking)
            self._update_state_dict()
            following = None
            try:
                following = next(batches)
            except StopIteration:
                self.end_of_dataloader = True
                self._update_state_dict()
            if index >= self.skip_batches:
                yield current
            index += 1
            current = following
        self.iteration += 1
        self.end()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of samplers, batch samplers and the dataset that have one."""
        _set_epoch(self, epoch)

    @property
    def total_batch_size(self) -> int:
        """Samples of a batch over all processes."""
        sampler = self.sampler if isinstance(self.sampler, torch.utils.data.BatchSampler) else self.batch_sampler
        while isinstance(sampler, CompatSkipSampler):
            sampler = sampler.batch_sampler
        if getattr(sampler, "split_batches", False):
            return int(sampler.batch_size)
        return int(sampler.batch_size * getattr(sampler, "num_processes", 1))

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset over all processes."""
        return int(self.dataset.total_length) if hasattr(self.dataset, "total_length") else len(self.dataset)


class DataLoaderDispatcher(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that rank 0 reads; every process receives its rows of each global batch.

    With ``torch_device_mesh``, processes that differ along its tensor, context or sequence axes receive the same rows.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.split_batches = split_batches
        self.gradient_state = SharedGradientState()
        self.state = SharedPartialState()
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.skip_batches = skip_batches
        self.torch_device_mesh = torch_device_mesh
        self.slice_fn = slice_tensors if slice_fn is None else slice_fn
        self.iteration = iteration

    @property
    def _place(self) -> tuple[int, int]:
        """Number of parts of a global batch, and which of them this process receives."""
        if self.torch_device_mesh is not None:
            return mesh_ranks(self.torch_device_mesh)
        return self.state.num_processes, self.state.process_index

    def _read(self, batches: Any) -> Any:
        """One global batch, which rank 0 reads; None at the end. All processes receive its structure."""
        state = self.state
        facts: list[Any] = [None, True]
        batch = None
        if state.process_index == 0:
            wanted = 1 if self.split_batches else self._place[0]
            held: list[Any] = []
            self._update_state_dict()  # before this global batch, which is read ahead
            while len(held) < wanted:
                one = next(batches, None)
                if one is None:
                    break
                held.append(one)
            if len(held) == wanted or (held and not self._drop_last):
                try:
                    batch = held[0] if len(held) == 1 else concatenate(held, dim=0)
                except RuntimeError as error:
                    raise RuntimeError(
                        "You can't use batches of different size with `dispatch_batches=True` or when using an "
                        "`IterableDataset`. either pass `dispatch_batches=False` and have each process fetch its own "
                        "batch or pass `split_batches=True`."
                    ) from error
                facts = [get_data_structure(batch), False]
        broadcast_object_list(facts)
        if facts[1]:
            return None
        if state.process_index != 0:
            batch = initialize_tensors(facts[0])
        batch = send_to_device(batch, state.device, non_blocking=self._non_blocking)
        return broadcast(batch, from_process=0)

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        self.set_epoch(self.iteration)
        batches = iter(self.base_dataloader) if self.state.process_index == 0 else None
        count, place = self._place
        current = self._read(batches)
        first = None
        index = 0
        while current is not None:
            following = self._read(batches)
            size = find_batch_size(current)
            if size is None:
                raise ValueError("a batch without tensors cannot be dispatched to the processes")
            observed, part = size, size // count
            if first is None:
                first = self.slice_fn(current, slice(0, count), process_index=place, num_processes=count)
            if following is None:
                self.end_of_dataloader = True
                self._update_state_dict()
                self.remainder = observed
                if size % count != 0:
                    current = concatenate([current, first], dim=0)
                    part += 1
            mine = slice(place * part, (place + 1) * part)
            rows = self.slice_fn(current, mine, process_index=place, num_processes=count)
            if index >= self.skip_batches:
                yield rows
            index += 1
            current = following
        self.iteration += 1
        self.end()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of samplers, batch samplers and the dataset that have one."""
        _set_epoch(self, epoch)

    def __len__(self) -> int:
        length = len(self.base_dataloader)
        if self.split_batches:
            return length
        count, _ = self._place
        return length // count if self._drop_last else -(-length // count)

    @property
    def total_batch_size(self) -> int:
        """Samples of a batch over all processes."""
        size = self.dataset.batch_size if hasattr(self.dataset, "batch_size") else self.base_dataloader.batch_size
        return int(size if self.split_batches else size * self._place[0])

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset."""
        return len(self.dataset)


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader of torch without the first batches of each pass."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches
        self.gradient_state = SharedGradientState()

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        for index, batch in enumerate(iter(self.base_dataloader)):
            if index >= self.skip_batches:
                self._update_state_dict()
                yield batch
        self.end()

    def __len__(self) -> int:
        return len(self.base_dataloader) - self.skip_batches


def _set_epoch(loader: Any, epoch: int) -> None:
    loader.iteration = epoch
    for one in (*nested_samplers(loader), loader.dataset):
        if hasattr(one, "set_epoch"):
            one.set_epoch(epoch)


def mesh_ranks(mesh: Any) -> tuple[int, int]:
    """Number of data-parallel groups of a mesh, and this process's position among them."""
    sizes = dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
    shared = sizes.get("tp", 1) * (1 if _deepspeed() else sizes.get("cp", 1) * sizes.get("sp", 1))
    state = SharedPartialState()
    return state.num_processes // shared, state.process_index // shared


def _deepspeed() -> bool:
    return (
        bool(SharedAcceleratorState._shared_state)
        and SharedPartialState().distributed_type == DistributedType.DEEPSPEED
    )
