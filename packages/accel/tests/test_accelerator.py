"""The front door on one process: what it prepares, passes through, refuses and lets go."""

import copy
import gc
import os
import pickle
import weakref
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, AutocastKwargs, GradientAccumulationPlugin, InitProcessGroupKwargs
from accel.optimizer import PreparedOptimizer
from accel.scheduler import PreparedScheduler
from accel_data import PreparedLoader
from accel_state.errors import AccelError, BackendError, ConfigError, PrepareError


def parts(samples: int = 24, batch: int = 4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    inputs = torch.randn(samples, 3)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=batch)
    return model, optimizer, loader, scheduler


def train(accelerator, model, optimizer, loader, scheduler, epochs: int = 1) -> None:
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


def test_prepare_returns_the_kinds_in_order_and_passes_the_rest_through() -> None:
    accelerator, marker = Accelerator(cpu=True), {"not": "mine"}
    model, optimizer, loader, scheduler = parts()
    prepared = accelerator.prepare(marker, model, None, loader, scheduler, optimizer, "text")
    assert [type(item) for item in prepared] == [
        dict,
        type(model),
        type(None),
        PreparedLoader,
        PreparedScheduler,
        PreparedOptimizer,
        str,
    ]
    assert prepared[0] is marker


def test_one_object_is_returned_alone() -> None:
    assert isinstance(Accelerator(cpu=True).prepare(nn.Linear(2, 2)), nn.Linear)


def test_prepared_things_still_are_what_they_were() -> None:
    _, optimizer, loader, _ = Accelerator(cpu=True).prepare(*parts())
    assert isinstance(loader, DataLoader)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(loader) == 6


def test_training_equals_the_plain_loop() -> None:
    model, optimizer, loader, scheduler = parts()
    for x, y in loader:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(*parts())
    train(accelerator, *prepared)
    for mine, plain in zip(prepared[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, plain)
    assert prepared[3].get_last_lr() == scheduler.get_last_lr()


def test_accumulated_micro_batches_equal_one_batch() -> None:
    plain = Accelerator(cpu=True)
    whole = plain.prepare(*parts(batch=12))
    train(plain, *whole)
    accumulating = Accelerator(cpu=True, gradient_accumulation_steps=3)
    pieces = accumulating.prepare(*parts(batch=4))
    train(accumulating, *pieces)
    for one, many in zip(whole[0].parameters(), pieces[0].parameters(), strict=True):
        torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-7)
    assert pieces[3].scheduler.last_epoch == whole[3].scheduler.last_epoch == 2


@pytest.mark.parametrize("counts", [(4, 4, 4), (1, 7, 4), (0, 5, 7)])
def test_weighted_micro_batches_equal_one_batch(counts: tuple[int, ...]) -> None:
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 1, dtype=torch.float64)
    reference = parts()[0].double()
    nn.functional.mse_loss(reference(x), y).backward()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(counts))
    model = accelerator.prepare(parts()[0].double())
    start = 0
    for count in counts:
        with accelerator.accumulate(model):
            rows = slice(start, start + count)
            loss = nn.functional.mse_loss(model(x[rows]), y[rows], reduction="sum")
            accelerator.backward(loss, weight=count)
        start += count
    for mine, plain in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-12, atol=1e-14)


def test_weights_of_one_step_do_not_reach_the_next_without_accumulate() -> None:
    batches = [torch.randn(count, 3, dtype=torch.float64) for count in (5, 9, 2)]
    plain = parts()[0].double()
    stepper = torch.optim.SGD(plain.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True)
    model = parts()[0].double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in batches:
        plain(x).square().mean().backward()
        stepper.step()
        stepper.zero_grad()
        accelerator.backward(model(x).square().sum(), weight=len(x))
        optimizer.step()
        optimizer.zero_grad()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_two_losses_of_one_micro_batch_share_the_weight() -> None:
    x = torch.randn(10, 3, dtype=torch.float64)
    reference = parts()[0].double()
    (reference(x).square().sum() / 10).backward()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(parts()[0].double())
    with accelerator.accumulate(model):
        accelerator.backward(model(x[:7]).square().sum(), weight=7)
        accelerator.backward(model(x[7:]).square().sum(), weight=torch.tensor(3))
    for mine, plain in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-12, atol=1e-14)


def test_a_window_without_any_weight_has_zero_gradients() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.zeros(0, 2)).sum(), weight=0)
    assert all(bool((parameter.grad == 0).all()) for parameter in model.parameters())


@pytest.mark.ranks(2, group=False, env={"ACCELERATE_CPU_AFFINITY": "1"})
def test_further_accelerators_leave_the_cores_of_a_process(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = list(range(8))
    monkeypatch.setattr("accel.setup.build.usable_cpus", lambda: list(cores))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, mine: cores.__setitem__(slice(None), mine))
    accelerator = Accelerator(cpu=True)
    assert cores == list(range(4 * rank, 4 * rank + 4))
    Accelerator(cpu=True)
    assert cores == list(range(4 * rank, 4 * rank + 4))
    accelerator.end_training()


def test_two_accelerators_do_not_disturb_each_other() -> None:
    one, two = Accelerator(cpu=True, gradient_accumulation_steps=2), Accelerator(cpu=True, mixed_precision="bf16")
    first, second = one.prepare(nn.Linear(4, 4)), two.prepare(nn.Linear(4, 4))
    with one.accumulate(first):
        assert not one.sync_gradients
        with two.accumulate(second):
            assert two.sync_gradients
        with two.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        with one.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert (one.mixed_precision, two.mixed_precision) == ("no", "bf16")
    assert (one.gradient_accumulation_steps, two.gradient_accumulation_steps) == (2, 1)


@pytest.mark.slow
def test_twenty_prepare_and_free_cycles_leave_no_reference_behind() -> None:
    accelerator, left = Accelerator(cpu=True), []
    for _ in range(20):
        model, optimizer, loader, scheduler = accelerator.prepare(*parts())
        train(accelerator, model, optimizer, loader, scheduler)
        left += [weakref.ref(model), weakref.ref(optimizer.optimizer), weakref.ref(loader), weakref.ref(loader.dataset)]
        model, optimizer, loader, scheduler = accelerator.free_memory(model, optimizer, loader, scheduler)
    gc.collect()
    assert [reference() for reference in left] == [None] * 80


WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "ddp": ({"strategy": "ddp"}, 20),
    "fsdp": ({"strategy": "fsdp"}, 20),
    "deepspeed-2": ({"deepspeed_plugin": {"zero_stage": 2}}, 3),
    "deepspeed-3": ({"deepspeed_plugin": {"zero_stage": 3}}, 3),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("options", "cycles"), WAYS.values(), ids=WAYS)
@pytest.mark.sampled(1)
def test_cycles_of_ranks_leave_no_reference_behind(options: dict[str, Any], cycles: int) -> None:
    if "deepspeed_plugin" in options and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    accelerator, left = Accelerator(cpu=True, **options), []
    for _ in range(cycles):
        prepared = accelerator.prepare(*parts())
        train(accelerator, *prepared)
        model, optimizer, loader, scheduler = prepared
        inner = accelerator.unwrap_model(model)
        left += [weakref.ref(one) for one in (model, inner, optimizer.optimizer, loader, loader.dataset)]
        del prepared, inner
        model, optimizer, loader, scheduler = accelerator.free_memory(model, optimizer, loader, scheduler)
    gc.collect()
    assert [reference() for reference in left] == [None] * 5 * cycles
    accelerator.end_training()


def test_a_freed_accelerator_goes_away_without_the_collector() -> None:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(*parts())
    train(accelerator, *prepared)
    reference = weakref.ref(accelerator)
    gc.collect()
    gc.disable()
    try:
        del accelerator, prepared
        assert reference() is None
    finally:
        gc.enable()


def test_a_prepared_optimizer_pickles_as_the_one_inside() -> None:
    accelerator = Accelerator(cpu=True)
    _, optimizer, _, _ = accelerator.prepare(*parts())
    assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.SGD
    assert type(copy.deepcopy(optimizer)) is torch.optim.SGD


def test_a_prepared_scheduler_pickles_and_copies_as_the_one_inside() -> None:
    accelerator = Accelerator(cpu=True)
    _, _, _, scheduler = accelerator.prepare(*parts())
    assert type(pickle.loads(pickle.dumps(scheduler))) is type(scheduler.scheduler)
    assert type(copy.deepcopy(scheduler)) is type(scheduler.scheduler)


class TwoSets(torch.optim.SGD):
    """Keeps one set of weights to train and one to evaluate, as schedule-free optimizers do."""

    mode = "train"

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


def test_an_optimizer_with_two_sets_of_weights_is_switched() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = accelerator.prepare(model, TwoSets(model.parameters(), lr=0.1))[1]
    optimizer.eval()
    assert optimizer.optimizer.mode == optimizer.mode == "eval"
    optimizer.train()
    assert optimizer.optimizer.mode == "train"
    plain = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    plain.train()  # has one set
    plain.eval()


def test_a_closure_is_called_and_its_loss_returned() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _, _ = accelerator.prepare(*parts())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        accelerator.backward(loss)
        return loss

    assert optimizer.step(closure).item() > 0


def test_the_largest_norm_is_named_as_torch_names_it() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    accelerator.backward(model(torch.ones(1, 2)).sum() * 3)
    assert float(accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type="inf")) == 3.0  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="max_norm is None"):
        accelerator.clip_grad_norm_(model.parameters(), None)  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="was given a Linear; expected its parameters"):
        accelerator.clip_grad_norm_(model, 1.0)


def test_clipping_waits_for_the_end_of_the_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(4, 1))
    norms = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((2, 4), 100.0)).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            norms.append(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item())
    assert norms[0] > 50
    assert norms[1] == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("batches", [6, 5], ids=["whole", "left"])
def test_a_schedule_of_epochs_steps_after_an_epoch_that_ends_inside_a_window(batches: int) -> None:
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    for epoch in range(3):
        for number, (x, y) in enumerate(loader, 1):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            if number == batches:
                break
        assert scheduler.last_epoch == epoch
        for _ in loader:  # an evaluation
            pass
        scheduler.step()
    assert scheduler.last_epoch == 3


def test_a_schedule_of_epochs_steps_after_an_epoch_whose_last_step_was_skipped() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    for x, _ in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum() * float("inf"))
            optimizer.step()
    assert optimizer.step_was_skipped
    scheduler.step()
    assert scheduler.last_epoch == 1


def test_scheduler_steps_per_process_is_the_old_meaning() -> None:
    with pytest.raises(ConfigError, match="scheduler_steps is 'always'"):
        Accelerator(cpu=True, scheduler_steps="always")


def test_a_model_prepared_twice_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(PrepareError, match="prepared already"):
        accelerator.prepare(model)


def test_prepared_optimizers_loaders_and_schedulers_pass_through() -> None:
    accelerator = Accelerator(cpu=True)
    _, optimizer, loader, scheduler = accelerator.prepare(*parts())
    assert accelerator.prepare(optimizer) is optimizer
    assert accelerator.prepare(loader) is loader
    assert accelerator.prepare(scheduler) is scheduler
    assert accelerator.prepared.optimizers == [optimizer]
    assert len(accelerator.prepared.loaders) == 1


def test_an_optimizer_and_a_scheduler_given_again_are_those_that_were_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    model, given, _, schedule = parts()
    _, optimizer, scheduler = accelerator.prepare(model, given, schedule)
    assert accelerator.prepare(given, schedule) == (optimizer, scheduler)
    assert accelerator.prepared.optimizers == [optimizer]
    assert accelerator.prepared.schedulers == [scheduler]


def test_an_optimizer_of_unprepared_parameters_is_refused() -> None:
    with pytest.raises(PrepareError, match="SGD updates parameters of no prepared model"):
        Accelerator(cpu=True).prepare(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0))


def test_stepping_a_freed_optimizer_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    _, optimizer, _, _ = accelerator.prepare(*parts())
    accelerator.free_memory()
    with pytest.raises(BackendError, match="freed"):
        optimizer.step()


def test_what_was_freed_is_prepared_again_as_prepare_returned_it() -> None:
    accelerator, whole = Accelerator(cpu=True), Accelerator(cpu=True)
    freed, kept = accelerator.prepare(*parts()), whole.prepare(*parts())
    train(accelerator, *freed)
    accelerator.free_memory()
    freed = accelerator.prepare(*freed)
    train(accelerator, *freed)
    train(whole, *kept, epochs=2)
    assert all(torch.equal(*pair) for pair in zip(freed[0].parameters(), kept[0].parameters(), strict=True))
    assert freed[3].state_dict() == kept[3].state_dict()
    assert freed[3].optimizers == (freed[1],)


def test_a_scheduler_that_is_prepared_first_follows_its_optimizer() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model, given, _, schedule = parts()
    scheduler = accelerator.prepare(schedule)
    model, optimizer = accelerator.prepare(model, given)
    accelerator.backward(model(torch.ones(1, 3)).sum() * float("inf"))
    optimizer.step()
    assert optimizer.step_was_skipped
    scheduler.step()
    assert scheduler.last_epoch == 0


def test_a_scheduler_that_is_prepared_first_follows_its_own_optimizer_and_no_other() -> None:
    accelerator = Accelerator(cpu=True)
    model, given, _, schedule = parts()
    other = nn.Linear(2, 2)
    scheduler = accelerator.prepare(schedule)
    accelerator.prepare(other, torch.optim.SGD(other.parameters()))
    model, optimizer = accelerator.prepare(model, given)
    assert scheduler.optimizers == (optimizer,)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(BackendError, match=r"loss of shape \(3, 2\)"):
        accelerator.backward(model(torch.ones(3, 2)))


def test_placements_of_another_number_are_refused() -> None:
    with pytest.raises(PrepareError, match="1 entries for 2 objects"):
        Accelerator(cpu=True).prepare(nn.Linear(2, 2), None, device_placement=[True])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": "bf61"}, "bf16"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(3)},
            "only pass one",
        ),
        ({"strategy": "dpp"}, "ddp"),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, "only pass one AutocastKwargs"),
        ({"kwargs_handlers": ["fast"]}, "holds a str"),
        ({"kwargs_handlers": [InitProcessGroupKwargs(backend="nccl")]}, "nccl"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_construction(options: dict, message: str) -> None:
    with pytest.raises((AccelError, ValueError), match=message):
        Accelerator(cpu=True, **options)


def test_names_users_know_are_there() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.distributed_type == "NO"
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert accelerator.is_main_process
    assert accelerator.is_local_main_process
    assert accelerator.is_last_process
    assert accelerator.device == torch.device("cpu")
    assert not accelerator.use_distributed
    assert accelerator.even_batches
    assert accelerator.state.num_processes == 1
    assert accelerator.gradient_state.active_dataloader is None
    assert not accelerator.optimizer_step_was_skipped


def test_unwrapping_without_precision_leaves_the_prepared_model_as_it_is() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(4, 4))
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    inputs = torch.randn(2, 4)
    assert torch.equal(plain(inputs), nn.functional.linear(inputs, model.weight, model.bias))
    assert not torch.equal(model(inputs), plain(inputs))
    assert plain.weight is model.weight
    assert type(pickle.loads(pickle.dumps(plain))) is nn.Linear


def test_backward_before_prepare_is_refused() -> None:
    with pytest.raises(PrepareError, match="before a model was prepared"):
        Accelerator(cpu=True).backward(nn.Linear(2, 1)(torch.ones(1, 2)).sum())


def test_accumulating_for_a_model_of_the_user_instead_of_the_prepared_one_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(PrepareError, match="prepare did not return"), accelerator.accumulate(nn.Linear(2, 2)):
        pass


def test_the_state_dict_holds_tied_weights_under_all_names() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    prepared = accelerator.prepare(model)
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    other.load_state_dict(accelerator.get_state_dict(prepared))
    assert torch.equal(other[1].weight, model[0].weight)


def test_weighted_sums_of_thousands_of_tokens_do_not_overflow_fp16() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model, optimizer, _, _ = accelerator.prepare(*parts())
    skipped = 0
    for _ in range(3):
        loss = model(torch.randn(4096, 3)).square().sum()
        accelerator.backward(loss, weight=4096)
        optimizer.step()
        optimizer.zero_grad()
        skipped += accelerator.optimizer_step_was_skipped
    assert skipped == 0


def test_a_refused_setting_leaves_no_session_open() -> None:
    from accel_state import Session

    before = Session.current()
    with pytest.raises(ValueError, match="bf16"):
        Accelerator(cpu=True, mixed_precision="params=bf61")
    assert Session.current() is before
