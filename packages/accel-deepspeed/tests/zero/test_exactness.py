"""Loops that train as one process does at every stage of ZeRO, or are refused by name on all ranks."""

import gc
import math
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Bundle, Run, load_backend
from accel_deepspeed import DeepSpeedPlugin
from accel_precision import PrecisionPolicy
from accel_state import Session
from accel_state.errors import BackendError, PrepareError
from accel_testing.programs.runs import run_script

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

CASES = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "cpu"), (3, "cpu")]
STAGES = [0, 1, 2, 3]
BLOCKS = 3
USE = (0, 1, 2)


class Blocks(nn.Module):
    """Residual blocks of which each call uses some, in a given order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(BLOCKS))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, use: tuple[int, ...]) -> torch.Tensor:
        for number in use:
            x = x + torch.tanh(self.blocks[number](x))
        result: torch.Tensor = self.head(x)
        return result


def loss_of(model: nn.Module, rank: int, step: int, use: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    loss: torch.Tensor = model(torch.randn(4, 6, generator=generator), use).pow(2).mean()
    return loss


@dataclass
class Beside:
    """An engine on two ranks, and the same model trained by one process on what both ranks see."""

    backend: Any
    engine: Any
    optimizer: Any
    reference: nn.Module
    plain: torch.optim.Optimizer

    def backward(self, rank: int, step: int, *uses: tuple[int, ...]) -> None:
        """One micro-batch of each rank, which uses its own of ``uses``."""
        self.backend.backward(loss_of(self.engine, rank, step, uses[rank]))
        (sum(loss_of(self.reference, r, step, use) for r, use in enumerate(uses)) / len(uses)).backward()  # type: ignore[union-attr]

    def step(self) -> None:
        """Steps both."""
        assert self.backend.step(self.optimizer)
        self.plain.step()
        self.plain.zero_grad()

    def train(self, rank: int) -> None:
        """Two steps of one micro-batch, which uses all blocks."""
        for step in range(2):
            self.backward(rank, step, USE, USE)
            self.step()

    def check(self) -> None:
        """The weights are those of the one process."""
        state = self.backend.states.full_model(self.engine, main_only=False)
        for name, value in self.reference.state_dict().items():
            assert (state[name] - value).norm() <= 1e-5 * value.norm(), name


@contextmanager
def beside(stage: int, **zero: Any) -> Iterator[Beside]:
    with Session.open(cpu=True) as session:
        options = {"zero_optimization": {"stage": stage, **zero}, "zero_force_ds_cpu_optimizer": False}
        backend = load_backend("deepspeed")(
            Run(session, PrecisionPolicy.parse("no", device_type="cpu")),
            DeepSpeedPlugin.build({"hf_ds_config": options}),
        )
        try:
            model, reference = Blocks(), Blocks()
            bundle = backend.prepare(Bundle([model], [momentum(model)]))
            yield Beside(backend, bundle.models[0], bundle.optimizers[0], reference, momentum(reference))
        finally:
            backend.close()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def offloaded(device: str) -> dict[str, Any]:
    return {} if device == "none" else {"offload_optimizer": {"device": device}}


# Each micro-batch of four windows of two: block 1 comes late, not at all, and early.
WINDOWS = [((0, 1, 2), (0, 1, 2)), ((0, 2), (0, 1, 2)), ((0, 2), (2,)), ((0, 1), (0, 2))]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "offload"), CASES)
@pytest.mark.sampled(2)
def test_a_block_that_all_ranks_leave_out_is_not_stepped(rank: int, world_size: int, stage: int, offload: str) -> None:
    with beside(stage, **offloaded(offload)) as pair:
        for window, uses in enumerate(WINDOWS):
            for micro, use in enumerate(uses):
                pair.backward(rank, 2 * window + micro, use, use)
            pair.step()
        pair.check()


# Which blocks each rank uses in the micro-batches of three windows of two.
BLOCKS_APART = [
    (((0, 1, 2), (0, 2)), ((1,), (0, 1, 2))),
    (((0,), (2,)), ((2, 1, 0), (0, 1, 2))),
    (((1, 2), (0, 2)), ((0, 1), (0, 1))),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket", [10, 500_000])
@pytest.mark.parametrize(("stage", "offload"), [case for case in CASES if case[0] < 3])
@pytest.mark.sampled(2)
def test_ranks_that_skip_different_blocks_train_as_one_process(
    rank: int, world_size: int, stage: int, offload: str, bucket: int
) -> None:
    """Also where every gradient is a bucket of its own."""
    with beside(stage, **offloaded(offload), reduce_bucket_size=bucket) as pair:
        for window, uses in enumerate(BLOCKS_APART):
            for micro, use in enumerate(uses):
                pair.backward(rank, 2 * window + micro, *use)
            pair.step()
        pair.check()


PREPARED = """
import sys

from accel_backends import Bundle, Run, load_backend
from accel_deepspeed import DeepSpeedPlugin
from accel_precision import PrecisionPolicy
from accel_state import Session
from test_exactness import Blocks, loss_of, momentum

session = Session.open(cpu=True)
plugin = DeepSpeedPlugin.build({"zero_stage": int(sys.argv[1])})
backend = load_backend("deepspeed")(Run(session, PrecisionPolicy.parse("no", device_type="cpu")), plugin)
model = Blocks()
bundle = backend.prepare(Bundle([model], [momentum(model)]))
"""


def run_prepared(program: str, stage: int, *arguments: str, folder: Path) -> Any:
    """Runs a program on two ranks after ``PREPARED``."""
    script = folder / "program.py"
    script.write_text(f"import sys\n\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{PREPARED}{program}")
    return run_script(script, str(stage), *arguments, ranks=2, timeout=90)


APART = """
uses = {"skip": [(0, 2), (1, 2)], "less": [(0,), (0, 1)]}[sys.argv[2]]
for step in range(4):
    backend.backward(loss_of(bundle.models[0], session.rank, step, (0, 1, 2) if step < 2 else uses[session.rank]))
    backend.step(bundle.optimizers[0])
    print("stepped", step)
"""


@pytest.mark.parametrize("how", ["skip", pytest.param("less", marks=pytest.mark.slow)])
def test_stage_3_names_the_modules_that_only_some_ranks_gather(how: str, tmp_path: Path) -> None:
    run = run_prepared(APART, 3, how, folder=tmp_path).check_failed()
    assert "stepped 1" in run.output
    assert "stepped 3" not in run.output
    assert re.search(r"CollectiveMismatchError(.|\n)*gather\(blocks\.[01]", run.output)


ALONE = """
session.wait_for_everyone()
if session.rank == 0:
    print(len(backend.states.full_model(bundle.models[0])), "weights")
session.wait_for_everyone()
session.close()
"""


@pytest.mark.ranks(2)
def test_full_weights_for_one_rank_only_are_there_where_ranks_have_no_parts(rank: int, world_size: int) -> None:
    with beside(0) as pair:
        assert rank == 1 or len(pair.backend.states.full_model(pair.engine)) == 8


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.slow
def test_full_weights_for_one_rank_only_are_refused_where_ranks_have_parts(stage: int, tmp_path: Path) -> None:
    run = run_prepared(ALONE, stage, folder=tmp_path)
    assert re.search(r"CollectiveMismatchError(.|\n)*rank 0: get_state_dict", run.check_failed().output)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_a_norm_has_settled_are_scaled_without_another_backward(
    rank: int, world_size: int, stage: int
) -> None:
    with beside(stage) as pair:
        gradients, parameters = pair.backend.gradients, list(pair.engine.parameters())
        norms = []
        for factor in (1.0, 0.5):
            pair.backend.backward(loss_of(pair.engine, rank, 0, USE))
            gradients.norm_so_far(parameters, [pair.engine], 2.0)
            gradients.scale([pair.engine], factor)
            norms.append(float(gradients.clip_norm(parameters, 1e9, 2.0, error_if_nonfinite=False)))
            gradients.drop(pair.engine)
        assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_by_hand_is_refused_and_training_goes_on(rank: int, world_size: int, stage: int) -> None:
    with beside(stage) as pair:
        with pytest.raises(BackendError, match=r"by hand.*accelerator\.backward"):
            loss_of(pair.engine, rank, 0, USE).backward()
        pair.train(rank)
        pair.check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_second_backward_by_hand_through_one_graph_is_refused(rank: int, world_size: int, stage: int) -> None:
    with beside(stage) as pair:
        loss = loss_of(pair.engine, rank, 0, USE)
        pair.backend.backward(loss, retain_graph=True)
        with pytest.raises(BackendError, match="by hand"):
            loss.backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_two_backwards_through_one_forward_add_up_or_are_refused(rank: int, world_size: int, stage: int) -> None:
    with beside(stage) as pair:
        for step in range(2):
            loss = loss_of(pair.engine, rank, step, USE)
            pair.backend.backward(loss, retain_graph=True)
            if stage == 3:
                with pytest.raises(BackendError, match="second backward through one forward"):
                    pair.backend.backward(loss.square())
                return
            pair.backend.backward(loss.square())
            losses = [loss_of(pair.reference, r, step, USE) for r in range(2)]
            (sum(one + one.square() for one in losses) / 2).backward()  # type: ignore[union-attr]
            pair.step()
        pair.check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_penalty_is_exact_or_refused(rank: int, world_size: int, stage: int) -> None:
    def penalized(model: nn.Module, r: int, step: int) -> torch.Tensor:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + r)).requires_grad_()
        out = model(x, USE)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss: torch.Tensor = out.pow(2).mean() + slope.pow(2).mean()
        return loss

    with beside(stage) as pair:
        for step in range(3):
            if stage == 3:
                with pytest.raises(BackendError, match=r"create_graph=True.*stage 3"):
                    penalized(pair.engine, rank, step)
                return
            pair.backend.backward(penalized(pair.engine, rank, step))
            (sum(penalized(pair.reference, r, step) for r in range(2)) / 2).backward()  # type: ignore[union-attr]
            pair.step()
        pair.check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_is_thawed_after_prepare_is_refused(rank: int, world_size: int, stage: int) -> None:
    with beside(stage) as pair:
        model = Blocks()
        model.blocks[1].requires_grad_(False)
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
        bundle = pair.backend.prepare(Bundle([model], [optimizer]))
        (engine,), (inner,) = bundle.models, bundle.optimizers
        for step in range(2):
            pair.backend.backward(loss_of(engine, rank, step, USE))
            pair.backend.step(inner)
        engine.module.blocks[1].requires_grad_(True)
        pair.backend.backward(loss_of(engine, rank, 2, USE))
        with pytest.raises(BackendError, match=r"blocks\.1\.weight, blocks\.1\.bias: frozen when"):
            pair.backend.step(inner)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_edited_in_place_count_or_are_refused(rank: int, world_size: int, stage: int) -> None:
    with beside(stage) as pair:
        pair.backward(rank, 0, USE, USE)
        for parameter in pair.reference.parameters():
            parameter.grad *= 0.5
        for name, parameter in pair.engine.module.named_parameters():
            if stage < 2:
                parameter.grad *= 0.5
                continue
            with pytest.raises(BackendError, match=rf"{re.escape(name)}\.grad was read after backward"):
                _ = parameter.grad
        if stage >= 2:
            head = pair.engine.module.head.bias
            head.grad = torch.zeros_like(head)
            with pytest.raises(BackendError, match=r"head\.bias\.grad was set after backward"):
                pair.backend.step(pair.optimizer)
            return
        pair.step()
        pair.check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_hooks_of_parameters_change_what_is_stepped_with(rank: int, world_size: int, stage: int) -> None:
    """Those of ``register_hook`` at every stage; a late one that looks at ``.grad`` not where it is gone by then."""

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    with beside(stage) as pair:
        for model in (pair.engine.module, pair.reference):
            model.head.weight.register_hook(lambda gradient: 3 * gradient)
        pair.train(rank)
        pair.check()
        for model in (pair.engine.module, pair.reference):
            model.head.weight.register_post_accumulate_grad_hook(halve)
        pair.backward(rank, 3, USE, USE)
        if stage >= 2:
            with pytest.raises(BackendError, match=r"head\.weight got a hook"):
                pair.backend.step(pair.optimizer)
            return
        pair.step()
        pair.check()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_hook_that_is_removed_after_prepare_stops_no_step(rank: int, world_size: int, stage: int) -> None:
    with beside(stage) as pair:
        model = Blocks()
        handle = model.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        bundle = pair.backend.prepare(Bundle([model], [momentum(model)]))
        handle.remove()
        pair.backend.backward(loss_of(bundle.models[0], rank, 0, USE))
        assert pair.backend.step(bundle.optimizers[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_the_norm_of_an_open_window_is_without_the_loss_scale(rank: int, world_size: int, stage: int) -> None:
    """A scale of fp16, which CPUs do not compute in, set by hand."""
    with beside(stage) as pair:
        pair.engine.optimizer.loss_scaler.cur_scale = 8.0
        pair.backend.backward(loss_of(pair.engine, rank, 0, USE))
        parameters = list(pair.engine.parameters())
        norm = pair.backend.gradients.norm_so_far(parameters, [pair.engine])
        torch.testing.assert_close(norm, pair.backend.gradients.clip_norm(parameters, math.inf))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_reduced_gradients_are_read_by_name(rank: int, world_size: int, stage: int) -> None:
    with beside(stage) as pair:
        for step in range(2):
            pair.backward(rank, step, USE, USE)
            pair.backend.gradients.clip_norm(pair.engine.parameters(), math.inf)
            held = pair.backend.gradients.unreduced(pair.engine)
            for name, parameter in pair.reference.named_parameters():
                torch.testing.assert_close(held[name], parameter.grad, rtol=1e-5, atol=1e-7)
            pair.step()
        pair.check()


class TwoSteps(torch.optim.SGD):
    """Moves, and moves back with other gradients, as SAM does."""

    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", STAGES)
def test_optimizers_and_layers_that_an_engine_cannot_step_are_refused(rank: int, world_size: int, stage: int) -> None:
    with beside(stage) as pair:
        model = Blocks()
        with pytest.raises(PrepareError, match="TwoSteps computes gradients twice"):
            pair.backend.prepare(Bundle([model], [TwoSteps(model.parameters(), lr=0.1)]))
        with pytest.raises(PrepareError, match="LBFGS evaluates a closure"):
            pair.backend.prepare(Bundle([model], [torch.optim.LBFGS(model.parameters())]))
        words = nn.Sequential(nn.Embedding(4, 2, sparse=True))
        with pytest.raises(PrepareError, match="0 is an Embedding with sparse=True"):
            pair.backend.prepare(Bundle([words], [torch.optim.SGD(words.parameters(), lr=0.1)]))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", STAGES)
def test_forwards_without_backward_leave_no_graph_behind(rank: int, world_size: int, stage: int) -> None:
    class Witness(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            seen.append(weakref.ref(held := {1}))
            ctx.held = held  # type: ignore[attr-defined]
            return x.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient

    seen: list[weakref.ref[set[int]]] = []
    with beside(stage) as pair:
        handle = pair.engine.module.head.register_forward_hook(lambda module, inputs, output: Witness.apply(output))
        for step in range(5):
            loss_of(pair.engine, rank, step, USE)
        handle.remove()
        gc.collect()
        assert len(seen) == 5
        assert not any(one() for one in seen)
