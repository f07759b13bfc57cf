"""Many ranks compute what one process computes on the same global batches."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel import Accelerator, DistributedDataParallelKwargs, GradientAccumulationPlugin, GradScalerKwargs
from accel.loop.accumulation import normalise, weighted_scale
from accel.loop.window import AccumulationWindow
from accel_backends.ops.clip import scale_gradients
from accel_state.errors import ConfigError

STEPS, GLOBAL = 20, 12
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


class Net(nn.Module):
    """Two layers with a tied weight and a norm, so that scales and names matter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.out = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.second(torch.tanh(self.norm(self.first(x)))))


def make(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    model = Net().to(dtype)
    x = torch.randn(STEPS, GLOBAL, 6, dtype=dtype)
    return model, x, x.sum(-1, keepdim=True).sin()


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def reference(dtype: torch.dtype, optimizer_name: str, clip: float | None) -> list[torch.Tensor]:
    """Plain PyTorch on whole global batches."""
    model, xs, ys = make(dtype)
    optimizer = OPTIMIZERS[optimizer_name](model)
    for x, y in zip(xs, ys, strict=True):
        nn.functional.mse_loss(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def assert_close(model: nn.Module, expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    for (name, mine), other in zip(model.named_parameters(), expected, strict=True):
        distance = ((mine - other).abs().max() / other.abs().max()).item()
        assert distance <= TOLERANCE[dtype], f"{name} is {distance:.2e} away"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer_name", ["sgd", "adam"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.sampled(2)
def test_ddp_equals_one_process(
    rank: int, world_size: int, dtype: torch.dtype, accumulate: int, optimizer_name: str
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model, xs, ys = make(dtype)
    model, optimizer = accelerator.prepare(model, OPTIMIZERS[optimizer_name](model))
    assert isinstance(model, DistributedDataParallel)
    for x, y in zip(xs, ys, strict=True):
        parts_x, parts_y = x.chunk(accumulate * world_size), y.chunk(accumulate * world_size)
        for micro in range(accumulate):
            with accelerator.accumulate(model):
                index = micro * world_size + rank
                accelerator.backward(nn.functional.mse_loss(model(parts_x[index]), parts_y[index]))
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    assert_close(model, reference(dtype, optimizer_name, 0.5), dtype)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("counts", [((3, 2), (1, 6)), ((0, 5), (4, 3)), ((0, 0), (7, 5)), ((12, 0), (0, 0))])
@pytest.mark.sampled(1)
def test_weighted_micro_batches_of_any_size_equal_one_batch(
    rank: int, world_size: int, counts: tuple[tuple[int, int], ...]
) -> None:
    """``counts[micro][rank]`` samples."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(counts))
    model, xs, ys = make(torch.float64)
    model, optimizer = accelerator.prepare(model, OPTIMIZERS["sgd"](model))
    for x, y in zip(xs, ys, strict=True):
        start = 0
        for ranks in counts:
            begin = start + sum(ranks[:rank])
            rows = slice(begin, begin + ranks[rank])
            start += sum(ranks)
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x[rows]), y[rows], reduction="sum")
                accelerator.backward(loss, weight=ranks[rank])
                optimizer.step()
                optimizer.zero_grad()
    assert_close(model, reference(torch.float64, "sgd", None), torch.float64)


@pytest.mark.ranks(2)
def test_a_short_last_window_is_one_batch_of_what_it_holds(rank: int, world_size: int) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, xs, ys = make(torch.float64)
    x, y = xs.flatten(0, 1)[:20], ys.flatten(0, 1)[:20]
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, OPTIMIZERS["sgd"](model), loader)
    for mine, target in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(mine), target))
            optimizer.step()
            optimizer.zero_grad()
    plain = make(torch.float64)[0]
    stepper = OPTIMIZERS["sgd"](plain)
    for rows in (slice(0, 12), slice(12, 20)):
        nn.functional.mse_loss(plain(x[rows]), y[rows]).backward()
        stepper.step()
        stepper.zero_grad()
    assert_close(model, [parameter.detach() for parameter in plain.parameters()], torch.float64)


@pytest.mark.ranks(2)
def test_gradients_of_the_window_stay_local_until_it_ends(rank: int, world_size: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(2, 1, bias=False))
    for position in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 2), float(rank + 1))).sum())
        same = bool(accelerator.gather(model.module.weight.grad).unique().numel() == 1)
        assert same == (position == 1)


@pytest.mark.ranks(2)
def test_sync_each_batch_reduces_every_time(rank: int, world_size: int) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = accelerator.prepare(nn.Linear(2, 1, bias=False))
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 2), float(rank + 1))).sum())
        assert accelerator.gather(model.module.weight.grad).unique().numel() == 1


@pytest.mark.ranks(2)
def test_overflow_on_one_rank_skips_the_step_on_all(rank: int, world_size: int) -> None:
    scaling = GradScalerKwargs(init_scale=1024.0)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[scaling])
    model = nn.Linear(4, 1)
    scheduler_of = torch.optim.lr_scheduler.StepLR
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler_of(optimizer, 1))
    skipped = []
    for bad in (False, True, False):
        before = model.module.weight.detach().clone()
        loss = model(torch.ones(2, 4)).square().mean()
        accelerator.backward(loss * (float("inf") if bad and rank == 1 else 1.0))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        assert torch.equal(before, model.module.weight) == bad
        assert accelerator.gather(model.module.weight.detach()).unique(dim=0).shape[0] == 1
    if accelerator.backend.loss_scale is not None:
        accelerator.backend.loss_scale.update()
    assert skipped == [False, True, False]
    assert accelerator.scaler.current == 1024.0 / 2
    assert scheduler.scheduler.last_epoch == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [None, "ddp"])
def test_options_of_ddp_reach_it_however_it_was_chosen(rank: int, strategy: str | None) -> None:
    options = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, strategy=strategy, kwargs_handlers=[options])
    assert accelerator.prepare(nn.Linear(2, 1)).find_unused_parameters


@pytest.mark.ranks(2)
def test_options_of_ddp_beside_another_strategy_are_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match="the strategy is 'fsdp'"):
        Accelerator(cpu=True, strategy="fsdp", kwargs_handlers=[DistributedDataParallelKwargs()])


@pytest.mark.ranks(4)
def test_weights_are_summed_over_the_ranks_whose_gradients_are_averaged(rank: int) -> None:
    """Two pairs of ranks train apart: each pair divides by its own weights."""
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    class Pair:
        ranks = 2
        group = groups[rank // 2]
        scale = staticmethod(scale_gradients)

    window, model = AccumulationWindow(), nn.Linear(1, 1, bias=False)
    scale = weighted_scale(window, 1.0 + rank, Pair(), torch.device("cpu"))
    (model(torch.ones(1, 1)).sum() * scale).backward()
    normalise(window, [model], Pair())
    assert model.weight.grad.item() == pytest.approx(2 / (3 if rank < 2 else 7))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp1"])
def test_weights_of_two_models_in_one_window_divide_the_gradients_of_both(rank: int, strategy: str) -> None:
    """Each model has a backward of its own, so that the first one of the last micro-batch divides what waits."""
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    rows = [[torch.randn(2 + micro + one, 3, dtype=torch.float64) for one in range(2)] for micro in range(2)]
    own = [torch.nn.Linear(3, 2, bias=False, dtype=torch.float64) for _ in range(2)]
    expected = [deepcopy(model) for model in own]
    for model in expected:
        (sum(model(x).square().sum() for micro in rows for x in micro) / (2 * 12)).backward()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in own]
    first, second, *optimizers = accelerator.prepare(*own, *optimizers)
    for micro in rows:
        with accelerator.accumulate(first, second):
            for model in (first, second):
                accelerator.backward(model(micro[rank]).square().sum(), weight=len(micro[rank]))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for model, one in zip((first, second), expected, strict=True):
        state = accelerator.get_state_dict(model)
        if rank == 0:
            assert torch.allclose(state["weight"], one.weight - one.weight.grad, rtol=0, atol=1e-12)
    accelerator.end_training()
