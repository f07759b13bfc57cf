"""Batched PowerSGD: futures of buckets."""

import torch


def test_the_future_of_a_bucket_knows_its_device():
    from accel_backends.ddp.power_sgd import future_devices

    assert future_devices(torch.device("cuda", 1)) == [torch.device("cuda", 1)]
    future = torch.futures.Future(devices=future_devices(torch.device("cpu")))
    future.set_result(torch.ones(1))
    assert future.value().item() == 1.0
