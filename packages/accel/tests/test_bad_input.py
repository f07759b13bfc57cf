"""A mistake in a script is told on every rank, and costs nothing that was saved.

Those of a command line are with the launcher's tests.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accel import Accelerator
from accel_state import AccelError, CheckpointError, CheckpointMismatchError, ConfigError, PrepareError, SessionError


def prepares_twice(accelerator: Accelerator, folder: Path) -> None:
    accelerator.prepare(accelerator.prepared.models[0])


def steps_before_prepare(accelerator: Accelerator, folder: Path) -> None:
    Accelerator(cpu=True, strategy=accelerator.choice.name).backward(nn.Linear(2, 1)(torch.ones(1, 2)).sum())


def steps_what_was_not_prepared(accelerator: Accelerator, folder: Path) -> None:
    accelerator.prepare(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0))


def saves_where_it_may_not(accelerator: Accelerator, folder: Path) -> None:
    (folder / "file").write_text("in the way")
    accelerator.save_state(folder / "file" / "inside")


def saves_nowhere(accelerator: Accelerator, folder: Path) -> None:
    accelerator.save_state()


def loads_another_model(accelerator: Accelerator, folder: Path) -> None:
    other = Accelerator(cpu=True, strategy=accelerator.choice.name)
    other.prepare(nn.Sequential(nn.Linear(4, 2)))
    other.load_state(folder / "good")


def loads_what_is_not_there(accelerator: Accelerator, folder: Path) -> None:
    accelerator.load_state(folder / "absent")


MISTAKES: dict[Callable[[Accelerator, Path], None], tuple[type[AccelError], str]] = {
    prepares_twice: (PrepareError, "prepared already"),
    steps_before_prepare: (PrepareError, "before a model was prepared"),
    steps_what_was_not_prepared: (PrepareError, "SGD updates parameters of no prepared model"),
    saves_where_it_may_not: (CheckpointError, r"file.inside: cannot be written: File exists"),
    saves_nowhere: (ConfigError, "give output_dir"),
    loads_another_model: (CheckpointMismatchError, r"0\.weight"),
    loads_what_is_not_there: (CheckpointError, "absent"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
@pytest.mark.sampled(4)
def test_every_rank_hears_of_a_mistake_and_nothing_is_lost(
    mistake: Callable[[Accelerator, Path], None], strategy: str, tmp_path: Path
) -> None:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = accelerator.prepare(nn.Linear(4, 4))
    accelerator.save_state(tmp_path / "good")
    kind, words = MISTAKES[mistake]
    with pytest.raises(kind, match=words):
        mistake(accelerator, tmp_path)
    before = [part.clone() for part in parts(model)]
    for part in parts(model):
        part.zero_()
    accelerator.load_state(tmp_path / "good")  # whole, and the ranks are in step
    assert all(map(torch.equal, parts(model), before))
    assert any(part.any() for part in before)


def parts(model: nn.Module) -> list[torch.Tensor]:
    """What this rank holds of each parameter."""
    whole = [parameter.detach() for parameter in model.parameters()]
    return [part.to_local() if isinstance(part, DTensor) else part for part in whole]


@pytest.mark.ranks(2)
def test_a_model_is_not_prepared_after_the_end_of_training() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.end_training()
    with pytest.raises(SessionError, match="closed"):
        accelerator.prepare(nn.Linear(2, 1))
