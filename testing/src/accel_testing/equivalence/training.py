"""Training of a program on a rank: in plain PyTorch as the reference, and through an Accelerator under a layout."""

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from accel_testing.equivalence.layouts import Layout
from accel_testing.equivalence.program import (
    Program,
    count_samples,
    in_dtype,
    join_batches,
    map_tensors,
    take_samples,
    uneven_sizes,
)

if TYPE_CHECKING:
    from accel import Accelerator

Maker = Callable[[], Program]
DTYPES = {"fp64": torch.float64}
# Options of a layout are text, which not every backend parses as a flag.
_FLAGS: dict[str, str | bool] = {"true": True, "false": False}


@final
@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One optimizer step on one rank.

    ``loss`` is the sum over this rank's samples (or weights) and ``weight`` their number; ``norm`` the global gradient
    norm before clipping, ``rates`` the learning rates of the step, ``tensors`` the state after it, on the CPU, tied
    tensors once (empty on ranks other than 0), ``digests`` checksums of this rank's parameters.
    """

    loss: float
    weight: float
    norm: float
    rates: tuple[float, ...]
    skipped: bool = False
    tensors: dict[str, Tensor] = field(default_factory=dict)
    digests: dict[str, int] = field(default_factory=dict)


def train_reference(
    make: Maker, precision: str, *, last_samples: int | None = None, seed: int = 0
) -> list[TrainedStep]:
    """Trains in one process, on full global batches, in plain PyTorch.

    ``last_samples`` truncates the last global batch.
    """
    program, model = _build(make, precision, seed)
    names = state_names(model)
    optimizer = program.optimizer(model)
    scheduler = program.scheduler(optimizer) if program.scheduler else None
    steps = []
    for position, batch in enumerate(_batches(program, precision)):
        if position == len(program.batches) - 1 and last_samples is not None:
            batch = take_samples(batch, slice(0, last_samples))
        weight = _weight(program, batch)
        loss = program.loss(model, batch)
        mean = loss / weight if program.weight else loss
        mean.backward()
        limit = math.inf if program.clip is None else program.clip
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        rates = _rates(optimizer)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        steps.append(
            TrainedStep(mean.item() * weight, weight, norm.item(), rates, tensors=_copy(model.state_dict(), names))
        )
    return steps


def train_layout(
    make: Maker,
    layout: Layout,
    *,
    cpu: bool = True,
    perturb: bool = True,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    seed: int = 0,
) -> list[TrainedStep]:
    """Trains on this rank of ``layout``, through an Accelerator.

    ``perturb`` gives ranks other than 0 other initial weights, which ``prepare`` must replace by those of rank 0;
    ``around`` makes a context manager around the training.
    """
    with around():
        accelerator = open_accelerator(layout, cpu=cpu)
        try:
            return _train(accelerator, make, layout, perturb=perturb, seed=seed)
        finally:
            accelerator.free_memory()
            accelerator.end_training()


def open_accelerator(layout: Layout, *, cpu: bool = True) -> "Accelerator":
    from accel import Accelerator, GradScalerKwargs

    strategy: Any = layout.backend
    if layout.options:
        from accel_backends import build_options, load_backend

        strategy = build_options(load_backend(layout.backend), {name: _FLAGS.get(v, v) for name, v in layout.options})
    parallelism = None
    if layout.degrees:
        from accel_state import ParallelismConfig

        sizes: dict[str, Any] = {f"{name}_size": size for name, size in layout.degrees}
        parallelism = ParallelismConfig(**sizes)
    return Accelerator(
        cpu=cpu and not layout.variables,
        mixed_precision="no" if layout.precision in ("", "fp64", "fp32") else layout.precision,
        gradient_accumulation_steps=layout.accumulate,
        strategy=strategy,
        parallelism_config=parallelism,
        # Small enough for ordinary gradients: the reference has no steps that a search for the loss scale skips.
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
    )


def _train(accelerator: "Accelerator", make: Maker, layout: Layout, *, perturb: bool, seed: int) -> list[TrainedStep]:
    program, model = _build(make, layout.precision, seed)
    names = state_names(model)
    if perturb and accelerator.process_index:
        _perturb(model, accelerator.process_index)
    optimizer = program.optimizer(model)
    scheduler = program.scheduler(optimizer) if program.scheduler else None
    model, optimizer, *rest = accelerator.prepare(model, optimizer, *([scheduler] if scheduler else []))
    source = _weighted_micro_batches if layout.weighted else _loaded_micro_batches
    steps: list[TrainedStep] = []
    losses: list[tuple[float, float]] = []
    for batch in source(accelerator, program, layout):
        with accelerator.accumulate(model):
            weight = _weight(program, batch)
            loss = program.loss(model, batch)
            if program.weight is not None or layout.weighted:
                accelerator.backward(loss if program.weight else loss * weight, weight=weight)
            else:
                accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), math.inf if program.clip is None else program.clip)
            rates = _rates(optimizer)
            optimizer.step()
            for prepared in rest:
                prepared.step()
            optimizer.zero_grad()
        losses.append((loss.item() * (1.0 if program.weight else weight), weight))
        if accelerator.sync_gradients:
            steps.append(_record(accelerator, model, losses, names=names, norm=norm, rates=rates))
            losses.clear()
    return steps


def _record(
    accelerator: "Accelerator",
    model: nn.Module,
    losses: list[tuple[float, float]],
    *,
    names: list[str],
    norm: Tensor,
    rates: tuple[float, ...],
) -> TrainedStep:
    state = {name: _full(value) for name, value in accelerator.get_state_dict(model).items()}
    trained = {name for name, _ in accelerator.unwrap_model(model).named_parameters()}
    return TrainedStep(
        loss=sum(loss for loss, _ in losses),
        weight=sum(weight for _, weight in losses),
        norm=float(_full(norm)),
        rates=rates,
        skipped=bool(accelerator.optimizer_step_was_skipped),
        tensors=_copy(state, names) if accelerator.is_main_process else {},
        digests={name: _digest(value) for name, value in state.items() if name in trained},
    )


def _loaded_micro_batches(accelerator: "Accelerator", program: Program, layout: Layout) -> Iterator[Any]:
    """This rank's micro-batches from a prepared loader; the last window is truncated if the layout is ``short``."""
    from torch.utils.data import DataLoader

    shards = accelerator.data_shard.count
    size = micro_batch_size(program, layout, shards)
    samples = join_batches(list(_batches(program, layout.precision)))
    total = count_samples(samples) - (size * shards if layout.short else 0)
    indices: Any = range(total)
    loader = DataLoader(indices, batch_size=size, collate_fn=lambda rows: take_samples(samples, rows))
    yield from accelerator.prepare(loader)


def _weighted_micro_batches(accelerator: "Accelerator", program: Program, layout: Layout) -> Iterator[Any]:
    """This rank's micro-batches of different sizes, split from the global batches by hand."""
    shard = accelerator.data_shard
    sizes = uneven_sizes(program.batch_size, layout.accumulate * shard.count, zeros=program.weight is not None)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    for batch in _batches(program, layout.precision):
        for micro in range(layout.accumulate):
            index = micro * shard.count + shard.index
            rows = slice(starts[index], starts[index] + sizes[index])
            yield map_tensors(lambda tensor: tensor.to(accelerator.device), take_samples(batch, rows))


def micro_batch_size(program: Program, layout: Layout, shards: int) -> int:
    """Samples of one micro-batch of one shard; the global batch must be divisible."""
    parts = shards * layout.accumulate
    if program.batch_size % parts:
        raise ValueError(
            f"a global batch of {program.batch_size} samples does not divide into {layout.accumulate} micro-batches on "
            f"{shards} shards; use a multiple of {parts} samples, or {layout}/weighted"
        )
    return program.batch_size // parts


def _build(make: Maker, precision: str, seed: int) -> tuple[Program, nn.Module]:
    torch.manual_seed(seed)
    program = make()
    if not isinstance(program, Program):
        raise TypeError(f"{getattr(make, '__name__', make)} returned a {type(program).__name__}; expected a Program")
    return program, program.model.to(DTYPES.get(precision, torch.float32))


def _batches(program: Program, precision: str) -> Iterator[Any]:
    dtype = DTYPES.get(precision, torch.float32)
    for batch in program.batches:
        yield in_dtype(batch, dtype)


def _perturb(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.logical_not_() if tensor.dtype == torch.bool else tensor.add_(rank)


def _weight(program: Program, batch: Any) -> float:
    if program.weight is not None:
        return float(program.weight(batch))
    return float(count_samples(batch))


def _rates(optimizer: Any) -> tuple[float, ...]:
    return tuple(float(group["lr"]) for group in optimizer.param_groups)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def state_names(model: nn.Module) -> list[str]:
    """Names of parameters and persistent buffers; of tied tensors the first name, as in state dicts."""
    seen: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            seen.setdefault(id(value), name)
    return list(seen.values())


def _copy(state: dict[str, Any], names: list[str]) -> dict[str, Tensor]:
    return {name: state[name].detach().cpu().clone() for name in names if name in state}


def _digest(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
