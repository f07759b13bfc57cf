"""Frames of accel between a call of the user and torch or the operating system."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, DistributedDataParallelKwargs
from accel_ckpt.format.manifest import MANIFEST

MOST = {"backward": 3, "step": 2, "save_state": 8}


def frames_of_accel() -> list[str]:
    """The functions of accel below this one, outermost first, up to the test itself."""
    names: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals["__name__"] != "__main__":
        module = str(frame.f_globals["__name__"])
        if module.partition(".")[0].startswith("accel") and not module.startswith("accel_testing"):
            names.insert(0, f"{module}.{frame.f_code.co_qualname}")
        frame = frame.f_back  # type: ignore[assignment]
    return names


def trained(**options: Any) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Linear(2, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def seen_in_backward(accelerator: Accelerator, model: nn.Module) -> list[str]:
    seen: list[list[str]] = []
    with accelerator.accumulate(model):
        loss = model(torch.ones(1, 2)).sum()
        loss.register_hook(lambda gradient: seen.append(frames_of_accel()))
        accelerator.backward(loss)
    return seen[0]


@pytest.mark.parametrize("steps", [1, 2])
def test_backward_passes_three_frames(steps: int) -> None:
    accelerator, model, _ = trained(gradient_accumulation_steps=steps)
    assert 1 <= len(seen_in_backward(accelerator, model)) <= MOST["backward"]


@pytest.mark.ranks(2)
def test_backward_passes_three_frames_with_ddp(rank: int) -> None:
    accelerator, model, _ = trained(kwargs_handlers=[DistributedDataParallelKwargs()])
    assert 1 <= len(seen_in_backward(accelerator, model)) <= MOST["backward"]


def test_an_optimizer_step_passes_two_frames() -> None:
    accelerator, model, optimizer = trained()
    seen: list[list[str]] = []
    optimizer.optimizer.register_step_pre_hook(lambda *_: seen.append(frames_of_accel()))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert 1 <= len(seen[0]) <= MOST["step"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_save_state_passes_eight_frames_to_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, optimizer = trained()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    seen: list[list[str]] = []
    write = os.pwritev

    def watched(handle: int, *args: Any) -> int:
        if Path(f"/proc/self/fd/{handle}").readlink().name != MANIFEST:  # which is sealed after all else
            seen.append(frames_of_accel())
        return write(handle, *args)

    monkeypatch.setattr(os, "pwritev", watched)
    accelerator.save_state(tmp_path / "one")
    assert len(seen) >= 2, "the tree and the tensors"
    assert max(map(len, seen)) <= MOST["save_state"], max(seen, key=len)
