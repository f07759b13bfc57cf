"""Checkpoints of a pipeline have the names of the user's own model, so that any layout resumes from them."""

from itertools import islice
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel_backends import PipelineParallelConfig
from accel_state import ParallelismConfig
from accel_testing import RankPool
from accel_testing.equivalence.causal_lms import VOCABULARY, tiny_gpt2, with_exact_loss

STEPS = 3


def gpt2() -> Any:
    return with_exact_loss(tiny_gpt2()).double()


def batches(first: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(0, VOCABULARY, (4, 12), generator=generator) for _ in range(4 * STEPS)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in drawn[first:]]


def accelerator_of(stages: int, **options: Any) -> Accelerator:
    if stages == 1:
        return Accelerator(cpu=True, **options)
    degrees = ParallelismConfig(pp_size=stages)
    return Accelerator(cpu=True, parallelism_config=degrees, strategy=PipelineParallelConfig(), **options)


def run(stages: int, steps: int, load: str | None, save: str | None, accumulated: int = 1) -> dict[str, Any]:
    """Trains from a checkpoint or from the beginning, and returns the losses and the full state."""
    accelerator = accelerator_of(stages, gradient_accumulation_steps=accumulated)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    first = 0
    if load is not None:
        accelerator.load_state(load)
        first = STEPS
    losses = []
    for batch in islice(batches(first), steps):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if save is not None:
        accelerator.save_state(save)
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return {"losses": losses, "state": state}


@pytest.mark.parametrize("accumulated", [1, 2], ids=["between windows", "inside a window"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
def test_training_goes_on_with_other_stages(
    rank_pool: RankPool, tmp_path: Any, before: int, after: int, accumulated: int
) -> None:
    expected = rank_pool.run(run, 1, 2 * STEPS, None, None, accumulated, ranks=1)[0]
    folder = str(tmp_path / "saved")
    rank_pool.run(run, before, STEPS, None, folder, accumulated, ranks=before)
    found = rank_pool.run(run, after, STEPS, folder, None, accumulated, ranks=after)
    for one in found:
        assert one["losses"] == pytest.approx(expected["losses"][STEPS:], rel=1e-10)
    assert found[0]["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        torch.testing.assert_close(found[0]["state"][name], value, rtol=1e-9, atol=1e-12)


def export(folder: str) -> None:
    accelerator = accelerator_of(2)
    accelerator.save_model(accelerator.prepare(gpt2()), folder)
    accelerator.end_training()


def test_an_exported_model_has_all_stages(rank_pool: RankPool, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    rank_pool.run(export, str(tmp_path), ranks=2)
    found = load_file(tmp_path / "model.safetensors")
    model = gpt2()
    missing, unknown = model.load_state_dict(found, strict=False)
    assert not unknown
    assert missing == ["lm_head.weight"]
    for name, value in gpt2().state_dict().items():
        assert name in missing or found[name].equal(value), name
