"""The number of collectives in ``save_state`` and ``load_state``: each costs as much as some megabytes read."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel import Accelerator

COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)


def counted(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> list[str]:
    """The collectives that this rank enters while ``run`` runs."""
    entered: list[str] = []

    def noted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            entered.append(name)
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in COLLECTIVES:
            if hasattr(dist, name):  # some are not in every torch
                patch.setattr(dist, name, noted(name, getattr(dist, name)))
        run()
    return entered


def trained(strategy: str) -> Accelerator:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_wait_for_each_other_a_few_times_only(
    tmp_path: Path, rank: int, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = trained(strategy)
    accelerator.save_state(tmp_path / "first")  # which makes what is made once
    saved = counted(monkeypatch, lambda: accelerator.save_state(tmp_path / "a"))
    # Collecting the state, beginning, writing, committing: four, of which two send more than fits beside its length.
    assert len(saved) <= 6, saved
    loaded = counted(monkeypatch, lambda: accelerator.load_state(tmp_path / "a"))
    # Comparing the options, opening, comparing and planning, loading what can refuse only then, reading, loading.
    assert len(loaded) <= 6, loaded


@pytest.mark.ranks(2)
def test_ranks_wait_no_more_often_with_more_tensors(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what is too long to be sent with its length, which takes one collective more each."""
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    accelerator.prepare(nn.Sequential(*(nn.Linear(4, 4) for _ in range(100))))
    accelerator.save_state(tmp_path / "a")
    loaded = counted(monkeypatch, lambda: accelerator.load_state(tmp_path / "a"))
    assert len(loaded) <= 6, loaded
