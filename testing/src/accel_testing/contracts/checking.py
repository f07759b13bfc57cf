"""Runs a contract on the ranks of a layout and in one process, and compares the two."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

import torch
from torch import Tensor, nn

from accel_testing.contracts.case import Case
from accel_testing.contracts.driver import AccelDriver, Driver, PlainDriver
from accel_testing.contracts.outcome import Ending, Outcome, judge
from accel_testing.equivalence.layouts import Layout
from accel_testing.equivalence.training import open_accelerator, state_names
from accel_testing.errors import RankDied, RankError, RankHung
from accel_testing.ranks.groups import leave_group
from accel_testing.ranks.pool import RankPool

#: The layouts of accel's own backends.
LAYOUTS = ("single", "ddp:2", "fsdp:2", "fsdp1:2", "ds0:2/fp32", "ds1:2/fp32", "ds2:2/fp32", "ds3:2/fp32")
#: Largest distance of a tensor from the reference's, by precision.
TOLERANCES = {"fp64": 1e-10, "fp32": 1e-5}
#: Seconds that a case may take on its ranks before it counts as hung.
TIMEOUT = 30.0
# Seconds that a rank whose training was refused waits for the refusals of the others before it closes its connections.
_GRACE = 3.0
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


def check_case(case: Case, layout: str | Layout, pool: RankPool, *, timeout: float = TIMEOUT) -> Outcome:
    """Trains a contract under a layout, on the ranks of ``pool``; returns the outcome.

    ``layout`` names any installed backend (``"mine:2"``), in float64 unless it names ``fp32``. Ranks that hang for
    ``timeout`` seconds, or die, are an outcome too, and are replaced for the next case.

    Raises:
        ValueError: another precision, a layout that accumulates (the case decides that), or a backend to which the
            case does not apply.
    """
    layout = _chosen(case, Layout.parse(layout) if isinstance(layout, str) else layout)
    ranks, precision = layout.processes, layout.precision
    group = None if ranks == 1 else "gloo"
    with TemporaryDirectory(prefix="accel-contract-") as folder:
        try:
            results = pool.run(
                train_rank, case, layout, folder, ranks=ranks, group=group, timeout=timeout, variables=layout.variables
            )
        except RankHung as error:
            return Outcome("hung", _first_lines(error))
        except RankDied as error:
            return Outcome("died", _first_lines(error))
        except RankError as error:
            return Outcome("uneven", _first_lines(error))
    reference, names = results[0][1]
    endings = [ending for ending, _ in results]
    return judge(reference, endings, tolerance=TOLERANCES[precision], since=case.since, names=(*case.names, *names))


def train_reference(case: Case, precision: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Trains the reference; returns the expected tensors of every rank, and the names that a refusal may mention."""
    dtype = _DTYPES[precision]
    models = case.models(dtype)
    names = tuple(name for model in models for name in _names(model))
    return _trained(case, PlainDriver(case.samples(dtype)), models), names


def train_rank(
    case: Case, layout: Layout, folder: str
) -> tuple[Ending, tuple[dict[str, Tensor], tuple[str, ...]] | None]:
    """Trains on this rank of ``layout``; returns its ending and, on the main rank, the reference."""
    import os

    rank = int(os.environ["RANK"])
    reference = train_reference(case, layout.precision) if rank == 0 else None
    ended = _Ended(Path(folder), rank, layout.processes)
    return ended.after(lambda: _end(case, layout)), reference


def _end(case: Case, layout: Layout) -> Ending:
    """Trains on this rank and closes the Accelerator; an error while closing counts too."""
    dtype = _DTYPES[layout.precision]
    accelerator = driver = None
    try:
        accelerator = open_accelerator(layout)
        driver = AccelDriver(accelerator, case.samples(dtype), copies=case.copies, micro_batches=case.accumulate)
        ending = Ending(_trained(case, driver, case.models(dtype)))
    except Exception as error:
        ending = _failed(error, driver.position if driver else 0)
    try:
        if accelerator is not None:
            accelerator.free_memory()
            accelerator.end_training()
    except Exception as error:
        return ending if ending.error else _failed(error, case.steps)
    return ending


def _failed(error: Exception, position: int) -> Ending:
    from accel_state.errors import AccelError

    return Ending(error=f"{type(error).__name__}: {error}", ours=isinstance(error, AccelError), position=position)


def _trained(case: Case, driver: Driver, models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Trains, and returns all tensors to compare."""
    result = case.train(driver, *models)
    trained = result if isinstance(result, tuple) else (result,)
    tensors = {f"noted {name}": value for name, value in driver.seen.items()}
    for index, model in enumerate(trained):
        state = driver.get_state_dict(model)
        names = state_names(model) if isinstance(driver, PlainDriver) else list(state)
        place = f"{index}." if len(trained) > 1 else ""
        tensors |= {place + name: _whole(state[name]) for name in names}
    return tensors


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu().clone()


def _names(model: nn.Module) -> Iterable[str]:
    """Names that a refusal may use for parts of the model: FQNs and classes."""
    yield from (name for name, _ in model.named_parameters())
    for name, module in model.named_modules():
        yield from (name, type(module).__name__) if name else (type(module).__name__,)


def _chosen(case: Case, layout: Layout) -> Layout:
    """The layout with the case's accumulation and options of the backend."""
    precision = layout.precision or "fp64"
    if precision not in TOLERANCES:
        raise ValueError(f"contracts are trained in {' or '.join(TOLERANCES)}, and {layout} has {precision}")
    if not case.concerns(layout.backend):
        raise ValueError(f"{case.name!r} is a contract of {', '.join(case.options)}, and not of {layout.backend}")
    if layout.accumulate > 1 or layout.weighted or layout.short:
        raise ValueError(f"{layout} accumulates; each contract says by itself whether it does")
    options = {**dict(layout.options), **case.options.get(layout.backend, {})}
    return replace(
        layout,
        precision=precision,
        accumulate=1 if case.by_hand else case.accumulate,
        options=tuple(options.items()),
    )


def _first_lines(error: Exception) -> str:
    return "; ".join(str(error).partition("\n\n")[0].splitlines())


@final
class _Ended:
    """Records in a folder which ranks have ended, so that a rank that fails alone does not keep the others waiting."""

    def __init__(self, folder: Path, rank: int, count: int) -> None:
        self.folder = folder
        self.rank = rank
        self.count = count

    def after(self, work: Callable[[], Ending]) -> Ending:
        """Returns the result of ``work``; an error only once all ranks have ended or its connections are closed."""
        ending = work()
        (self.folder / str(self.rank)).touch()
        if ending.error:
            until = time.monotonic() + _GRACE
            while len(list(self.folder.iterdir())) < self.count and time.monotonic() < until:
                time.sleep(0.01)
            leave_group(patience=_GRACE)
        return ending
