import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_backends import Bundle, DDPBackend, DDPCommunicationHookType, DDPConfig, Run
from accel_backends.ddp import states
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


class Filter(nn.Module):
    def __init__(self, *shape, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape, dtype=dtype))

    def forward(self, x):
        return (self.weight * x).real.sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", ["no", "fp16"])
def test_complex_gradients_keep_their_imaginary_part(rank, wrapper):
    ddp, model, _ = prepared(DDPConfig(comm_hook="bf16", comm_wrapper=wrapper), model=Filter(3, dtype=torch.complex64))
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("hook", "shape", "dtype", "said"),
    [
        ("power_sgd", (), torch.float32, r"weight is of shape \(\), which comm_hook='power_sgd' cannot.*batched"),
        ("power_sgd", (0, 3), torch.float32, r"weight is of shape \(0, 3\)"),
        ("power_sgd", (3, 3), torch.complex64, "weight is complex.*nearest: comm_hook='bf16'$"),
        ("batched_power_sgd", (3, 3), torch.complex64, "weight is complex"),
    ],
)
def test_powersgd_refuses_parameters_that_are_no_real_matrices(hook, shape, dtype, said):
    with pytest.raises(ConfigError, match=said):
        prepared(DDPConfig(comm_hook=hook), model=Filter(*shape, dtype=dtype))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("factor", [float("nan"), 0.0], ids=["nan", "zero"])
@pytest.mark.parametrize("rank_of_factors", [1, 3])
@pytest.mark.parametrize(
    "options", [options for options, _ in HOOKS if "comm_state_option" in options], ids=lambda options: str(options)
)
def test_powersgd_goes_on_after_gradients_of_nan_or_zero(rank, world_size, options, rank_of_factors, factor):
    state = {**POWER, "matrix_approximation_rank": rank_of_factors}
    ddp, model, optimizer = prepared(DDPConfig(**{**options, "comm_state_option": state}))
    x, sums = batch(rank, world_size), [torch.zeros_like(one) for one in model.parameters()]
    for step in range(24):
        ddp.backward(model(x).square().mean() * (factor if step == 2 else 1.0))  # the first step that is compressed
        for total, parameter in zip(sums, model.parameters(), strict=True):
            total += parameter.grad.nan_to_num()
        ddp.zero_grad(optimizer)
    reference = net()
    reference(batch(None, world_size)).square().mean().backward()
    for total, other in zip(sums, reference.parameters(), strict=True):
        assert float((total / 23 - other.grad).norm() / other.grad.norm()) < 0.7  # 0.9 of one that is not sent


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hook", ["power_sgd", "batched_power_sgd"])
def test_powersgd_begins_anew_with_loaded_weights_and_says_so(rank, world_size, hook, monkeypatch):
    ddp, model, optimizer = prepared(DDPConfig(comm_hook=hook, comm_state_option=POWER))
    for _ in range(3):
        ddp.backward(model(batch(rank, world_size)).square().mean())
        ddp.zero_grad(optimizer)
    power, said = model._comm_hooks[0][1], []
    monkeypatch.setattr(states._log, "warning", lambda text, *values: said.append(text % values))
    assert power.iter == 3
    assert power.error_dict
    ddp.states.load_model(model, ddp.states.model(model))
    assert power.iter == 0
    assert not power.error_dict
    assert not power.q_memory_dict
    assert [text.partition(":")[0] for text in said] == [f"comm_hook='{hook}' begins anew"]
