"""What was chosen for a run and why, and what a step of it does: each number read from the object that decides it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

if TYPE_CHECKING:
    from accel.accelerator import Accelerator


@final
@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One prepared model: this rank's parameters by dtype, and all of its own and of its buffers in bytes."""

    name: str
    wrapped_as: tuple[str, ...]
    parameters: int
    trainable: int
    parameter_bytes: int
    buffer_bytes: int
    dtypes: dict[str, int]


@final
@dataclass(frozen=True, slots=True)
class LoaderFacts:
    """One prepared loader: samples of one step of all ranks and of one optimizer step, and steps of one epoch.

    ``read_amplification``: how often the dataset is read for each time it is used; None where only running tells.
    """

    dataset: str
    batch_per_step: int
    effective_batch: int
    batches_per_epoch: int | None
    steps_per_epoch: int | None
    samples_per_epoch: int | None


@final
@dataclass(frozen=True, slots=True)
class Explanation:
    """See ``Accelerator.explain``; ``str`` is for people, ``to_dict`` for programs."""

    backend: str
    reasons: tuple[str, ...]
    device: str
    processes: int
    data_shards: int
    accumulation: int
    timeout_seconds: float | None
    precision: str
    models: tuple[ModelFacts, ...]
    loaders: tuple[LoaderFacts, ...]
    learning_rates: tuple[float, ...]
    settings: tuple[tuple[str, str, str], ...]
    communication: dict[str, dict[str, int]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As nested plain values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"backend {self.backend}: {'; '.join(self.reasons)}",
            f"{self.processes} processes on {self.device}, {self.data_shards} of them read different data",
        ]
        if self.timeout_seconds is not None:
            lines.append(f"a collective waits {self.timeout_seconds:g} s for the other ranks")
        lines.append(self.precision)
        for model in self.models:
            kinds = ", ".join(f"{count:,} {dtype}" for dtype, count in model.dtypes.items())
            lines.append(
                f"model {model.name} ({' in '.join(model.wrapped_as)}): {model.parameters:,} parameters here "
                f"({kinds}), {model.trainable:,} trained; {model.parameter_bytes:,} bytes, "
                f"buffers {model.buffer_bytes:,}"
            )
        for loader in self.loaders:
            known = "unknown" if loader.steps_per_epoch is None else f"{loader.steps_per_epoch:,}"
            lines.append(
                f"loader of {loader.dataset}: {loader.batch_per_step} samples a step of all ranks, effective batch "
                f"{loader.effective_batch} (x {self.accumulation} accumulated), {known} optimizer steps an epoch"
            )
        for name, counts in self.communication.items():
            lines.append(f"{name}: {counts['calls']} calls, {counts['bytes']:,} bytes")
        lines += [f"{name} = {value}  ({origin})" for name, value, origin in self.settings if origin != "default"]
        return "\n".join(lines)


def explain(accelerator: "Accelerator") -> Explanation:
    """Collects what has been decided so far. Nothing is communicated, so any rank may ask."""
    timeout = accelerator.session.timeout
    return Explanation(
        backend=accelerator.choice.name,
        reasons=tuple(accelerator.choice.reasons),
        device=str(accelerator.device),
        processes=accelerator.num_processes,
        data_shards=accelerator.data_shard.count,
        accumulation=accelerator.gradient_accumulation_steps,
        timeout_seconds=None if timeout is None else timeout.total_seconds(),
        precision=accelerator.policy.table(),
        models=tuple(_model(model, accelerator) for model in accelerator._models),
        loaders=tuple(_loader(loader, accelerator) for loader in accelerator._dataloaders),
        learning_rates=tuple(group["lr"] for one in accelerator._optimizers for group in one.param_groups),
        settings=tuple((row.name, str(row.value), str(row.origin)) for row in accelerator.config.explain()),
    )


def _model(model: nn.Module, accelerator: "Accelerator") -> ModelFacts:
    own = accelerator.unwrap_model(model)
    parameters = [_local(parameter) for parameter in model.parameters()]
    dtypes: dict[str, int] = {}
    for parameter in parameters:
        name = str(parameter.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + parameter.numel()
    wrappers = (type(own).__name__,) if own is model else (type(own).__name__, type(model).__name__)
    return ModelFacts(
        name=type(own).__name__,
        wrapped_as=wrappers,
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(_local(parameter).numel() for parameter in model.parameters() if parameter.requires_grad),
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        dtypes=dtypes,
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _loader(loader: Any, accelerator: "Accelerator") -> LoaderFacts:
    steps = accelerator.gradient_accumulation_steps
    try:
        batches: int | None = len(loader)
    except TypeError:
        batches = None
    try:
        samples: int | None = loader.total_dataset_length
    except TypeError:
        samples = None
    return LoaderFacts(
        dataset=type(loader.dataset).__name__,
        batch_per_step=loader.total_batch_size,
        effective_batch=loader.total_batch_size * steps,
        batches_per_epoch=batches,
        steps_per_epoch=None if batches is None else _optimizer_steps(batches, accelerator),
        samples_per_epoch=samples,
    )


def _optimizer_steps(batches: int, accelerator: "Accelerator") -> int:
    """A window that the epoch's end cuts short is a step, unless windows go on over it."""
    plugin = accelerator.clock.plugin
    return (math.ceil if plugin.sync_with_dataloader else math.floor)(batches / plugin.num_steps)


@contextmanager
def counted_communication() -> Iterator[dict[str, dict[str, int]]]:
    """Counts collectives in the block, and the bytes this rank gives to them, by name, as torch's profiler sees them.

    The mapping is filled when the block ends.
    """
    from torch.profiler import ProfilerActivity, profile

    found: dict[str, dict[str, int]] = {}
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        yield found
    for event in profiler.events() or ():
        library, _, name = event.name.partition(":")
        if library in {"gloo", "nccl", "mpi", "ucc", "xccl"} and name:
            counts = found.setdefault(name, {"calls": 0, "bytes": 0})
            counts["calls"] += 1
            counts["bytes"] += _bytes_of(event)


def _bytes_of(event: Any) -> int:
    """What a recorded collective was given; the profiler tells shapes, and dtypes where it knows them."""
    total = 0
    dtypes = list(getattr(event, "input_dtypes", None) or [])
    for position, shape in enumerate(event.input_shapes or ()):
        if isinstance(shape, list | tuple) and all(isinstance(size, int) for size in shape):
            name = dtypes[position] if position < len(dtypes) else "float"
            total += math.prod(shape) * _ITEM_SIZES.get(name, 4)
    return total


_ITEM_SIZES = {"double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "int": 4, "unsigned char": 1}
