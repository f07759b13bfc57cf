"""Version 1 of sharding trains the same, and its states are named the same."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Bundle, FSDP1Backend, FSDPConfig, Run
from accel_precision import PrecisionPolicy
from accel_state import AccelError, BackendError, PrepareError, Session
from accel_testing.equivalence.models import TinyTransformer, make_model

STEPS, BATCH, LENGTH = 4, 8, 6


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 32, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.roll(1, 1).flatten())


def open_backend(precision: str = "no", **options: Any) -> FSDP1Backend:
    session = Session.open(cpu=True)
    policy = PrecisionPolicy.parse(precision, device_type="cpu")
    return FSDP1Backend(Run(session, policy), FSDPConfig(fsdp_version=1, **options))


def reference() -> nn.Module:
    model = make_model("transformer", dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        loss_of(model, tokens(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.sampled(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sharding_strategy": "SHARD_GRAD_OP", "activation_checkpointing": True},
        {"sharding_strategy": "NO_SHARD"},
        {"sharding_strategy": "HYBRID_SHARD", "shard_size": 2},
        {"cpu_offload": True},
    ],
    ids=["full", "grad_op, checkpointing", "none", "hybrid", "offload"],
)
def test_it_trains_as_one_process(rank: int, options: dict[str, Any]) -> None:
    backend = open_backend(**options)
    model = make_model("transformer", dtype=torch.float64, seed=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model = backend.prepare(Bundle([model], [optimizer])).models[0]
    for step in range(STEPS):
        parts = tokens(step).chunk(8)
        with backend.no_sync(model):
            backend.backward(loss_of(model, parts[rank]), scale=0.5)
        backend.backward(loss_of(model, parts[4 + rank]), scale=0.5)
        backend.gradients.clip_norm(model.parameters(), 0.5)
        backend.step(optimizer)
        optimizer.zero_grad()
    state = backend.states.full_model(model, main_only=False)
    for name, value in reference().named_parameters():
        assert float((state[name] - value).abs().max()) <= 1e-10 * float(value.abs().max()), name
    assert set(backend.states.optimizer(optimizer, [model])["state"]) == set(state)


class Exhausted(Exception):
    """Memory that runs out in a backward."""


@pytest.mark.ranks(2)
def test_after_a_backward_that_failed_training_goes_on_as_if_there_had_been_none(rank: int) -> None:
    def exhaust(gradient: torch.Tensor) -> None:
        raise Exhausted

    def fail(module: nn.Module, given: Any, output: torch.Tensor) -> None:
        output.register_hook(exhaust)

    states = []
    for fails in (False, True):
        backend = open_backend()
        model = make_model("transformer", dtype=torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model = backend.prepare(Bundle([model], [optimizer])).models[0]
        if fails:
            failing = model.module.blocks[0].register_forward_hook(fail)
            with backend.no_sync(model), pytest.raises(Exhausted):
                backend.backward(loss_of(model, tokens(7)))
            with pytest.raises(Exhausted):
                backend.backward(loss_of(model, tokens(8)))
            failing.remove()
        for step in range(3):
            optimizer.zero_grad()
            backend.backward(loss_of(model, tokens(step)))
            backend.step(optimizer)
        states.append(backend.states.full_model(model, main_only=False))
    assert all(torch.equal(one, other) for one, other in zip(*(state.values() for state in states), strict=True))


@pytest.mark.ranks(2)
def test_a_model_that_was_first_called_in_inference_mode_trains(rank: int) -> None:
    backend = open_backend()
    model = make_model("transformer", dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model = backend.prepare(Bundle([model], [optimizer])).models[0]
    with torch.inference_mode():
        before = float(loss_of(model, tokens(0)))
    for _ in range(2):
        loss = loss_of(model, tokens(0))
        backend.backward(loss)
        backend.step(optimizer)
        optimizer.zero_grad()
    assert float(loss.detach()) < before


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("how", ["again", "earlier forward"])
def test_a_forward_has_one_backward_before_the_next_one(rank: int, strategy: str, how: str) -> None:
    backend = open_backend(sharding_strategy=strategy)
    model = backend.prepare(Bundle([make_model("transformer")])).models[0]
    first = loss_of(model, tokens(rank))
    second = first if how == "again" else loss_of(model, tokens(2 + rank))
    backend.backward(first, retain_graph=how == "again")
    with pytest.raises(BackendError, match=r"call backward once in place of backward\(retain_graph=True\)"):
        backend.backward(second)
    if strategy == "NO_SHARD":
        model.zero_grad()
        backend.backward(loss_of(model, tokens(rank)))


@pytest.mark.ranks(2)
def test_a_model_that_the_user_has_wrapped_is_watched_too(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    backend = open_backend()
    own = FullyShardedDataParallel(
        make_model("transformer"),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    model = backend.prepare(Bundle([own])).models[0]
    loss = loss_of(model, tokens(rank))
    backend.backward(loss, retain_graph=True)
    with pytest.raises(BackendError, match="reduces gradients over ranks in one backward after each forward"):
        backend.backward(loss)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_states_load_into_another_wrapping(rank: int, strategy: str) -> None:
    backend = open_backend(sharding_strategy=strategy)
    model, other = make_model("transformer"), make_model("transformer", seed=5)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, other)]
    model, other = backend.prepare(Bundle([model, other], optimizers)).models
    backend.backward(loss_of(model, tokens(0)))
    backend.step(optimizers[0])
    backend.states.load_model(other, backend.states.full_model(model, main_only=False))
    state = deepcopy(backend.states.optimizer(optimizers[0], [model]))  # torch's optimizers load without a copy
    backend.states.load_optimizer(optimizers[1], [other], state)
    for one, optimizer in zip((model, other), optimizers, strict=True):
        optimizer.zero_grad()
        backend.backward(loss_of(one, tokens(1)))
        backend.step(optimizer)
    first, second = (backend.states.full_model(one, main_only=False) for one in (model, other))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    with pytest.raises(AccelError, match="state of another TinyTransformer"):
        backend.states.load_model(other, {"wrong": torch.zeros(1)})


@pytest.mark.ranks(2)
def test_without_sharding_the_prepared_model_loads_full_tensors_and_the_model_within_it_refuses_them() -> None:
    backend, weights = open_backend(sharding_strategy="NO_SHARD"), make_model("mlp", seed=5).state_dict()
    model = backend.prepare(Bundle([make_model("mlp")])).models[0]
    with pytest.raises(BackendError, match=r"parameters are flat; call load_state_dict of the prepared model"):
        backend.unwrap(model).load_state_dict(weights)
    model.load_state_dict(weights)
    found = backend.states.full_model(model, main_only=False)
    assert all(torch.equal(value, found[name]) for name, value in weights.items())


@pytest.mark.ranks(2)
def test_mixed_precision_and_full_parameters() -> None:
    backend = open_backend("bf16")
    model = backend.prepare(Bundle([make_model("mlp")])).models[0]
    output = model(torch.ones(2, 8))
    backend.backward(output.float().mean())
    assert backend.unwrap(model).first.weight.dtype == torch.float32
    with backend.states.full_parameters(model):
        assert backend.unwrap(model).first.weight.shape == (16, 8)


@pytest.mark.ranks(2)
def test_what_version_1_cannot_do_is_refused() -> None:
    backend = open_backend()
    model = nn.Linear(2, 2)
    both = torch.optim.AdamW([*model.parameters(), *(other := nn.Linear(2, 2)).parameters()])
    (model(torch.ones(1, 2)) + other(torch.ones(1, 2))).sum().backward()
    both.step()
    with pytest.raises(AccelError, match=r"has stepped already and updates several models.*fsdp_version=2"):
        backend.prepare(Bundle([model, other], [both]))
    model.scale = nn.Parameter(torch.ones(0))
    with pytest.raises(PrepareError, match=r"scale of Linear trains and has no elements, .*nearest: .*fsdp_version=2"):
        backend.prepare(Bundle([model]))


@pytest.mark.ranks(2)
def test_an_optimizer_that_could_not_be_saved_is_warned_of(rank: int) -> None:
    import logging

    heard: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("accel_backends.fsdp1.backend")
    logger.addHandler(listener)
    backend = open_backend()
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    both = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    prepared = backend.prepare(Bundle(models, [both])).models
    logger.removeHandler(listener)
    assert [("SGD updates 2 models" in text) for text in heard] == [True] * (rank == 0)
    backend.backward(prepared[1](prepared[0](torch.ones(1, 2))).sum())
    assert backend.step(both)
    with pytest.raises(BackendError, match="fsdp_version=1 saves optimizers of one"):
        backend.states.optimizer(both, prepared)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("filled", ["nowhere", "on rank 0"])
def test_a_model_on_the_meta_device_gets_its_values(rank: int, filled: str) -> None:
    torch.manual_seed(rank)
    backend = open_backend()
    if filled == "on rank 0" and rank == 0:
        model = make_model("transformer", seed=3)
    else:
        with torch.device("meta"):
            model = TinyTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if filled == "on rank 0":
        model = backend.prepare(Bundle([model])).models[0]
        state = backend.states.full_model(model, main_only=False)
        for name, value in make_model("transformer", seed=3).named_parameters():
            assert torch.equal(state[name], value), name
        return
    model = backend.prepare(Bundle([model], [optimizer])).models[0]
    before = backend.states.full_model(model, main_only=False)
    assert 0.8 < float(before["position.weight"].std()) < 1.2
    assert bool((before["norm.weight"] == 1.0).all())
    assert not torch.equal(before["blocks.0.qkv.weight"], before["blocks.1.qkv.weight"])
    first = [before["position.weight"].sum()]
    torch.distributed.broadcast(first[0], 0)
    assert torch.equal(first[0], before["position.weight"].sum())
    backend.backward(loss_of(model, tokens(0)))
    assert backend.step(optimizer)
    assert not torch.equal(backend.states.full_model(model, main_only=False)["norm.weight"], before["norm.weight"])


@pytest.mark.ranks(2)
def test_an_optimizer_that_has_stepped_keeps_its_state(rank: int) -> None:
    model = make_model("transformer", dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model, tokens(0)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    backend = open_backend()
    model = backend.prepare(Bundle([model], [optimizer])).models[0]
    for step in range(1, STEPS):
        backend.backward(loss_of(model, tokens(step).chunk(2)[rank]))
        backend.gradients.clip_norm(model.parameters(), 0.5)
        backend.step(optimizer)
        optimizer.zero_grad()
    state = backend.states.full_model(model, main_only=False)
    for name, value in reference().named_parameters():
        assert float((state[name] - value).abs().max()) <= 1e-10 * float(value.abs().max()), name


@pytest.mark.ranks(2)
def test_what_the_user_has_wrapped_and_stepped_stays_as_it_is() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel(make_model("mlp"), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    wrapped(torch.ones(2, 8)).mean().backward()
    optimizer.step()
    state = {id(parameter): value["exp_avg"] for parameter, value in optimizer.state.items()}
    backend = open_backend()
    assert backend.prepare(Bundle([wrapped], [optimizer])).models[0] is wrapped
    assert {id(parameter): value["exp_avg"] for parameter, value in optimizer.state.items()} == state
    with pytest.raises(BackendError, match=r"TinyMLP was wrapped .* without a device_mesh: it trains, but"):
        backend.states.model(wrapped)


@pytest.mark.ranks(2)
def test_flat_parameters_of_a_users_wrapper_train_and_have_no_window_to_save() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel(
        make_model("mlp"),
        use_orig_params=False,
        device_id=torch.device("cpu"),
        device_mesh=init_device_mesh("cpu", (2,)),
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    backend = open_backend()
    model = backend.prepare(Bundle([wrapped], [optimizer])).models[0]
    before = backend.states.full_model(model, main_only=False)
    with backend.no_sync(model):
        backend.backward(model(torch.ones(2, 8)).mean())
    with pytest.raises(BackendError, match="use_orig_params=False; save after a step"):
        backend.gradients.unreduced(model)
    backend.backward(model(torch.ones(2, 8)).mean())
    backend.gradients.clip_norm(model.parameters(), 1.0)
    assert backend.step(optimizer)
    after = backend.states.full_model(model, main_only=False)
    assert set(after) == set(make_model("mlp").state_dict())
    assert not torch.equal(after["first.weight"], before["first.weight"])


@pytest.mark.ranks(2)
def test_ranks_that_prepare_different_models_are_refused(rank: int) -> None:
    with pytest.raises(AccelError, match="ranks prepare different models"):
        open_backend().prepare(Bundle([nn.Linear(2, 2 + rank)]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, ("BACKWARD_PRE", False, True)),
        ({"backward_prefetch": "BACKWARD_POST", "forward_prefetch": True}, ("BACKWARD_POST", True, True)),
        ({"backward_prefetch": "NO_PREFETCH", "limit_all_gathers": False}, (None, False, False)),
    ],
)
def test_prefetching_and_its_limit_reach_torch(options: dict[str, Any], given: tuple[Any, ...]) -> None:
    wrapped = open_backend(**options).prepare(Bundle([make_model("transformer")])).models[0]
    prefetch = wrapped.backward_prefetch
    assert (prefetch and prefetch.name, wrapped.forward_prefetch, wrapped.limit_all_gathers) == given


@pytest.mark.ranks(2)
def test_a_full_state_goes_where_its_options_say(rank: int) -> None:
    backend = open_backend(optim_state_dict_config={"rank0_only": False}, state_dict_config={"rank0_only": True})
    model = make_model("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model = backend.prepare(Bundle([model], [optimizer])).models[0]
    backend.backward(model(torch.ones(2, 8)).mean())
    backend.step(optimizer)
    assert bool(backend.states.full_model(model)) == (rank == 0)
    state = backend.states.full_optimizer(optimizer, [model])
    assert state["state"]["first.weight"]["exp_avg"].shape == (16, 8)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("precision", "expected"),
    [("bf16", torch.float32), ("bf16,output=none", torch.bfloat16), ("bf16-true", torch.bfloat16)],
)
def test_outputs_have_the_dtype_of_the_policy(precision: str, expected: torch.dtype) -> None:
    backend = open_backend(precision)
    model = backend.prepare(Bundle([make_model("transformer")])).models[0]
    assert model(tokens(0)).dtype == expected


@pytest.mark.ranks(2)
def test_a_full_tensor_of_a_checkpointed_block_is_refused_by_name() -> None:
    backend, model = open_backend(activation_checkpointing=True), make_model("transformer")
    weights = {"blocks.0.up.weight": model.blocks[0].up.weight.detach().clone()}
    wrapped = backend.prepare(Bundle([model], [torch.optim.SGD(model.parameters(), lr=0.1)])).models[0]
    with pytest.raises(BackendError, match=r"was given the full blocks\.0\.up\.weight"):
        wrapped.load_state_dict(weights, strict=False)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.factor = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows) * self.factor


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["NO_SHARD", "FULL_SHARD"])
def test_a_unit_without_training_is_saved_or_refused_at_prepare(rank: int, strategy: str) -> None:
    backend = open_backend(sharding_strategy=strategy, auto_wrap_policy="size_based_wrap", min_num_params=50)
    model = _Scaled()
    optimizer = torch.optim.SGD(model.inner.parameters(), lr=0.1)
    if strategy == "NO_SHARD":
        with pytest.raises(AccelError, match=r"no parameter of _Scaled .* trains.*strategy='ddp'"):
            backend.prepare(Bundle([model], [optimizer]))
        return
    model = backend.prepare(Bundle([model], [optimizer])).models[0]
    backend.backward(model(torch.ones(2, 8)).square().mean())
    backend.step(optimizer)
    assert sorted(backend.states.model(model)) == ["factor", "inner.bias", "inner.weight"]
