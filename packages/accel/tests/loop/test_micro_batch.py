"""The largest micro-batch that fits: found on all ranks together, and no trace left of the search."""

from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel_state.errors import CollectiveError, ConfigError


def prepared() -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    return accelerator, accelerator.prepare(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)))


def needing(model: Any, limit: int) -> Any:
    """A loss for which the machine's memory really is too small beyond ``limit`` rows."""

    def compute(rows: torch.Tensor) -> torch.Tensor:
        if len(rows) > limit:
            torch.empty(1 << 50)
        return model(rows).sum()

    return compute


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("limit", "size"), [(100, 24), (20, 12), (5, 3)])
def test_the_largest_half_that_fits_is_found_and_nothing_has_changed(limit: int, size: int) -> None:
    accelerator, model = prepared()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    batch = torch.randn(24, 3)
    random = torch.get_rng_state()
    assert accelerator.find_micro_batch_size(needing(model, limit), batch) == size
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    accelerator.end_training()


def test_too_little_memory_for_anything_is_said() -> None:
    accelerator, model = prepared()
    with pytest.raises(ConfigError, match="not even 2 rows"):
        accelerator.find_micro_batch_size(needing(model, 1), torch.randn(8, 3), smallest=2)
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_all_ranks_take_what_the_smallest_can(rank: int) -> None:
    accelerator, model = prepared()
    batch = torch.randn(16, 3)
    assert accelerator.find_micro_batch_size(needing(model, 100 if rank else 4), batch) == 4
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_a_smaller_memory_trains_to_the_same_weights(rank: int) -> None:
    """What the micro-batch is follows from the memory; what a step learns from is always the global batch."""
    from torch.utils.data import DataLoader, TensorDataset

    from accel import DataLoaderConfiguration

    def trained(limit: int) -> tuple[int, list[torch.Tensor]]:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(global_batch_size=16))
        torch.manual_seed(0)
        model: Any = nn.Linear(3, 1, dtype=torch.float64)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        rows = torch.randn(40, 3, dtype=torch.float64)
        compute = needing(model, limit)
        size = accelerator.find_micro_batch_size(compute, rows[:8])
        loader: Any = accelerator.prepare(DataLoader(TensorDataset(rows), batch_size=size))
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(compute(batch) / len(batch))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.end_training()
        return size, [parameter.detach().clone() for parameter in model.parameters()]

    (whole, expected), (part, found) = trained(100), trained(3 if rank else 100)
    assert (whole, part) == (8, 2)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, whole after forward": {"fsdp_plugin": {"fsdp_version": 2, "reshard_after_forward": False}},
    "fsdp1": {"strategy": "fsdp1"},
    **{f"zero {stage}": {"deepspeed_plugin": {"zero_stage": stage}} for stage in range(4)},
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.sampled(2)
def test_the_search_leaves_nothing_in_the_next_steps(rank: int, strategy: dict[str, Any]) -> None:
    def trained(*searches: int) -> dict[str, torch.Tensor]:
        accelerator = Accelerator(cpu=True, **strategy)
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for step in range(3):
            rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(step * 2 + rank))
            if step in searches:
                assert accelerator.find_micro_batch_size(lambda rows: 100 * model(rows).square().mean(), rows) == 4
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        accelerator.end_training()
        return {name: value.clone() for name, value in state.items()}

    torch.testing.assert_close(trained(0, 2), trained(), rtol=0, atol=0)


@pytest.mark.ranks(2)
def test_another_error_on_one_rank_reaches_all(rank: int) -> None:
    accelerator, model = prepared()

    def compute(rows: torch.Tensor) -> torch.Tensor:
        if rank:
            raise KeyError("label")
        return model(rows).sum()

    with pytest.raises(KeyError if rank else CollectiveError, match="label"):
        accelerator.find_micro_batch_size(compute, torch.randn(4, 3))
    accelerator.end_training()


class Failing(nn.Module):
    """Runs out of memory in forward or in backward, while ``where`` says so."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.where = ""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(rows)
        if self.where == "backward" and result.requires_grad:
            result.register_hook(lambda _: torch.empty(1 << 50))
        if self.where == "forward":
            torch.empty(1 << 50)
        return result


@pytest.mark.ranks(2)
@pytest.mark.parametrize("failing", [(0, 1), (1,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "whole after forward"])
@pytest.mark.sampled(2)
def test_a_sharded_model_trains_on_after_ranks_ran_out_of_memory(
    rank: int, failing: tuple[int, ...], where: str, reshard: bool
) -> None:
    def trained(limit: int) -> dict[str, torch.Tensor]:
        plugin: Any = {"fsdp_version": 2, "reshard_after_forward": reshard}
        plugin |= {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Failing"]}
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(Failing(3) for _ in range(3)))
        middle = model[1]
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

        def compute(rows: torch.Tensor) -> torch.Tensor:
            middle.where = where if rank in failing and len(rows) > limit else ""
            return model(rows).square().mean()

        for step in range(3):
            rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(step * 2 + rank))
            if step == 1:
                assert accelerator.find_micro_batch_size(compute, rows) == min(limit, 4)
            middle.where = ""
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        accelerator.end_training()
        return {name: value.clone() for name, value in state.items()}

    torch.testing.assert_close(trained(2), trained(8), rtol=0, atol=0)
