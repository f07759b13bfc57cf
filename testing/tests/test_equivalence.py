"""Correct layouts pass, and each way to be wrong is caught and named."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_testing.equivalence.equivalence import assert_equivalent
from accel_testing.equivalence.models import SyntheticData, SyntheticTokens, make_model
from accel_testing.equivalence.program import Program, momentum_sgd
from accel_testing.ranks.pool import RankPool

STEPS, SIZE = 6, 24


def mean_square(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def regression(name: str = "mlp", *, steps: int = STEPS, **options: Any) -> Program:
    x, y = SyntheticData(steps * SIZE, dtype=torch.float64)[:]
    batches = list(zip(x.split(SIZE), y.split(SIZE), strict=True))
    return Program(make_model(name, dtype=torch.float64), mean_square, batches, **options)


def full() -> Program:
    """Clipping that bites and a schedule that moves at every step."""
    return regression(clip=0.5, scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8))


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Summed over the tokens that count."""
    logits = model(batch["tokens"])[:, :-1]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch["tokens"][:, 1:], reduction="none")
    return (losses * batch["mask"]).sum()


def language() -> Program:
    """Losses per token, of sequences with different numbers of tokens."""
    tokens = SyntheticTokens(4 * SIZE).tokens
    lengths = torch.arange(4 * SIZE) * 7 % 15 + 1
    mask = (torch.arange(15) < lengths[:, None]).double()
    batches = [
        {"tokens": one, "mask": counts} for one, counts in zip(tokens.split(SIZE), mask.split(SIZE), strict=True)
    ]
    return Program(
        make_model("transformer", dtype=torch.float64),
        next_token,
        batches,
        weight=lambda batch: float(batch["mask"].sum()),
        clip=1.0,
    )


class Remembering(nn.Module):
    """A buffer that follows the weights, so it is the same on all ranks, and enters the output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("slow", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.slow.lerp_(self.linear.weight, 0.1)
        return self.linear(x) + x @ self.slow.T


def remembering() -> Program:
    torch.manual_seed(5)
    x, y = SyntheticData(STEPS * SIZE, dtype=torch.float64)[:]
    return Program(Remembering(), mean_square, list(zip(x.split(SIZE), y.split(SIZE), strict=True)))


LAYOUTS = ["single/acc=3", "ddp:2/acc=3/short", "ddp:2/acc=2/weighted", "ddp:4/acc=2/short"]
LESS = ["single", "ddp:2", "ddp:2/acc=3", "ddp:4/weighted"]  # each is a part of one above


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in LESS)])
@pytest.mark.sampled(1)
def test_layouts_equal_one_process(rank_pool: RankPool, layout: str) -> None:
    assert_equivalent(full, [layout], pool=rank_pool)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("ddp:2", marks=pytest.mark.slow),
        "ddp:2/acc=2",
        "ddp:2/acc=3/weighted",
        pytest.param("ddp:4/acc=2/weighted", marks=pytest.mark.slow),
    ],
)
def test_losses_per_token_equal_one_process(rank_pool: RankPool, layout: str) -> None:
    assert_equivalent(language, [layout], pool=rank_pool)


@pytest.mark.parametrize("name", ["frozen", "mlp"])
def test_adam_equals_one_process(rank_pool: RankPool, name: str) -> None:
    def program() -> Program:
        return regression(name, optimizer=lambda model: torch.optim.AdamW(trained(model), lr=0.01))

    assert_equivalent(program, ["ddp:2/acc=2"], pool=rank_pool)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precisions_stay_within_their_bounds(rank_pool: RankPool, precision: str) -> None:
    assert_equivalent(full, [f"single/{precision}", f"ddp:2/{precision}/acc=3"], pool=rank_pool)


def test_a_model_with_a_mask_trains_on_other_ranks_too(rank_pool: RankPool) -> None:
    def masked() -> Program:
        program = regression(steps=2)
        program.model.register_buffer("mask", torch.ones(SIZE, SIZE, dtype=torch.bool).tril(), persistent=False)
        return program

    assert_equivalent(masked, ["ddp:2"], precisions=["fp64"], pool=rank_pool)


def test_buffers_are_compared(rank_pool: RankPool) -> None:
    assert_equivalent(remembering, ["ddp:2"], pool=rank_pool)


# Mutations: what a layout could do wrong, done on purpose in its ranks.


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def wrong_divisor() -> AbstractContextManager[None]:
    """Gradients are summed over micro-batches, not averaged."""
    from accel_backends.core.backend import Backend

    return replaced(
        Backend, "backward", lambda original: lambda self, loss, scale=1.0, **kw: original(self, loss, **kw)
    )


def slightly_wrong_divisor() -> AbstractContextManager[None]:
    """One in ten thousand too much."""
    from accel_backends.core.backend import Backend

    def make(original: Any) -> Any:
        return lambda self, loss, scale=1.0, **kw: original(self, loss, scale=scale * 1.0001, **kw)

    return replaced(Backend, "backward", make)


def dropped_all_reduce() -> AbstractContextManager[None]:
    """Every rank keeps its gradients to itself."""
    from torch.nn.parallel import DistributedDataParallel

    def keep(_: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        kept: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        kept.set_result(bucket.buffer())
        return kept

    def make(original: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self.register_comm_hook(None, keep)

        return __init__

    return replaced(DistributedDataParallel, "__init__", make)


def skipped_clip() -> AbstractContextManager[None]:
    """The norm is computed and nothing is clipped."""
    from accel import Accelerator

    def make(original: Any) -> Any:
        return lambda self, parameters, max_norm, *rest, **kw: original(self, parameters, float("inf"), *rest, **kw)

    return replaced(Accelerator, "clip_grad_norm_", make)


def stale_buffer() -> AbstractContextManager[None]:
    """What forward writes into buffers is lost."""

    def make(original: Any) -> Any:
        def forward(self: Any, x: Tensor) -> Tensor:
            before = self.slow.clone()
            result = original(self, x)
            self.slow.copy_(before)
            return result

        return forward

    return replaced(Remembering, "forward", make)


def doubled_scheduler_step() -> AbstractContextManager[None]:
    """The schedule moves twice for each step."""
    from accel.scheduler import PreparedScheduler

    def make(original: Any) -> Any:
        def step(self: Any) -> None:
            original(self)
            original(self)

        return step

    return replaced(PreparedScheduler, "step", make)


def no_first_broadcast() -> AbstractContextManager[None]:
    """Ranks train from their own first weights."""
    from torch.nn.parallel import DistributedDataParallel

    def make(original: Any) -> Any:
        return lambda *args, **kw: original(*args, **{**kw, "init_sync": False})

    return replaced(DistributedDataParallel, "__init__", make)


def kept_gradients() -> AbstractContextManager[None]:
    """Gradients of one step are still there in the next."""
    from accel.optimizer import PreparedOptimizer

    return replaced(PreparedOptimizer, "zero_grad", lambda original: lambda self: None)


def summed_shards() -> AbstractContextManager[None]:
    """Sharded gradients are summed over ranks, not averaged."""
    from accel_backends import FSDPBackend

    def make(original: Any) -> Any:
        def wrap(self: Any, model: nn.Module) -> nn.Module:
            sharded = original(self, model)
            sharded.set_gradient_divide_factor(1.0)
            return sharded

        return wrap

    return replaced(FSDPBackend, "wrap", make)


@contextmanager
def stale_shards() -> Iterator[None]:
    """Parameters that were gathered once are computed with again, whatever the optimizer has done since."""
    from accel_backends.fsdp import backend, shard

    with (
        replaced(backend, "reshard", lambda original: lambda root, sharded: None),
        replaced(shard, "reshard", lambda original: lambda root, sharded: None),
    ):
        yield


def same_samples_everywhere() -> AbstractContextManager[None]:
    """Every rank reads the share of rank 0."""
    from accel_state.parallelism.config import DataShard, ParallelismConfig

    def make(original: Any) -> Any:
        return lambda self, topology: DataShard(0, original(self, topology).count)

    return replaced(ParallelismConfig, "data_shard", make)


@pytest.mark.parametrize(
    ("mutation", "program", "layout", "words"),
    [
        (wrong_divisor, full, "ddp:2/acc=3", r"at step 0:\n  the gradient norm is .* \(3 times it\)"),
        (slightly_wrong_divisor, full, "ddp:2/acc=3", r"at step 0:\n  the gradient norm is"),
        (dropped_all_reduce, full, "ddp:2", r"rank 1 has another first.weight and 3 more than rank 0"),
        (skipped_clip, full, "ddp:2", r"at step \d:\n  (first|second)\.\w+: off by .*\n  and 3 more tensors"),
        (stale_buffer, remembering, "ddp:2", r"at step 0:\n  slow: off by"),
        (
            doubled_scheduler_step,
            full,
            "ddp:2",
            r"at step 1:\n  the learning rates are \[0.032\d*\] instead of \[0.04\d*\]",
        ),
        (no_first_broadcast, full, "ddp:2", r"(?s)the loss is .*rank 1 has another"),
        (kept_gradients, full, "ddp:2", r"at step 1:\n  the gradient norm is"),
        (same_samples_everywhere, full, "ddp:2", r"at step 0:\n  the loss is"),
        (summed_shards, full, "fsdp:2", r"at step 0:\n  the gradient norm is .* \(2 times it\)"),
        (skipped_clip, full, "fsdp:2", r"at step \d:\n  (first|second)\.\w+: off by .*\n  and 3 more tensors"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.sampled(3)
def test_mutation_is_caught_and_named(
    rank_pool: RankPool, mutation: Any, program: Any, layout: str, words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        assert_equivalent(program, [layout], precisions=["fp64"], pool=rank_pool, around=mutation)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_coarse_mutation_is_caught_in_lower_precisions_too(rank_pool: RankPool, precision: str) -> None:
    with pytest.raises(AssertionError, match=r"the gradient norm is"):
        assert_equivalent(full, [f"ddp:2/{precision}/acc=3"], pool=rank_pool, around=wrong_divisor)


def test_model_that_depends_on_its_batch_is_not_equivalent(rank_pool: RankPool) -> None:
    """Batch norm without synchronisation sees half a batch on each of two ranks."""
    with pytest.raises(AssertionError, match=r"(?s)ddp:2/fp64 +\S+ +1e-10  DIFFERENT.*norm.running_"):
        assert_equivalent(partial(regression, "buffers"), ["ddp:2"], precisions=["fp64"], pool=rank_pool)


def test_layout_that_cannot_run_is_reported_beside_those_that_can(rank_pool: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"(?s)ddp:2/fp64 .* ok\n.*could not run.*no backend 'pdd'"):
        assert_equivalent(full, ["ddp:2", "pdd:2"], precisions=["fp64"], pool=rank_pool)


def test_batch_that_does_not_divide_says_what_would(rank_pool: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"a global batch of 24 samples does not divide into 5 .* multiple of 10"):
        assert_equivalent(full, ["ddp:2/acc=5"], precisions=["fp64"], pool=rank_pool)


def test_default_optimizer_does_not_hide_scales() -> None:
    assert isinstance(momentum_sgd(make_model()), torch.optim.SGD)
