"""Partitions of stage 3 whose parameters are on disk: DeepSpeed's swapper writes what is not in memory."""

from types import SimpleNamespace
from typing import Any

import torch

from accel_deepspeed.zero.partitions import ShardedParts


def partition(size: int, status: str) -> Any:
    tensor: Any = torch.zeros(size)
    tensor.ds_numel, tensor.status = size, SimpleNamespace(name=status)
    return tensor


def test_weights_go_to_the_disk_where_the_partition_is() -> None:
    written: dict[str, Any] = {}
    swapper = SimpleNamespace(swap_out_partitioned_params=lambda **given: written.update(given))
    group = [
        SimpleNamespace(ds_tensor=partition(2, "AVAILABLE"), nvme_swapper=swapper),
        SimpleNamespace(ds_tensor=partition(3, "NOT_AVAILABLE"), nvme_swapper=swapper),
    ]
    optimizer = SimpleNamespace(
        fp16_groups=[group],
        fp16_partitioned_groups_flat=[None],
        fp16_partitioned_groups_flat_numel=[5],
        fp32_partitioned_groups_flat=[torch.arange(5.0, requires_grad=True)],
        swap_optimizer=False,
        persistent_parameters=[],
    )
    ShardedParts(SimpleNamespace(optimizer=optimizer, basic_optimizer=SimpleNamespace(state={}))).refresh()
    assert group[0].ds_tensor.tolist() == [0.0, 1.0]
    assert written["dst_fp16_params"] == [group[1]]
    assert [values.tolist() for values in written["src_fp32_params"]] == [[2.0, 3.0, 4.0]]


def test_weights_of_a_sub_group_in_memory_are_copied_at_once() -> None:
    there = torch.zeros(2, dtype=torch.bfloat16)
    optimizer = SimpleNamespace(
        fp16_groups=[[]],
        fp16_partitioned_groups_flat=[there],
        fp16_partitioned_groups_flat_numel=[2],
        fp32_partitioned_groups_flat=[torch.tensor([1.0, 2.0])],
        swap_optimizer=False,
        persistent_parameters=[],
    )
    ShardedParts(SimpleNamespace(optimizer=optimizer, basic_optimizer=SimpleNamespace(state={}))).refresh()
    assert there.tolist() == [1.0, 2.0]
