"""Sharded over ranks, a model trains as it does on one."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accel_backends import Bundle, FSDPBackend, FSDPConfig, Run, TorchDynamoPlugin
from accel_backends.private import unit_groups
from accel_precision import PrecisionPolicy
from accel_state import AccelError, BackendError, ConfigError, PrepareError, Session
from accel_testing import RankPool
from accel_testing.equivalence.models import WithBuffers, WithFrozen, make_model

STEPS, BATCH, LENGTH = 4, 8, 6


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 32, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, 1).double(), batch.roll(1, 1).flatten())


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def reference(kind: str = "adamw", steps: int = STEPS, clip: float | None = None) -> nn.Module:
    model = make_model("transformer", dtype=torch.float64)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(steps):
        loss_of(model, tokens(step)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model


def open_backend(precision: str = "no", **options: Any) -> FSDPBackend:
    session = Session.open(cpu=True)
    return FSDPBackend(Run(session, PrecisionPolicy.parse(precision, device_type="cpu")), FSDPConfig(**options))


def train(
    backend: FSDPBackend,
    model: nn.Module,
    optimizer: Any,
    *,
    steps: int = STEPS,
    micro: int = 1,
    clip: float | None = None,
) -> None:
    rank, world = backend.session.rank, backend.session.world_size
    for step in range(steps):
        parts = tokens(step).chunk(world * micro)
        for index in range(micro):
            mine = parts[index * world + rank]
            if index < micro - 1:
                with backend.no_sync(model):
                    backend.backward(loss_of(model, mine), scale=1 / micro)
            else:
                backend.backward(loss_of(model, mine), scale=1 / micro)
        if clip is not None:
            backend.gradients.clip_norm(model.parameters(), clip)
        backend.step(optimizer)
        optimizer.zero_grad()


def assert_trained(backend: FSDPBackend, model: nn.Module, expected: nn.Module, rtol: float = 1e-10) -> None:
    state = backend.states.full_model(model, main_only=False)
    for name, value in expected.named_parameters():
        assert state[name].shape == value.shape
        if not value.numel():
            continue
        distance = float((state[name] - value.detach()).abs().max())
        assert distance <= rtol * float(value.detach().abs().max()), f"{name} is {distance:.1e} away"


SHARDINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "grad_op": {"sharding_strategy": "SHARD_GRAD_OP"},
    "none": {"sharding_strategy": "NO_SHARD"},
    "hybrid": {"sharding_strategy": "HYBRID_SHARD", "shard_size": 2},
    "hybrid2": {"sharding_strategy": 5, "replicate_size": 2},
    "reshard to 2": {"reshard_after_forward": 2},
    "one unit": {"auto_wrap_policy": "NO_WRAP"},
    "offload": {"cpu_offload": True},
    "checkpointing": {"activation_checkpointing": True},
    "prefetch": {"forward_prefetch": True, "backward_prefetch": "NO_PREFETCH"},
}
if Version(torch.__version__) >= Version("2.13"):  # refused before
    SHARDINGS["unused"] = {"find_unused_parameters": True}


@pytest.mark.sampled(2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("options", list(SHARDINGS.values()), ids=list(SHARDINGS))
def test_every_sharding_trains_as_one_process(rank: int, options: dict[str, Any]) -> None:
    backend = open_backend(**options)
    model = make_model("transformer", dtype=torch.float64, seed=rank)  # ranks take rank 0's values
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    bundle = backend.prepare(Bundle([model], [optimizer]))
    assert bundle.models[0] is model
    train(backend, model, optimizer, micro=2, clip=0.5)
    assert_trained(backend, model, reference(clip=0.5))
    backend.close()


@pytest.mark.ranks(2)
def test_parameters_in_channels_last_are_sharded(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)).double().to(memory_format=torch.channels_last)
    expected = deepcopy(model)
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    own, other = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, expected))
    for one, optimizer in ((model, own), (expected, other)):  # prepared after a step, with states in channels_last
        one(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    backend = open_backend()
    backend.prepare(Bundle([model], [own]))
    backend.backward(model(images).square().mean())
    backend.step(own)
    expected(images).square().mean().backward()
    other.step()
    assert_trained(backend, model, expected)
    backend.states.load_model(model, deepcopy(expected).to(memory_format=torch.channels_last).state_dict())


class Exhausted(Exception):
    """Memory that runs out in a backward."""


def fail_in_backward(module: nn.Module, given: Any, output: torch.Tensor) -> None:
    def exhaust(gradient: torch.Tensor) -> None:
        raise Exhausted

    output.register_hook(exhaust)


@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="no reset_iter_state")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"auto_wrap_policy": "NO_WRAP"}], ids=["units", "one unit"])
def test_after_a_backward_that_failed_training_goes_on_as_in_one_process(rank: int, options: dict[str, Any]) -> None:
    backend = open_backend(**options)
    model = make_model("transformer", dtype=torch.float64)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    backend.prepare(Bundle([model], [optimizer]))

    failing = model.blocks[0].register_forward_hook(fail_in_backward)
    with backend.no_sync(model), pytest.raises(Exhausted):
        backend.backward(loss_of(model, tokens(7)))
    with pytest.raises(Exhausted):
        backend.backward(loss_of(model, tokens(8)))
    failing.remove()
    optimizer.zero_grad()
    train(backend, model, optimizer, micro=2)
    assert_trained(backend, model, reference())


@pytest.mark.ranks(2)
def test_after_a_backward_that_failed_an_older_torch_refuses_to_go_on(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    backend = open_backend()
    model = make_model("transformer", dtype=torch.float64)
    backend.prepare(Bundle([model], [OPTIMIZERS["adamw"](model.parameters())]))
    model.blocks[0].register_forward_hook(fail_in_backward)
    with pytest.raises(Exhausted):
        backend.backward(loss_of(model, tokens(7)))
    with pytest.raises(BackendError, match="a backward of this model failed"):
        model(tokens(8))


@pytest.mark.ranks(2)
def test_a_model_that_was_first_called_in_inference_mode_trains_as_one_process(rank: int) -> None:
    backend = open_backend()
    model = make_model("transformer", dtype=torch.float64)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    backend.prepare(Bundle([model], [optimizer]))
    with torch.inference_mode():
        loss_of(model, tokens(0))
    train(backend, model, optimizer)
    assert_trained(backend, model, reference())


@pytest.mark.ranks(2)
def test_an_optimizer_that_has_stepped_keeps_its_state(rank: int) -> None:
    model = make_model("transformer", dtype=torch.float64)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    params = optimizer.param_groups[0]["params"]
    loss_of(model, tokens(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    backend = open_backend()
    backend.prepare(Bundle([model], [optimizer]))
    assert optimizer.param_groups[0]["params"] is params
    for step in range(1, STEPS):
        backend.backward(loss_of(model, tokens(step).chunk(2)[rank]))
        backend.step(optimizer)
        optimizer.zero_grad()
    assert_trained(backend, model, reference())
    local = optimizer.state[model.embedding.weight]["exp_avg"].to_local()
    assert local.shape == (16, 16)  # half of the 32 rows


class Scaled(nn.Module):
    """Parameters without dimension or elements, which cannot be sharded, beside ones that can."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(0, 7))
        self.first, self.last = nn.Linear(4, 7), nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)) * self.scale + self.empty.sum(0))


@pytest.mark.ranks(2)
def test_parameters_without_dimension_or_elements_are_averaged_whole(rank: int) -> None:
    torch.manual_seed(0)
    model, expected = Scaled().double(), Scaled().double()
    expected.load_state_dict(model.state_dict())
    backend = open_backend()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    other = torch.optim.AdamW(expected.parameters(), lr=0.1)
    backend.prepare(Bundle([model], [optimizer]))
    for x in torch.randn(3, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)):
        first, second = x.chunk(4)[rank], x.chunk(4)[2 + rank]
        with backend.no_sync(model):
            backend.backward(model(first).square().mean(), scale=0.5)
        backend.backward(model(second).square().mean(), scale=0.5)
        backend.gradients.clip_norm(model.parameters(), 0.5)
        backend.step(optimizer)
        optimizer.zero_grad()
        expected(x).square().mean().backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        other.step()
        other.zero_grad()
    assert_trained(backend, model, expected)


@pytest.mark.ranks(2)
def test_frozen_parameters_and_several_models_are_fine(rank: int) -> None:
    backend = open_backend()
    torch.manual_seed(rank)
    frozen, other = WithFrozen(), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (frozen, other)]
    backend.prepare(Bundle([frozen, other], optimizers))
    before = backend.states.full_model(frozen, main_only=False)
    backend.backward(other(frozen(torch.ones(2, 8))).square().mean())
    for optimizer in optimizers:
        assert backend.step(optimizer)
    after = backend.states.full_model(frozen, main_only=False)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {"trained.weight", "trained.bias"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("precision", "out"), [("bf16", torch.float32), ("bf16-true", torch.bfloat16)])
def test_precision_is_fsdps_own(precision: str, out: torch.dtype) -> None:
    backend = open_backend(precision)
    model = make_model("transformer")
    seen: list[torch.dtype] = []
    model.blocks[0].norm2.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    backend.prepare(Bundle([model]))
    output = model(tokens(0))
    backend.backward(output.float().mean())
    assert seen == [torch.bfloat16]  # autocast would have computed a norm in fp32
    assert output.dtype == out
    assert model.blocks[0].qkv.weight.dtype == (torch.float32 if precision == "bf16" else torch.bfloat16)


@pytest.mark.ranks(2)
def test_batch_statistics_stay_wide_in_mixed_precision() -> None:
    backend = open_backend("bf16")
    model = WithBuffers()
    backend.prepare(Bundle([model]))
    backend.backward(model(torch.randn(4, 8)).mean())
    assert type(model.norm).__name__ == "FSDPBatchNorm1d"
    assert model.norm.running_mean.dtype == torch.float32


@pytest.mark.ranks(2)
def test_half_precision_weights_are_widened_for_mixed_precision() -> None:
    backend = open_backend("bf16")
    model = make_model("transformer").bfloat16()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    backend.prepare(Bundle([model], [optimizer]))
    assert {parameter.dtype for parameter in optimizer.param_groups[0]["params"]} == {torch.float32}


@pytest.mark.ranks(2)
def test_overflow_on_one_rank_skips_the_step_on_all(rank: int) -> None:
    backend = open_backend("fp16")
    model = make_model("mlp")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    backend.prepare(Bundle([model], [optimizer]))
    backend.backward(model(torch.ones(2, 8)).mean() * (1e38 if rank else 1.0))
    assert not backend.step(optimizer)
    if backend.loss_scale is not None:
        backend.loss_scale.update()
    assert backend.loss_scale is not None
    assert backend.loss_scale.current == 32768.0


@pytest.mark.ranks(2)
def test_a_forward_without_backward_leaves_no_stale_weights() -> None:
    backend = open_backend(sharding_strategy="SHARD_GRAD_OP")
    model = make_model("transformer")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    backend.prepare(Bundle([model], [optimizer]))
    backend.backward(loss_of(model, tokens(0)))
    with torch.no_grad():
        before = loss_of(model, tokens(0))
        backend.step(optimizer)
        assert loss_of(model, tokens(0)) < before
    assert set(backend.states.optimizer(optimizer, [model])["param_groups"][0]["params"]) >= {"norm.weight"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"cpu_offload": True, "auto_wrap_policy": "NO_WRAP"}], ids=["full", "offload"])
def test_full_parameters_can_be_read_and_changed(options: dict[str, Any]) -> None:
    backend = open_backend(**options)
    model, expected = make_model("transformer"), make_model("transformer")
    backend.prepare(Bundle([model]))
    with backend.states.full_parameters(model):
        assert model.head.weight is model.embedding.weight
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, other)
        with torch.no_grad():
            model.norm.bias.fill_(3.0)
    with backend.states.full_parameters(model, writeback=False), torch.no_grad():
        model.norm.bias.fill_(4.0)
    assert bool((backend.states.full_model(model, main_only=False)["norm.bias"] == 3.0).all())


@pytest.mark.ranks(2)
def test_a_full_state_is_the_main_ranks_and_loads_everywhere(rank: int) -> None:
    backend = open_backend()
    model = make_model("transformer", seed=4)
    backend.prepare(Bundle([model]))
    assert bool(backend.states.full_model(model)) == (rank == 0)
    other = make_model("transformer", seed=5)
    backend.states.load_model(model, dict(other.named_parameters()))
    assert_trained(backend, model, other, rtol=0.0)
    other = make_model("transformer", seed=6)
    assert {"embedding.weight", "head.weight"} <= set(other.state_dict()), "one tensor under two names"
    backend.states.load_model(model, other.state_dict())
    assert_trained(backend, model, other, rtol=0.0)


@pytest.mark.ranks(2)
def test_what_the_user_sharded_is_taken_as_it_is() -> None:
    from torch.distributed.fsdp import fully_shard

    model = make_model("mlp")
    fully_shard(model)
    backend = open_backend()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    assert backend.prepare(Bundle([model], [optimizer])).models[0] is model
    backend.backward(model(torch.ones(2, 8)).mean())
    assert backend.step(optimizer)


@pytest.fixture(scope="module")
def fresh_pool() -> Iterator[RankPool]:
    """Ranks that have not seen DeepSpeed: once it has run in a process, equal blocks no longer share a graph there."""
    with RankPool(2, preload=["torch._dynamo"]) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpointing", "regional"),
    [
        pytest.param(True, True, id="checkpointing-regional"),
        pytest.param(True, False, id="checkpointing-whole", marks=pytest.mark.slow),
        pytest.param(False, True, id="plain-regional", marks=pytest.mark.slow),
        pytest.param(False, False, id="plain-whole"),
    ],
)
def test_compiled_units_compute_the_same(fresh_pool: RankPool, regional: bool, checkpointing: bool) -> None:
    fresh_pool.run(compile_and_compare, regional, checkpointing)


def compile_and_compare(regional: bool, checkpointing: bool) -> None:
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    backend = open_backend(activation_checkpointing=checkpointing)
    model, expected = make_model("transformer"), make_model("transformer")
    backend.prepare(Bundle([model]))
    compiled = backend.compile(model, TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional))
    torch.testing.assert_close(compiled(tokens(0)), expected(tokens(0)))
    assert counters["stats"]["unique_graphs"] == 1  # the blocks share one
    assert set(backend.states.model(compiled)) == set(expected.state_dict()) - {"head.weight"}
    assert backend.unwrap(compiled, keep_torch_compile=False) is model
    torch._dynamo.reset()


OFFLOAD = {"cpu_offload": True}


def sharded_in_part(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.blocks[0])
    return model


def changed(model: nn.Module, name: str, change: str) -> nn.Module:
    getattr(model.get_submodule(name), change)()
    return model


def stepping(model: nn.Module, **options: Any) -> Bundle:
    return Bundle([model], [torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), **options)])


def fused(model: nn.Module) -> Bundle:
    return Bundle([model], [torch.optim.SGD(model.parameters(), lr=0.1, fused=True)])


def on_device_only(model: nn.Module) -> Bundle:
    kind = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim"})
    return Bundle([model], [kind(model.parameters())])


Unfit = tuple[dict[str, Any], Any]
#: Options, and what becomes of a transformer on a rank: a bundle that cannot be prepared.
UNFIT: dict[str, Unfit] = {
    "class": ({"transformer_cls_names_to_wrap": "TinyBlok"}, lambda model, rank: model),
    "dtypes": ({}, lambda model, rank: changed(model, "blocks.0.norm1", "double")),
    "fused": ({}, lambda model, rank: fused(model)),
    "capturable": (OFFLOAD, lambda model, rank: stepping(model, capturable=True)),
    "bitsandbytes": (OFFLOAD, lambda model, rank: on_device_only(model)),
    "part": ({}, lambda model, rank: sharded_in_part(model)),
    "wrapped": ({}, lambda model, rank: nn.parallel.DistributedDataParallel(model)),
    "devices": ({}, lambda model, rank: model.__setattr__("norm", nn.LayerNorm(16, device="meta")) or model),
    "ranks": ({}, lambda model, rank: model.double() if rank else model),
    "checkpointing": ({"activation_checkpointing": True}, lambda model, rank: make_model("mlp")),
    "ignored": ({"ignored_modules": r"block\.0"}, lambda model, rank: model),
    "one rank's error": (
        {},
        lambda model, rank: Bundle([model], [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)] * rank),
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("class", r"transformer layer class TinyBlok in the model\. TinyTransformer consists of .*mean 'TinyBlock'"),
        ("dtypes", r"one unit \(blocks\.0\) have several dtypes: blocks\.0\.norm1\.weight is fp64, .* is fp32"),
        ("capturable", r"AdamW\(capturable=True\).*cpu_offload=False"),
        ("fused", r"SGD\(fused=True\).*nearest: foreach=True"),
        ("part", r"blocks\.0 of this TinyTransformer is sharded already"),
        ("ranks", r"rank 0 has parameter embedding\.weight .*fp32, trained where rank 1 has .*fp64"),
        ("checkpointing", "TinyMLP has no blocks to recompute"),
        ("ignored", r"the whole name of no module; nearest: 'blocks\.0'"),
        ("devices", "lie on several devices: embedding.weight on cpu, norm.weight on meta"),
        ("bitsandbytes", "AdamW8bit of bitsandbytes steps on the device only.*cpu_offload=False"),
        ("wrapped", "TinyTransformer is wrapped in DistributedDataParallel already"),
        ("one rank's error", "parameters of no prepared model"),
    ],
)
@pytest.mark.sampled(3)
def test_what_cannot_be_sharded_is_refused_on_all_ranks(rank: int, case: str, message: str) -> None:
    options, make = UNFIT[case]
    made = make(make_model("transformer"), rank)
    backend = open_backend(**options)
    with pytest.raises(AccelError, match=message):
        backend.prepare(made if isinstance(made, Bundle) else Bundle([made]))


@pytest.mark.ranks(2)
def test_a_trained_model_can_be_let_go() -> None:
    import gc
    import weakref

    backend = open_backend()
    model = make_model("transformer")
    backend.prepare(Bundle([model]))
    backend.backward(model(tokens(0)).mean())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("options", "ahead"), [({}, 0), ({"forward_prefetch": True}, 1), ({"forward_prefetch": 2}, 2)])
def test_what_is_gathered_ahead_in_forward_reaches_torch(options: dict[str, Any], ahead: int) -> None:
    model = make_model("transformer")
    open_backend(**options).prepare(Bundle([model]))
    states = [block._get_fsdp_state() for block in model.blocks]
    chosen = [states.index(state) for state in states[0]._states_to_forward_prefetch]
    assert chosen == [1][:ahead]  # there are two blocks
    assert states[1]._states_to_forward_prefetch == []


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("prefetch", "early"), [("BACKWARD_PRE", True), ("NO_PREFETCH", False)])
def test_what_is_gathered_ahead_in_backward_follows_the_options(prefetch: str, early: bool) -> None:
    """While the last block computes its backward, the first is gathered already, or not."""
    backend = open_backend(backward_prefetch=prefetch)
    model = make_model("transformer")
    backend.prepare(Bundle([model]))
    backend.backward(model(tokens(0)).mean())  # the order of the blocks is known after one step
    seen: list[bool] = []
    (group,) = unit_groups(model.blocks[0])
    model.blocks[1].norm1.register_full_backward_hook(
        lambda *_: seen.append(group._all_gather_result is not None or group.is_unsharded)
    )
    backend.backward(model(tokens(1)).mean())
    assert seen == [early]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("options", "everywhere"), [({}, False), ({"state_dict_config": {"rank0_only": False}}, True)])
def test_a_full_state_goes_where_its_options_say(rank: int, options: dict[str, Any], everywhere: bool) -> None:
    backend = open_backend(**options, optim_state_dict_config=options.get("state_dict_config"))
    model = make_model("mlp")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    backend.prepare(Bundle([model], [optimizer]))
    backend.backward(model(torch.ones(2, 8)).mean())
    backend.step(optimizer)
    assert bool(backend.states.full_model(model)) == (everywhere or rank == 0)
    whole = backend.states.full_optimizer(optimizer, [model])
    assert bool(whole) == (everywhere or rank == 0)
    if whole:
        assert whole["state"]["first.weight"]["exp_avg"].shape == (16, 8)
        assert type(whole["state"]["first.weight"]["exp_avg"]) is torch.Tensor


@pytest.mark.ranks(2)
def test_nothing_is_reduced_until_the_last_micro_batch() -> None:
    backend = open_backend()
    model = make_model("transformer")
    backend.prepare(Bundle([model]))
    with backend.no_sync(model):
        backend.backward(model(tokens(0)).mean())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert set(backend.gradients.unreduced(model)) == {name for name, _ in model.named_parameters()}
    backend.backward(model(tokens(1)).mean())
    assert all(type(parameter.grad).__name__ == "DTensor" for parameter in model.parameters())


@pytest.mark.ranks(2)
def test_ranks_with_different_numbers_of_batches_are_refused() -> None:
    backend = open_backend()
    model = make_model("mlp")
    backend.prepare(Bundle([model]))
    with pytest.raises(BackendError, match=r"join: with backend 'fsdp' every rank.*nearest: even_batches=True"):
        backend.gradients.join([model])
    with backend.gradients.join([model], enable=False):
        pass


@pytest.mark.ranks(2)
def test_preparing_twice_is_refused() -> None:
    backend = open_backend()
    model = make_model("mlp")
    backend.prepare(Bundle([model]))
    with pytest.raises(PrepareError, match="prepared already"):
        backend.prepare(Bundle([model]))


@pytest.mark.ranks(2)
def test_a_parameter_of_two_models_is_refused() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    with pytest.raises(PrepareError, match="weight of model 1 is also weight of model 0"):
        open_backend().prepare(Bundle([first, second]))


@pytest.mark.ranks(2)
def test_a_degree_that_does_not_divide_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="there are 2; sizes that divide it: 1, 2"):
        open_backend(shard_size=3)
    with pytest.raises(ConfigError, match="does not divide the 2 ranks that a parameter is sharded over"):
        open_backend(reshard_after_forward=3)


@pytest.mark.ranks(2)
def test_ignored_modules_stay_whole() -> None:
    backend = open_backend(ignored_modules=r".*\.qkv")
    model = make_model("transformer")
    backend.prepare(Bundle([model]))
    kinds = {name: type(parameter).__name__ for name, parameter in model.named_parameters()}
    assert kinds["blocks.0.qkv.weight"] == "Parameter"
    assert kinds["blocks.0.out.weight"] == "DTensor"
    model(tokens(0)).mean().backward()


@pytest.mark.ranks(2)
def test_shards_that_lie_in_their_place_are_not_copied_onto_themselves(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend()
    model = backend.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    held = backend.states.model(model)
    loaded: list[nn.Module] = []
    original = nn.Module._load_from_state_dict

    def noted(self: nn.Module, *arguments: Any) -> None:
        loaded.append(self)
        original(self, *arguments)

    monkeypatch.setattr(nn.Module, "_load_from_state_dict", noted)
    backend.states.load_model(model, held)
    assert loaded == []
    backend.states.load_model(model, {name: torch.full(tuple(value.shape), 3.0) for name, value in held.items()})
    assert all(bool(value.to_local().eq(3).all()) for value in backend.states.model(model).values())
