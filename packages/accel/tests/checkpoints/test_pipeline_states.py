"""Checkpoints of a pipeline have the names of the user's own model, so that any layout resumes from them."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel_backends import PipelineParallelConfig
from accel_state import ParallelismConfig
from accel_testing import RankPool
from accel_testing.equivalence.causal_lms import VOCABULARY, tiny_gpt2, tiny_mixtral, with_exact_loss

STEPS = 3
LAYOUTS = {
    "single": (),
    "fsdp": ("dp_shard",),
    "tp": ("tp",),
    "pp": ("pp",),
    "pp x tp": ("pp", "tp"),
    "pp x dp_shard": ("pp", "dp_shard"),
    "pp x cp": ("pp", "cp"),
    "pp x sp": ("pp", "sp"),
    "pp x ep": ("pp", "ep"),
}
"""Axes of two ranks each."""


def gpt2() -> Any:
    return with_exact_loss(tiny_gpt2()).double()


def mixtral() -> Any:
    return with_exact_loss(tiny_mixtral(use_cache=False)).double()


def batches(first: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(0, VOCABULARY, (4, 12), generator=generator) for _ in range(4 * STEPS)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in drawn[first:]]


def accelerator_of(layout: str, **options: Any) -> Accelerator:
    degrees = {f"{axis}_size": 2 for axis in LAYOUTS[layout]}
    if not degrees:
        return Accelerator(cpu=True, **options)
    strategy = PipelineParallelConfig() if "pp" in LAYOUTS[layout] else "fsdp"
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(**degrees), strategy=strategy, **options)


def run(
    layout: str,
    steps: int,
    load: str | None,
    save: str | None,
    accumulated: int = 1,
    make: Callable[[], Any] = gpt2,
    *,
    weighted: bool = False,
) -> dict[str, Any]:
    """Trains from a checkpoint or from the beginning, and returns the losses and the full state."""
    accelerator = accelerator_of(layout, gradient_accumulation_steps=accumulated)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    first = 0
    if load is not None:
        accelerator.load_state(load)
        first = STEPS
    losses = []
    for number, batch in enumerate(islice(batches(first), steps), first):
        with accelerator.accumulate(model):
            loss, weight = model(**batch).loss, number % 3 + 1
            accelerator.backward(loss * weight if weighted else loss, weight=weight if weighted else None)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if save is not None:
        accelerator.save_state(save)
    state = accelerator.get_state_dict(model)
    assert accelerator.is_main_process or not state or layout == "single"
    accelerator.end_training()
    return {"losses": losses, "state": state}


CHANGES = [
    ("pp", "single", 2),
    ("pp x cp", "single", 2),
    pytest.param("single", "pp x cp", 2, marks=pytest.mark.slow),
    pytest.param("single", "pp x sp", 1, marks=pytest.mark.slow),
    pytest.param("pp x sp", "pp x dp_shard", 2, marks=pytest.mark.slow),
    pytest.param("pp x ep", "single", 2, marks=pytest.mark.slow),
    pytest.param("single", "pp x ep", 2, marks=pytest.mark.slow),
    pytest.param("pp x ep", "pp x dp_shard", 1, marks=pytest.mark.slow),
    pytest.param("single", "pp", 1, marks=pytest.mark.slow),
    ("pp x tp", "pp x dp_shard", 2),
    pytest.param("pp", "single", 1, marks=pytest.mark.slow),
    pytest.param("single", "pp", 2, marks=pytest.mark.slow),
    pytest.param("pp", "pp", 1, marks=pytest.mark.slow),
    pytest.param("pp", "pp", 2, marks=pytest.mark.slow),
    pytest.param("pp x dp_shard", "pp x tp", 2, marks=pytest.mark.slow),
    pytest.param("pp x dp_shard", "single", 1, marks=pytest.mark.slow),
    pytest.param("single", "pp x tp", 2, marks=pytest.mark.slow),
    pytest.param("fsdp", "pp x dp_shard", 1, marks=pytest.mark.slow),
    pytest.param("pp x tp", "fsdp", 1, marks=pytest.mark.slow),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("before", "after", "accumulated"), CHANGES)
def test_training_goes_on_in_another_layout(
    rank_pool: RankPool, tmp_path: Any, before: str, after: str, accumulated: int
) -> None:
    """With two batches in an accumulation window the checkpoint is written inside one. All ranks read the same data."""
    make = mixtral if "ep" in LAYOUTS[before] + LAYOUTS[after] else gpt2
    expected = rank_pool.run(run, "single", 2 * STEPS, None, None, accumulated, make, ranks=1)[0]
    folder = str(tmp_path / "saved")
    rank_pool.run(run, before, STEPS, None, folder, accumulated, make, ranks=2 ** len(LAYOUTS[before]))
    found = rank_pool.run(run, after, STEPS, folder, None, accumulated, make, ranks=2 ** len(LAYOUTS[after]))
    for one in found:
        assert one["losses"] == pytest.approx(expected["losses"][STEPS:], rel=1e-10)
    assert found[0]["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        torch.testing.assert_close(found[0]["state"][name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("before", "after"), [("single", "pp"), ("tp", "single"), ("pp", "tp")])
def test_a_window_of_weighted_losses_goes_on_in_another_layout(
    rank_pool: RankPool, tmp_path: Any, before: str, after: str
) -> None:
    expected = rank_pool.run(run, "single", 2 * STEPS, None, None, 2, weighted=True, ranks=1)[0]
    folder = str(tmp_path / "saved")
    rank_pool.run(run, before, STEPS, None, folder, 2, weighted=True, ranks=2 ** len(LAYOUTS[before]))
    found = rank_pool.run(run, after, STEPS, folder, None, 2, weighted=True, ranks=2 ** len(LAYOUTS[after]))
    for name, value in expected["state"].items():
        torch.testing.assert_close(found[0]["state"][name], value, rtol=1e-9, atol=1e-12)


def export(layout: str, folder: str) -> None:
    accelerator = accelerator_of(layout)
    accelerator.save_model(accelerator.prepare(gpt2()), folder)
    accelerator.end_training()


@pytest.mark.parametrize("layout", ["pp", pytest.param("pp x tp", marks=pytest.mark.slow)])
def test_an_exported_model_has_all_stages(rank_pool: RankPool, tmp_path: Any, layout: str) -> None:
    from safetensors.torch import load_file

    rank_pool.run(export, layout, str(tmp_path), ranks=2 ** len(LAYOUTS[layout]))
    found = load_file(tmp_path / "model.safetensors")
    model = gpt2()
    missing, unknown = model.load_state_dict(found, strict=False)
    assert not unknown
    assert missing == ["lm_head.weight"]
    for name, value in gpt2().state_dict().items():
        assert name in missing or found[name].equal(value), name
