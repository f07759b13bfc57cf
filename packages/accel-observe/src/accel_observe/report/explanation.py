"""Explanation of a run: its choices with reasons, and the communication of a step."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, final

import torch
from torch import nn

from accel_observe.report.read_amplification import read_text


@final
@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One prepared model: this rank's parameters by dtype, and bytes of all its parameters and buffers."""

    name: str
    wrapped_as: tuple[str, ...]
    parameters: int
    trainable: int
    parameter_bytes: int
    buffer_bytes: int
    dtypes: dict[str, int]


@final
@dataclass(frozen=True, slots=True)
class LoaderSummary:
    """One prepared loader: its data, and how its batches form optimizer steps.

    Attributes:
        batch_per_step: samples of one micro-batch of all ranks, at most.
        effective_batch: samples of one optimizer step.
        accumulated: micro-batches of one optimizer step.
        batches_per_epoch: batches of one rank; None if unknown, as in the next two.
        steps_per_epoch: optimizer steps.
        samples_per_epoch: samples of the dataset.
        read_amplification: how often all processes and workers read a sample for each time that it is delivered; None
            if only reading can show it.
    """

    dataset: str
    batch_per_step: int
    effective_batch: int
    accumulated: int
    batches_per_epoch: int | None
    steps_per_epoch: int | None
    samples_per_epoch: int | None
    read_amplification: int | None


@final
@dataclass(frozen=True, slots=True)
class Explanation:
    """Result of ``Accelerator.explain``; ``str`` is for people, ``to_dict`` for programs.

    ``communication`` is the last result of ``count_communication``: collectives by name, with calls and bytes. ``axes``
    are the sizes of the mesh's axes above 1, outermost first.
    """

    backend: str
    reasons: tuple[str, ...]
    device: str
    processes: int
    data_shards: int
    accumulation: int
    timeout_seconds: float | None
    precision: str
    models: tuple[ModelSummary, ...]
    loaders: tuple[LoaderSummary, ...]
    learning_rates: tuple[float, ...]
    settings: tuple[tuple[str, str, str], ...]
    communication: dict[str, dict[str, int]] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns nested plain values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"backend {self.backend}: {'; '.join(self.reasons)}",
            f"{self.processes} processes on {self.device}, {self.data_shards} of them read different data",
        ]
        if self.axes:
            lines.append(f"axes of the mesh: {', '.join(f'{axis}={size}' for axis, size in self.axes.items())}")
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
                f"{loader.effective_batch} (x {loader.accumulated} accumulated), {known} optimizer steps an epoch; "
                f"{read_text(loader.read_amplification)}"
            )
        for name, counts in self.communication.items():
            lines.append(f"{name}: {counts['calls']} calls, {counts['bytes']:,} bytes from this rank")
        lines += [f"{name} = {value}  ({origin})" for name, value, origin in self.settings if origin != "default"]
        return "\n".join(lines)


def summary_of_model(model: nn.Module, own: nn.Module) -> ModelSummary:
    """Returns the summary of a prepared model; ``own`` is the model inside its wrappers."""
    parameters = [_local(parameter) for parameter in model.parameters()]
    dtypes: dict[str, int] = {}
    for parameter in parameters:
        name = str(parameter.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + parameter.numel()
    wrappers = (type(own).__name__,) if own is model else (type(own).__name__, type(model).__name__)
    return ModelSummary(
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


def summary_of_loader(loader: Any, *, num_steps: int, ends_windows: bool, readers: int) -> LoaderSummary:
    """Returns the summary of a prepared loader.

    Args:
        loader: a prepared loader.
        num_steps: micro-batches of an optimizer step.
        ends_windows: the last batch of a pass ends the accumulation window.
        readers: ranks that read the same samples, unless one reads for all.
    """
    batches = _known(lambda: len(loader))
    samples = _known(lambda: int(loader.total_dataset_length))
    batch, window = loader.total_batch_size, loader.global_batch_size
    # A window that the epoch's end truncates is a step, unless windows continue in the next epoch.
    if window is None:
        effective, accumulated, counted = batch * num_steps, num_steps, batches
        full_only, size = not ends_windows, num_steps
    else:
        effective, accumulated, counted = window, -(-window // batch), samples
        full_only, size = bool(loader.drop_last), window
    amplification = loader.read_amplification
    return LoaderSummary(
        dataset=type(loader.dataset).__name__,
        batch_per_step=batch,
        effective_batch=effective,
        accumulated=accumulated,
        batches_per_epoch=batches,
        steps_per_epoch=None if counted is None else (math.floor if full_only else math.ceil)(counted / size),
        samples_per_epoch=samples,
        read_amplification=None if amplification is None else amplification * (1 if loader.reads_for_all else readers),
    )


def _known(ask: Callable[[], int]) -> int | None:
    """Calls ``ask``; returns None if the object has no length."""
    try:
        return ask()
    except TypeError:
        return None
