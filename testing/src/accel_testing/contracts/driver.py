"""Drivers of a contract's loop: plain PyTorch in one process, or an Accelerator."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from accel_testing.contracts.samples import ROWS, SampleBatch
from accel_testing.equivalence.program import take_samples

if TYPE_CHECKING:
    from accel import Accelerator


class Driver(ABC):
    """The calls that loops make, under the names of ``Accelerator``.

    Attributes:
        dtype: of models and samples.
        position: progress of the loop: 0 before the first batch, then the current optimizer step, from 1.
        seen: tensors noted by the loop, which must equal the reference's on every rank.
    """

    def __init__(self, samples: SampleBatch) -> None:
        self.samples = samples
        self.dtype = samples.x.dtype
        self.position = 0
        self.seen: dict[str, Tensor] = {}

    @property
    def step(self) -> int:
        """The current optimizer step, from 0."""
        return max(self.position - 1, 0)

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return 0

    def note(self, name: str, value: Tensor) -> None:
        """Notes a tensor, which at the end of training must equal the reference's on every rank."""
        self.seen[name] = value.detach().clone()

    @abstractmethod
    def prepare(self, *objects: Any) -> Any: ...
    @abstractmethod
    def windows(self) -> Iterator[list[SampleBatch]]:
        """The micro-batches of each optimizer step, for loops that accumulate by hand."""

    def batches(self) -> Iterator[SampleBatch]:
        """All micro-batches."""
        for window in self.windows():
            yield from window

    @abstractmethod
    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]: ...
    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]: ...
    @abstractmethod
    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]: ...
    @abstractmethod
    def backward(self, loss: Tensor, *, weight: Tensor | None = None, **options: Any) -> None: ...
    @abstractmethod
    def clip_grad_norm_(self, parameters: Any, max_norm: float) -> Tensor: ...
    @abstractmethod
    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None: ...
    @abstractmethod
    def mean(self, value: Tensor) -> Tensor:
        """Mean of a tensor over ranks."""

    @abstractmethod
    def unwrap_model(self, model: nn.Module) -> nn.Module: ...
    @abstractmethod
    def get_state_dict(self, model: nn.Module) -> Mapping[str, Any]:
        """The model's full state, on the main process; elsewhere it may be empty."""


@final
class PlainDriver(Driver):
    """The reference: full global batches in one process."""

    def prepare(self, *objects: Any) -> Any:
        return objects[0] if len(objects) == 1 else objects

    def windows(self) -> Iterator[list[SampleBatch]]:
        for start in range(0, len(self.samples.x), ROWS):
            self.position += 1
            yield [take_samples(self.samples, slice(start, start + ROWS))]

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: Tensor, *, weight: Tensor | None = None, **options: Any) -> None:
        (loss if weight is None else loss / weight).backward(**options)

    def clip_grad_norm_(self, parameters: Any, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        nn.utils.clip_grad_value_(parameters, clip_value)

    def mean(self, value: Tensor) -> Tensor:
        return value

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model

    def get_state_dict(self, model: nn.Module) -> Mapping[str, Any]:
        return model.state_dict()


@final
class AccelDriver(Driver):
    """One rank of an Accelerator."""

    def __init__(self, accelerator: "Accelerator", samples: SampleBatch, *, copies: bool, micro_batches: int) -> None:
        super().__init__(samples)
        self.accelerator = accelerator
        self.copies = copies
        self.micro_batches = micro_batches

    @property
    def process_index(self) -> int:
        return self.accelerator.process_index

    def prepare(self, *objects: Any) -> Any:
        return self.accelerator.prepare(*objects)

    def windows(self) -> Iterator[list[SampleBatch]]:
        window: list[SampleBatch] = []
        for index, batch in enumerate(self._loaded()):
            self.position = index // self.micro_batches + 1
            window.append(batch)
            if len(window) == self.micro_batches:
                yield window
                window = []
        if window:
            yield window

    def batches(self) -> Iterator[SampleBatch]:
        for index, batch in enumerate(self._loaded()):
            self.position = index // self.micro_batches + 1
            yield batch

    def _loaded(self) -> Iterator[SampleBatch]:
        """This rank's micro-batches from a prepared loader; the same on all ranks with ``copies``."""
        from torch.utils.data import DataLoader

        shards = self.accelerator.data_shard.count
        size = ROWS // self.micro_batches
        samples = self.samples
        if self.copies:
            rows = [
                row
                for start in range(0, len(samples.x), size)
                for _ in range(shards)
                for row in range(start, start + size)
            ]
            samples = take_samples(samples, rows)
        else:
            size //= shards
        indices: Any = range(len(samples.x))
        loader = DataLoader(indices, batch_size=size, collate_fn=lambda rows: take_samples(samples, rows))
        yield from self.accelerator.prepare(loader)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        return self.accelerator.accumulate(*models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return self.accelerator.no_sync(model)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        return self.accelerator.trigger_sync_in_backward(model)

    def backward(self, loss: Tensor, *, weight: Tensor | None = None, **options: Any) -> None:
        self.accelerator.backward(loss, weight=weight, **options)

    def clip_grad_norm_(self, parameters: Any, max_norm: float) -> Tensor:
        return self.accelerator.clip_grad_norm_(parameters, max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        self.accelerator.clip_grad_value_(parameters, clip_value)

    def mean(self, value: Tensor) -> Tensor:
        result: Tensor = self.accelerator.reduce(value.detach(), reduction="mean")
        return result

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return self.accelerator.unwrap_model(model)

    def get_state_dict(self, model: nn.Module) -> Mapping[str, Any]:
        return self.accelerator.get_state_dict(model)

    def note(self, name: str, value: Tensor) -> None:
        super().note(name, (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu())
