"""Loaders on another default device than the CPU: "meta" stands for any."""

from collections.abc import Callable

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from accel_data import LengthGrouped, OrderSampler, ShuffleBuffer, TokenBudget, TokenBudgetSampler, prepare_loader
from accel_state.parallelism.config import DataShard


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self):
        return iter(range(16))


def loader(**options) -> DataLoader:
    return DataLoader(range(16), collate_fn=list, generator=torch.Generator(), **{"batch_size": 2, **options})


LOADERS = {
    "sequential": loader,
    "shuffled": lambda: loader(shuffle=True),
    "worker": lambda: loader(num_workers=1),
    "replacement": lambda: loader(sampler=RandomSampler(range(16), replacement=True, generator=torch.Generator())),
    "weighted": lambda: loader(sampler=WeightedRandomSampler([1.0] * 16, 16, generator=torch.Generator())),
    "lengths": lambda: loader(sampler=OrderSampler(LengthGrouped(list(range(16)), group_size=4), seed=0)),
    "budget": lambda: DataLoader(
        range(16), batch_sampler=TokenBudgetSampler(list(range(1, 17)), TokenBudget(max_tokens=40)), collate_fn=list
    ),
    "stream": lambda: DataLoader(ShuffleBuffer(Stream(), size=4, seed=1), batch_size=2, collate_fn=list),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_orders_are_the_same_on_any_default_device(make: Callable[[], DataLoader]) -> None:
    torch.manual_seed(0)
    expected = list(prepare_loader(make(), DataShard(0, 1)))
    torch.manual_seed(0)
    plain = make()
    with torch.device("meta"):
        assert list(prepare_loader(plain, DataShard(0, 1))) == expected
