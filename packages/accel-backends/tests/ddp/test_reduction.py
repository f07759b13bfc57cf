"""Gradients of DDP models of which a step uses a part: those of one process on all the samples, on every rank."""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_backends import Bundle, DDPBackend, DDPConfig, Run
from accel_precision import PrecisionPolicy
from accel_state import BackendError, Session

WIDTH, STEPS, RANKS = 4, 6, 2
Chosen = Callable[[int, int, int], tuple[int, ...]]
"""The blocks that a rank uses in a micro-batch of a step."""

CHOICES: dict[str, Chosen] = {
    "the same part never": lambda step, micro, rank: (0, 2),
    "a part in no micro-batch of a step": lambda step, micro, rank: (0, 1, 2) if step % 2 else (0, 2),
    "a part not in the last micro-batch": lambda step, micro, rank: (0, 2) if micro else (0, 1, 2),
    "a part not on one rank": lambda step, micro, rank: (0, 2) if rank else (0, 1, 2),
    "an expert for each rank": lambda step, micro, rank: (0, 1 + (rank + step) % 2),
    "an expert for each micro-batch and rank": lambda step, micro, rank: (0, 1 + (rank + step + micro) % 2),
    "a part on another rank in another step": lambda step, micro, rank: (1,) if (step + rank) % 3 else (0, 2),
}


class Blocks(nn.Module):
    """Layers of which each call uses those that its argument names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        for number in chosen:
            x = torch.tanh(self.blocks[number](x))
        return x


def make() -> Blocks:
    torch.manual_seed(0)
    return Blocks().double()


def opened(**options: Any) -> DDPBackend:
    policy = PrecisionPolicy.parse("no", device_type="cpu")
    return DDPBackend(Run(Session.open(device="cpu"), policy), DDPConfig(**options))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Moves a parameter whose gradient is zero, and leaves one without gradient."""
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def rows(step: int, micro: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + micro)
    return torch.randn(RANKS, 3, WIDTH, generator=draw, dtype=torch.float64)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def assert_equal(model: nn.Module, reference: nn.Module) -> None:
    mine, expected = flat(model), flat(reference)
    assert float((mine - expected).norm() / expected.norm()) <= 1e-10
    everywhere = [torch.zeros_like(mine) for _ in range(RANKS)]
    dist.all_gather(everywhere, mine)
    assert all(torch.equal(mine, other) for other in everywhere)


def prepared(make_model: Callable[[], nn.Module] = make, **options: Any) -> tuple[DDPBackend, Any, Any, nn.Module, Any]:
    """A backend, its model and optimizer, and those of one process."""
    ddp, model, reference = opened(**options), make_model(), make_model()
    own, other = adam(model), adam(reference)
    return ddp, ddp.prepare(Bundle([model], [own])).models[0], own, reference, other


def add_means(reference: nn.Module, batch: torch.Tensor, used: tuple[int, ...]) -> None:
    """Adds the gradients of the loss of all ranks to a model in one process."""
    for each in range(RANKS):
        (reference(batch[each], used).square().mean() / RANKS).backward()


def step(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", CHOICES)
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
    ids=["one bucket", "many buckets", "find unused"],
)
@pytest.mark.sampled(6)
def test_parts_that_a_backward_leaves_out_train_as_in_one_process(rank: int, what: str, options: Any) -> None:
    chosen = CHOICES[what]
    ddp, model, own, reference, other = prepared(**options)
    for number in range(STEPS):
        for micro in range(2):
            batch = rows(number, micro)
            with ddp.no_sync(reference if micro else model):
                ddp.backward(model(batch[rank], chosen(number, micro, rank)).square().mean(), scale=0.5)
            for each in range(RANKS):
                loss = reference(batch[each], chosen(number, micro, each)).square().mean()
                (loss / (2 * RANKS)).backward()
        step(own, other)
        assert_equal(model, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("thaw", [True, False], ids=["thawed", "frozen"])
def test_parameters_thawed_or_frozen_after_prepare_train_as_in_one_process(rank: int, thaw: bool) -> None:
    def some_frozen() -> nn.Module:
        model = make()
        model.blocks[1].requires_grad_(not thaw)
        return model

    ddp, model, own, reference, other = prepared(some_frozen)
    for number in range(STEPS):
        if number == 2:
            for one in (model.module, reference):
                one.blocks[1].requires_grad_(thaw)
        for micro in range(2):
            batch = rows(number, micro)
            with ddp.no_sync(reference if micro else model):
                ddp.backward(model(batch[rank], (0, 1, 2)).square().mean())
            add_means(reference, batch, (0, 1, 2))
        step(own, other)
        assert_equal(model, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("unused", [False, True], ids=["all used", "find unused"])
@pytest.mark.parametrize("forwards", [1, 2])
def test_two_backwards_are_both_reduced(rank: int, forwards: int, unused: bool) -> None:
    """Of one forward, and of two forwards before both."""
    ddp, model, own, reference, other = prepared(find_unused_parameters=unused)
    for number in range(3):
        batch = rows(number, 0)
        outputs = [model(batch[rank], (0, 1, 2)) for _ in range(forwards)]
        ddp.backward(outputs[0].square().mean(), retain_graph=forwards == 1)
        ddp.backward(outputs[-1].mean())
        for each in range(RANKS):
            output = reference(batch[each], (0, 1, 2))
            ((output.square().mean() + output.mean()) / RANKS).backward()
        step(own, other)
        assert_equal(model, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("unused", [False, True], ids=["all used", "find unused"])
def test_no_sync_after_two_backwards_leaves_unused_parameters_without_a_gradient(rank: int, unused: bool) -> None:
    ddp, model, own, reference, other = prepared(find_unused_parameters=unused)
    for number in range(3):
        batch = rows(number, 0)
        output = model(batch[rank], (0, 1, 2))
        ddp.backward(output.square().mean(), retain_graph=True)
        ddp.backward(output.mean())
        for each in range(RANKS):
            output = reference(batch[each], (0, 1, 2))
            ((output.square().mean() + output.mean()) / RANKS).backward()
        step(own, other)
        with ddp.no_sync(model):
            ddp.backward(model(batch[rank], (0,)).mean())
        ddp.backward(model(batch[rank], (0,)).mean())
        for each in range(RANKS):
            (2 * reference(batch[each], (0,)).mean() / RANKS).backward()
        step(own, other)
        assert_equal(model, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("unused", [False, True], ids=["all used", "find unused"])
def test_after_a_backward_of_another_model_no_sync_keeps_the_gradients_of_this_rank(rank: int, unused: bool) -> None:
    ddp, model, own, reference, other = prepared(find_unused_parameters=unused)
    unrelated = nn.Linear(WIDTH, 1).double()
    for number in range(3):
        for micro in range(2):
            batch = rows(number, micro)
            ddp.backward(unrelated(batch[rank]).mean())
            with ddp.no_sync(reference if micro else model):
                ddp.backward(model(batch[rank], (0, 1, 2)).square().mean())
            if not micro:
                alone = copy.deepcopy(reference)
                alone(batch[rank], (0, 1, 2)).square().mean().backward()
                for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
                    torch.testing.assert_close(mine.grad, expected.grad, rtol=0, atol=1e-12)
            add_means(reference, batch, (0, 1, 2))
        step(own, other)
        assert_equal(model, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("unused", [False, True], ids=["all used", "find unused"])
def test_parts_that_only_the_first_backward_of_a_window_used_are_averaged(rank: int, unused: bool) -> None:
    ddp, model, own, reference, other = prepared(find_unused_parameters=unused)
    unrelated = nn.Linear(WIDTH, 1).double()
    for number in range(3):
        for micro, used in enumerate([(0, 1, 2), (0,), (0,)]):
            batch = rows(number, 0)
            ddp.backward(unrelated(batch[rank]).mean())
            with ddp.no_sync(reference if micro == 2 else model):
                ddp.backward(model(batch[rank], used).square().mean())
            add_means(reference, batch, used)
        step(own, other)
        assert_equal(model, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("unused", [False, True], ids=["all used", "find unused"])
def test_a_triggered_backward_reduces_after_the_block_of_its_forward_has_ended(rank: int, unused: bool) -> None:
    ddp, model, own, reference, other = prepared(find_unused_parameters=unused)
    for number in range(3):
        batch = rows(number, 0)
        with ddp.no_sync(model):
            loss = model(batch[rank], (0, 1, 2)).square().mean()
        with ddp.trigger_sync(model):
            ddp.backward(loss)
        add_means(reference, batch, (0, 1, 2))
        step(own, other)
        assert_equal(model, reference)


@pytest.mark.ranks(2)
def test_a_sparse_embedding_that_one_rank_does_not_use_trains_as_in_one_process(rank: int) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(5, WIDTH, sparse=True), nn.Linear(WIDTH, 1)

        def forward(self, token: int | None) -> torch.Tensor:
            x = torch.ones(1, WIDTH, dtype=torch.float64)
            return self.head(x if token is None else self.words(torch.tensor([token])))

    torch.manual_seed(0)
    reference = Words().double()
    ddp, model = opened(), copy.deepcopy(reference)
    own, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference))
    model = ddp.prepare(Bundle([model], [own])).models[0]
    tokens = [(1, None), (None, None), (2, 1), (None, 3)]
    for each in tokens:
        ddp.backward(model(each[rank]).square().sum())
        for token in each:
            (reference(token).square().sum() / RANKS).backward()
        step(own, other)
        assert_equal(model, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tokens", [[[0, 2], [1, 2]], [[0, 2, 1, 2], None]], ids=["both ranks", "one rank"])
def test_sparse_gradients_that_no_backward_has_reduced_stay_sparse(rank: int, tokens: Any) -> None:
    ddp = opened()
    model = ddp.prepare(Bundle([nn.Embedding(4, WIDTH, sparse=True)])).models[0]
    with ddp.no_sync(model):
        if tokens[rank] is not None:
            model(torch.tensor(tokens[rank])).sum().backward()
    ddp.gradients.reduce(model)
    assert model.module.weight.grad.is_sparse
    assert torch.equal(model.module.weight.grad.to_dense()[:, 0], torch.tensor([0.5, 0.5, 1.0, 0.0]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("beside", [True, False], ids=["beside others", "alone"])
def test_sparse_gradients_of_an_embedding_thawed_after_prepare_stay_sparse(rank: int, beside: bool) -> None:
    model = nn.ModuleList([nn.Embedding(4, WIDTH, sparse=True), nn.Linear(1, 1)]).double()
    words = model[0].requires_grad_(False)
    model[1].requires_grad_(beside)
    optimizer = torch.optim.SparseAdam(words.parameters(), lr=0.1)
    ddp = opened()
    bound = ddp.prepare(Bundle([model], [optimizer])).models[0]
    assert (bound is model) is not beside
    words.requires_grad_(True)
    before = words.weight.detach().clone()
    for tokens in ([[2], None], [None, None], [[1], [1, 2]]):
        chosen = tokens[rank]
        inputs = [words(torch.tensor(chosen)).sum()] if chosen else []
        ddp.backward(sum(inputs, start=model[1](torch.zeros(1, 1, dtype=torch.float64).requires_grad_()).sum()))
        assert words.weight.grad is None or words.weight.grad.is_sparse
        optimizer.step()
        optimizer.zero_grad()
    moved = (words.weight != before).any(1)
    assert moved.tolist() == [False, True, True, False]


@pytest.mark.ranks(2)
def test_a_second_backward_of_one_forward_is_refused_within_a_join(rank: int) -> None:
    ddp, model, *_ = prepared()
    with ddp.gradients.join([model]):
        output = model(rows(0, 0)[rank], (0, 1, 2))
        ddp.backward(output.mean(), retain_graph=True)
        with pytest.raises(BackendError, match="add the losses up"):
            ddp.backward(output.square().mean())


@pytest.mark.ranks(2)
def test_a_model_trains_behind_a_join_as_if_there_had_been_none(rank: int) -> None:
    ddp, model, own, reference, other = prepared()
    with ddp.gradients.join([model]):
        for _ in range(2 - rank):
            ddp.backward(model(rows(0, 0)[rank], (0, 1, 2)).square().mean())
    model.zero_grad()
    assert not model._join_config.enable
    if rank == 0:
        with torch.no_grad():
            model(rows(0, 0)[0], (0, 1, 2))  # alone, as in an evaluation on the main process
    batch = rows(1, 0)
    output = model(batch[rank], (0, 1, 2))
    ddp.backward(output.mean(), retain_graph=True)
    ddp.backward(output.square().mean())
    for each in range(RANKS):
        output = reference(batch[each], (0, 1, 2))
        ((output.mean() + output.square().mean()) / RANKS).backward()
    step(own, other)
    assert_equal(model, reference)


@pytest.mark.ranks(2)
def test_parameters_that_ddp_was_made_to_ignore_stay_out_of_the_reduction(rank: int) -> None:
    def partly_ignored() -> nn.Module:
        model = make()
        ignored = ["blocks.0.weight", "blocks.0.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        return model

    ddp, model, own, reference, other = prepared(partly_ignored)
    for number in range(3):
        batch = rows(number, 0)
        ddp.backward(model(batch[rank], (0, 1)).square().mean())
        assert model.module.blocks[2].weight.grad is None
        model.module.blocks[0].requires_grad_(False)
        for each in range(RANKS):
            (reference(batch[each], (0, 1)).square().mean() / RANKS).backward()
        for one in (model.module, reference):
            one.blocks[0].zero_grad()
        step(own, other)
        assert_equal(model, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("thaw", [True, False], ids=["thawed", "frozen"])
def test_a_model_that_its_user_wrapped_and_then_froze_in_part_trains_as_in_one_process(rank: int, thaw: bool) -> None:
    ddp, model, reference = opened(), make(), make()
    model.blocks[0].requires_grad_(not thaw)
    wrapped = DistributedDataParallel(model)
    for one in (model, reference):
        one.blocks[0].requires_grad_(thaw)
    own, other = adam(model), adam(reference)
    ddp.prepare(Bundle([wrapped], [own]))
    chosen = CHOICES["a part not on one rank"]
    for number in range(3):
        batch = rows(number, 0)
        ddp.backward(wrapped(batch[rank], chosen(number, 0, rank)).square().mean())
        for each in range(RANKS):
            (reference(batch[each], chosen(number, 0, each)).square().mean() / RANKS).backward()
        step(own, other)
        assert_equal(model, reference)


@pytest.mark.ranks(2)
def test_a_model_that_was_frozen_when_it_was_prepared_trains_as_in_one_process_once_thawed(rank: int) -> None:
    ddp, body, head, reference, other_head = opened(), make(), make(), make(), make()
    body.requires_grad_(False)
    own, other = ((adam(one), adam(two)) for one, two in ((body, head), (reference, other_head)))
    bound = ddp.prepare(Bundle([body, head], [*own]))
    assert bound.models[0] is body
    body.requires_grad_(True)
    for number in range(3):
        for micro in range(2):
            batch = rows(number, micro)
            # without effect on a model that is not prepared
            with ddp.no_sync(reference if micro else body), ddp.no_sync(reference if micro else bound.models[1]):
                ddp.backward(bound.models[1](body(batch[rank], (0, 1 + rank)), (0,)).square().mean())
                assert (body.blocks[2 - rank].weight.grad is None) == (micro == 0)
            for each in range(RANKS):
                hidden = reference(batch[each], (0, 1 + each))
                (other_head(hidden, (0,)).square().mean() / RANKS).backward()
        step(*own, *other)
        assert_equal(body, reference)
        assert_equal(bound.models[1].module, other_head)
    with pytest.raises(BackendError, match="Blocks that was frozen"):
        ddp.gradients.join([bound.models[1]])
    ddp.gradients.set_unreduced(body, {"blocks.0.bias": torch.full((WIDTH,), float(rank), dtype=torch.float64)})
    ddp.gradients.reduce(body)
    assert torch.equal(body.blocks[0].bias.grad, torch.full((WIDTH,), 0.5, dtype=torch.float64))


@pytest.mark.ranks(2)
def test_a_deleted_model_leaves_no_parameters_behind(rank: int) -> None:
    ddp, model, own, *_ = prepared()
    ddp.backward(model(rows(0, 0)[rank], (0, 2)).mean())
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, own
    gc.collect()
    assert not any(parameter() is not None for parameter in parameters)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1e-4}], ids=["one bucket", "many buckets"])
def test_more_parameters_may_be_left_out_than_an_error_of_torch_lists(rank: int, options: Any) -> None:
    def deep() -> nn.Module:
        model = make()
        model.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(120)).double()
        return model

    ddp, model, own, reference, other = prepared(deep, **options)
    for number, lengths in enumerate(((3, 5), (100, 2), (3, 3))):
        batch = rows(number, 0)
        ddp.backward(model(batch[rank], tuple(range(lengths[rank]))).square().mean())
        for each in range(RANKS):
            (reference(batch[each], tuple(range(lengths[each]))).square().mean() / RANKS).backward()
        without = [name for name, parameter in reference.named_parameters() if parameter.grad is None]
        assert [name for name, one in model.module.named_parameters() if one.grad is None] == without
        step(own, other)
        assert_equal(model, reference)


@pytest.mark.ranks(2)
def test_windows_with_a_static_graph_are_those_of_one_process(rank: int) -> None:
    """torch records the graph in the first backward, which raised an internal assertion under ``no_sync``."""
    ddp, model, own, reference, other = prepared(static_graph=True)
    for number in range(STEPS):
        for micro in range(3):
            batch = rows(number, micro)
            with ddp.no_sync(model) if micro < 2 else nullcontext():
                ddp.backward(model(batch[rank], (0, 1)).square().mean())
            for each in range(RANKS):
                (reference(batch[each], (0, 1)).square().mean() / RANKS).backward()
        step(own, other)
        assert_equal(model, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["two backwards", "another method"])
def test_a_static_graph_refuses_a_backward_without_a_forward(rank: int, kind: str) -> None:
    """torch left these gradients unreduced, so that ranks trained apart."""
    ddp, model, *_ = prepared(static_graph=True)
    batch = rows(0, 0)[rank]
    output = model(batch, (0, 2))
    ddp.backward(output.square().mean(), retain_graph=True)
    again = output.abs().mean() if kind == "two backwards" else model.module(batch, (0, 2)).mean()
    with pytest.raises(BackendError, match="static_graph=True: torch reduces one backward for each forward"):
        ddp.backward(again)


@pytest.mark.ranks(2)
def test_a_static_graph_stays_out_of_the_backward_of_another_model(rank: int) -> None:
    ddp, model, own, reference, other = prepared(static_graph=True)
    beside: Any = nn.Linear(WIDTH, 1).double()
    beside = ddp.prepare(Bundle([beside])).models[0]
    for number in range(3):
        batch = rows(number, 0)
        ddp.backward(model(batch[rank], (0, 1)).square().mean())
        ddp.backward(beside(batch[rank]).square().mean())
        for each in range(RANKS):
            (reference(batch[each], (0, 1)).square().mean() / RANKS).backward()
        step(own, other)
        assert_equal(model, reference)
