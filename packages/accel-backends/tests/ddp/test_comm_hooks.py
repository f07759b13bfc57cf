import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_backends import Bundle, DDPBackend, DDPCommunicationHookType, DDPConfig, Run
from accel_precision import PrecisionPolicy
from accel_state import ConfigError, Session

# Options, largest relative error of the averaged gradient in one step, and of the loss after some training.
POWER = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 1}
HOOKS = [
    ({"comm_hook": "fp16"}, 1e-3),
    ({"comm_hook": "bf16"}, 1e-2),
    ({"comm_hook": DDPCommunicationHookType.BF16}, 1e-2),
    ({"comm_hook": "power_sgd", "comm_state_option": POWER}, None),
    ({"comm_hook": "batched_power_sgd", "comm_state_option": POWER}, None),
    ({"comm_hook": "power_sgd", "comm_wrapper": "fp16", "comm_state_option": POWER}, None),
    ({"comm_hook": "power_sgd", "comm_wrapper": "bf16", "comm_state_option": POWER}, None),
]


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)).to(dtype)


def prepared(config=None, precision="no", model=None):
    ddp = DDPBackend(Run(Session.open(device="cpu"), PrecisionPolicy.parse(precision, device_type="cpu")), config)
    model = net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ddp, ddp.prepare(Bundle([model], [optimizer])).models[0], optimizer


def batch(rank, world_size):
    x = torch.randn(8 * world_size, 8, generator=torch.Generator().manual_seed(3))
    return x if rank is None else x[rank * 8 : (rank + 1) * 8]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("options", "bound"), [case for case in HOOKS if case[1]])
def test_compressed_gradients_are_means_within_their_dtypes_rounding(rank, world_size, options, bound):
    ddp, model, _ = prepared(DDPConfig(**options))
    ddp.backward(model(batch(rank, world_size)).square().mean())
    reference = net()
    reference(batch(None, world_size)).square().mean().backward()
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert own.grad.dtype is torch.float32
        assert float((own.grad - other.grad).norm() / other.grad.norm()) < bound
        ranks = [torch.zeros_like(own) for _ in range(world_size)]
        dist.all_gather(ranks, own.grad)
        assert torch.equal(*ranks)


@pytest.mark.ranks(2)
def test_complex_gradients_keep_their_imaginary_part(rank):
    class Filter(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x):
            return (self.weight * x).real.sum()

    ddp, model, _ = prepared(DDPConfig(comm_hook="bf16"), model=Filter())
    ddp.backward(model(torch.full((3,), 2.0 * rank + 4j)))
    assert torch.equal(model.module.weight.grad, torch.full((3,), 1 - 4j))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [options for options, _ in HOOKS], ids=str)
@pytest.mark.sampled(2)
def test_training_through_every_hook_learns_what_it_does_without(rank, world_size, options):
    losses = {}
    for name, config in (("plain", None), ("hook", DDPConfig(**options))):
        ddp, model, optimizer = prepared(config)
        x = batch(rank, world_size)
        for _ in range(30):
            loss = (model(x) - x).square().mean()
            ddp.backward(loss)
            ddp.step(optimizer)
            ddp.zero_grad(optimizer)
        losses[name] = float(loss)
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        ranks = [torch.zeros_like(weights) for _ in range(world_size)]
        dist.all_gather(ranks, weights)
        assert torch.equal(*ranks)
    assert losses["hook"] < losses["plain"] * 1.15


@pytest.mark.ranks(2)
def test_true_half_models_reduce_in_fp32_when_the_policy_says_so(rank, world_size):
    """bf16 sums of two halves round once more; the mean in fp32 rounds only at the end."""
    ddp, model, _ = prepared(precision="bf16-true,reduce=fp32", model=net(torch.bfloat16))
    ddp.backward(model(batch(rank, world_size)).square().mean())
    own = net(torch.bfloat16)
    own(batch(rank, world_size).bfloat16()).square().mean().backward()
    for parameter, local in zip(model.parameters(), own.parameters(), strict=True):
        ranks = [torch.zeros_like(local) for _ in range(world_size)]
        dist.all_gather(ranks, local.grad)
        expected = ((ranks[0].float() + ranks[1].float()) / 2).bfloat16()
        assert torch.equal(parameter.grad, expected)


@pytest.mark.ranks(2)
def test_a_hook_and_a_reduction_dtype_contradict_each_other():
    with pytest.raises(ConfigError, match="reduces gradients in bf16, and comm_hook='fp16'"):
        prepared(DDPConfig(comm_hook="fp16"), "compute=bf16,reduce=bf16")


@pytest.mark.ranks(2)
def test_unknown_powersgd_options_are_named():
    config = DDPConfig(comm_hook="power_sgd", comm_state_option={"matrix_approximation_ranks": 2})
    with pytest.raises(ConfigError, match=r"'matrix_approximation_ranks' is not one of .*did you mean"):
        prepared(config)
