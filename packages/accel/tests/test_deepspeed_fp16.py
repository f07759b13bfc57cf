"""DeepSpeed in fp16: the loss scale that it keeps, steps left out, and both through checkpoints.

DeepSpeed refuses fp16 on processors without instructions for it, though torch computes it there. Here it is let.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, GradScalerKwargs
from accel_testing import RankPool
from accel_testing.equivalence.compare import assert_close_state
from accel_testing.equivalence.equivalence import assert_equivalent
from accel_testing.equivalence.program import Program
from accel_testing.equivalence.programs import adamw, adamw_program, language_program

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

STAGES = [0, 1, 2, 3]


@contextmanager
def fp16_on_the_cpu() -> Iterator[None]:
    """Within it, DeepSpeed takes fp16 on any processor."""
    from accel_deepspeed.library import library

    library("cpu")
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    before = CPU_Accelerator.is_fp16_supported
    CPU_Accelerator.is_fp16_supported = lambda self: True
    try:
        yield
    finally:
        CPU_Accelerator.is_fp16_supported = before


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("ds0:2/acc=3", marks=pytest.mark.slow),
        "ds1:2/acc=3/weighted",
        pytest.param("ds2:2/acc=3", marks=pytest.mark.slow),
        "ds3:2/acc=3/short",
    ],
)
def test_training_in_fp16_equals_one_process(rank_pool: RankPool, layout: str) -> None:
    assert_equivalent(adamw_program, [f"{layout}/fp16"], pool=rank_pool, around=fp16_on_the_cpu)


def language_in_parts() -> Program:
    """The usual language model, with the layers that ranks share named by an attribute."""
    program = language_program(adamw)
    program.model._tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # type: ignore[assignment]
    return program


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("ds1:2/acc=3", marks=pytest.mark.slow),
        pytest.param("ds2:4/acc=3", marks=pytest.mark.slow),
        "ds3:2/acc=3/short",
    ],
)
@pytest.mark.slow
def test_tensor_parallel_ranks_in_fp16_equal_one_process(rank_pool: RankPool, layout: str) -> None:
    assert_equivalent(language_in_parts, [f"{layout}/fp16/tp=2"], pool=rank_pool, around=fp16_on_the_cpu)


class Run:
    """A small model in training, whose gradients overflow in step 2."""

    def __init__(self, strategy: Any, rank: int, **scale: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.rank = rank
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision="fp16",
            strategy=strategy,
            kwargs_handlers=[GradScalerKwargs(**{"init_scale": 1024.0, "growth_interval": 3, **scale})],
        )
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        self.skipped: list[int] = []

    def train(self, start: int, stop: int) -> "Run":
        for step in range(start, stop):
            generator = torch.Generator().manual_seed(10 * step + self.rank)
            loss = self.model(torch.randn(4, 5, generator=generator)).pow(2).mean()
            self.accelerator.backward(loss * (1e9 if step == 2 else 1.0))
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.accelerator.optimizer_step_was_skipped:
                self.skipped.append(step)
        return self

    @property
    def scale(self) -> dict[str, Any]:
        (scale,) = self.accelerator.backend.states.loss_scales
        return {key: scale.state_dict()[key] for key in ("scale", "growth_tracker")}

    def end(self) -> dict[str, torch.Tensor]:
        state = {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}
        self.accelerator.free_memory()
        self.accelerator.end_training()
        return state


def zero(stage: int) -> Any:
    from accel_deepspeed import DeepSpeedPlugin

    return DeepSpeedPlugin(zero_stage=stage)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.sampled(1)
def test_the_loss_scale_and_skipped_steps_go_on_after_a_checkpoint(rank: int, stage: int, tmp_path: Path) -> None:
    with fp16_on_the_cpu():
        first = Run(zero(stage), rank).train(0, 5)
        assert first.skipped == [2]
        assert first.scale == {"scale": 512.0, "growth_tracker": 2}
        first.accelerator.save_state(tmp_path / "state")
        expected, scale, counts = first.train(5, 9), first.scale, first.accelerator.backend.states.counts()
        assert scale["scale"] == 1024.0  # it has grown again
        second = Run(zero(stage), rank)
        second.accelerator.load_state(tmp_path / "state")
        second.train(5, 9)
        assert (second.scale, second.accelerator.backend.states.counts()) == (scale, counts)
        assert counts[0]["skipped_steps"] == 1
        before, after = expected.end(), second.end()
        if rank == 0:
            assert_close_state(after, before, rtol=0, atol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("chain", [(zero, "ddp"), ("ddp", zero)], ids=["to ddp", "from ddp"])
def test_the_loss_scale_goes_to_other_backends_and_back(rank: int, chain: tuple[Any, Any], tmp_path: Path) -> None:
    before, after = (one(2) if callable(one) else one for one in chain)
    with fp16_on_the_cpu():
        first = Run(before, rank).train(0, 4)
        first.accelerator.save_state(tmp_path / "state")
        second = Run(after, rank)
        second.accelerator.load_state(tmp_path / "state")
        assert second.scale == first.scale == {"scale": 512.0, "growth_tracker": 1}
        assert second.train(4, 6).skipped == []
        for run in (first, second):
            run.end()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_the_loss_scale_of_a_folder_grows_when_it_would_have_grown(rank: int, stage: int, tmp_path: Path) -> None:
    with fp16_on_the_cpu():
        first = Run(zero(stage), rank).train(0, 6)
        assert first.scale == {"scale": 512.0, "growth_tracker": 3}  # grows at the next step
        first.accelerator.export_deepspeed(tmp_path / "folder", tag="six")
        second = Run(zero(2), rank)
        second.accelerator.import_deepspeed(tmp_path / "folder")
        assert second.scale == first.scale
        for run in (first, second):
            run.end()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_scale_that_is_off_or_static_stays(rank: int, stage: int) -> None:
    with fp16_on_the_cpu():
        for options, scale in (({"enabled": False}, 1.0), ({"growth_factor": 1.0, "backoff_factor": 1.0}, 1024.0)):
            run = Run(zero(stage), rank, **options).train(3, 9)
            assert (run.skipped, run.scale["scale"]) == ([], scale)
            run.end()


@pytest.mark.ranks(1)
def test_factors_that_deepspeed_does_not_have_are_refused(rank: int) -> None:
    from accel_state.errors import ConfigError

    with fp16_on_the_cpu(), pytest.raises(ConfigError, match=r"growth_factor=4.0 and .* doubles and halves"):
        Run(zero(2), rank, growth_factor=4.0)


@pytest.mark.ranks(1)
def test_a_processor_that_deepspeed_knows_no_fp16_on_is_told(rank: int) -> None:
    from accel_deepspeed.library import library
    from accel_state.errors import PrepareError

    library("cpu")
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().is_fp16_supported():
        pytest.skip("this processor has fp16")
    with pytest.raises(PrepareError, match="fp16 is not supported"):
        Run(zero(2), rank)
