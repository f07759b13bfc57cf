import copy
import pickle
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy

from accel_backends import (
    ActivationCheckpointing,
    Bundle,
    Capabilities,
    DDPBackend,
    FSDP1Backend,
    FSDPBackend,
    FSDPConfig,
    ModuleBackend,
    Run,
    SingleBackend,
    TorchDynamoPlugin,
    repeated_blocks,
)
from accel_backends.ops import activation_checkpointing
from accel_backends.ops.activation_checkpointing import as_checkpointing
from accel_precision import PrecisionPolicy
from accel_state import BackendError, ConfigError, PrepareError, Session


class Block(nn.Module):
    """A block with dropout that counts its forwards."""

    def __init__(self, width=8):
        super().__init__()
        self.up, self.down, self.drop, self.calls = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), 0.3, 0

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        return x + scale * nn.functional.dropout(self.down(torch.tanh(self.up(x))), self.drop, self.training)


class Net(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(blocks)), nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(blocks=4):
    torch.manual_seed(0)
    return Net(blocks).double()


def gradients(model):
    """Gradients of one step, with the same dropout each time."""
    torch.manual_seed(1)
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    model.zero_grad()
    model(x).square().mean().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


def kept(model):
    """Bytes that forward saves for backward, outside of recomputed blocks."""
    count = 0

    def pack(tensor):
        nonlocal count
        count += tensor.nbytes
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(5, 8, dtype=torch.float64, requires_grad=True))
    return count


def recomputing(model, **options):
    how = ActivationCheckpointing(**options)
    how.apply(model, how.find(model, repeated_blocks(model)))
    return model


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"save": "matmuls"},
        {"save": lambda ctx, op, *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE},
        {"offload": True},
        {"every": 2},
        {"blocks": "Block"},
        {"blocks": lambda name, module: name in ("blocks.0", "blocks.3")},
    ],
    ids=["all", "matmuls", "policy", "offload", "every-second", "class", "function"],
)
def test_gradients_are_those_without_it_and_forward_keeps_less(options):
    plain, model = net(), recomputing(net(), **options)
    for one, other in zip(gradients(plain), gradients(model), strict=True):
        assert torch.equal(one, other)
    assert kept(model) < kept(plain)


def test_the_chosen_blocks_run_twice_and_the_others_once():
    model = recomputing(net(), every=2)
    gradients(model)
    assert [block.calls for block in model.blocks] == [1, 2, 1, 2]
    with torch.no_grad():
        model(torch.ones(1, 8, dtype=torch.float64))
    assert [block.calls for block in model.blocks] == [2, 3, 2, 3]  # nothing to recompute


@pytest.mark.parametrize("options", [{}, {"save": "matmuls"}], ids=["all", "matmuls"])
@pytest.mark.parametrize(
    "norm",
    [lambda: nn.BatchNorm1d(8), lambda: nn.InstanceNorm1d(5, track_running_stats=True)],
    ids=["batch", "instance"],
)
def test_running_statistics_count_a_batch_once(options, norm):
    def norms():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), norm(), nn.Linear(8, 8)) for _ in range(3))).double()

    plain, model = norms(), recomputing(norms(), **options)
    for one, other in zip(gradients(plain), gradients(model), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.equal(one, other)


def test_the_results_of_matrix_products_are_not_computed_again():
    products = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            products.append(func.overloadpacket.__name__) if func.overloadpacket is torch.ops.aten.addmm else None
            return func(*args, **(kwargs or {}))

    counts = {}
    for save in ("nothing", "matmuls"):
        products.clear()
        with Counting():
            gradients(recomputing(net(), save=save))
        counts[save] = len(products)
    assert counts == {"nothing": 4 * 2 * 2 + 1, "matmuls": 4 * 2 + 1}


def test_operations_that_only_the_recomputation_runs_are_no_matter_to_what_was_kept():
    """As of hooks that gather parameters in the recomputation, and in advance of the forward."""
    plain, model = net(), net()
    for block in model.blocks:

        def gather(module, _args, block=block):
            for _ in range(block.calls - 1):
                torch.cat([module.weight.detach().flatten(), torch.zeros(3)])

        block.down.register_forward_pre_hook(gather)
    recomputing(model, save="matmuls")
    for one, other in zip(gradients(plain), gradients(model), strict=True):
        assert torch.equal(one, other)


def test_the_module_keeps_its_class_names_and_hooks_and_copies_are_plain():
    model = net()
    names, keys = [name for name, _ in model.named_modules()], list(model.state_dict())
    fired = []
    model.blocks[0].register_forward_hook(lambda *_: fired.append(1))
    recomputing(model)
    assert [name for name, _ in model.named_modules()] == names
    assert list(model.state_dict()) == keys
    assert isinstance(model.blocks[0], Block)
    assert type(model.blocks[0]).__name__ == "Block"
    assert type(model.blocks[0]) is type(model.blocks[3])  # torch compiles their code once
    gradients(model)
    assert fired == [1]
    for copied in (copy.deepcopy(model.blocks[1]), pickle.loads(pickle.dumps(model.blocks[1]))):
        assert type(copied) is Block
    assert repeated_blocks(recomputing(net(), every=2)) == [f"blocks.{n}" for n in range(4)]


def test_a_second_application_changes_nothing():
    model = recomputing(recomputing(net()))
    gradients(model)
    assert [block.calls for block in model.blocks] == [2, 2, 2, 2]


def test_compiled_blocks_recompute():
    plain, model = net(), recomputing(net())
    plain.eval(), model.eval()  # dropout draws other numbers in a compiled graph
    compiled = torch.compile(model, backend="aot_eager")
    for one, other in zip(gradients(plain), gradients(compiled), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_autocast_of_the_forward_holds_in_the_second_one():
    def run(model):
        torch.manual_seed(1)
        x = torch.randn(5, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        return [p.grad for p in model.parameters()]

    for one, other in zip(run(net().float()), run(recomputing(net().float())), strict=True):
        assert torch.equal(one, other)


def test_inputs_are_kept_in_host_memory_where_another_device_computes(monkeypatch):
    used = []

    @contextmanager
    def recorded(*, pin_memory, device_type):
        used.append((pin_memory, device_type))
        yield

    monkeypatch.setattr(activation_checkpointing, "save_on_cpu", recorded)
    model = recomputing(net(2).to("meta"), offload=True)
    x = torch.zeros(5, 8, dtype=torch.float64, device="meta")
    model(x)
    model.blocks[0](x=x)
    assert used == 3 * [(True, "meta")]


def test_inputs_given_by_keyword_are_recomputed():
    found = []
    for model in (net(), recomputing(net())):
        torch.manual_seed(1)
        x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
        for block in model.blocks:
            block(x=x, scale=0.5).square().mean().backward()
        found.append([x.grad, *(p.grad for p in model.blocks.parameters())])
    assert all(map(torch.equal, *found))
    assert [block.calls for block in model.blocks] == [2, 2, 2, 2]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("make", ["tiny_llama", "tiny_gpt2"])
def test_decoders_of_transformers_train_with_their_default_of_a_kv_cache(make, every):
    from accel_testing.equivalence import causal_lms

    plain, model = (getattr(causal_lms, make)() for _ in range(2))
    tokens = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(0))
    how = ActivationCheckpointing(every=every)
    how.apply(model, how.find(model, repeated_blocks(model)))
    assert model.eval()(input_ids=tokens, use_cache=True).past_key_values.get_seq_length(every - 1) == 6
    for one in (plain.train(), model.train()):
        one(input_ids=tokens, labels=tokens, use_cache=True).loss.backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_filled_kv_cache_is_refused():
    class Filled:
        def get_seq_length(self, layer):
            return 3 - layer

    class Cached(Block):
        def forward(self, x, past=None):
            return super().forward(x)

    model = nn.Sequential(Cached(), Cached())
    recomputing(model)
    with pytest.raises(BackendError, match="Filled with keys and values"):
        model[0](torch.ones(1, 8), past=Filled())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every is 0"),
        ({"every": True}, "every is True"),
        ({"save": "matmul"}, "did you mean 'matmuls'"),
    ],
)
def test_options_that_cannot_work_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        ActivationCheckpointing(**options)
    with pytest.raises(ConfigError, match="'full'; expected True, False"):
        as_checkpointing("full")
    assert as_checkpointing(False) is as_checkpointing(None) is None


def test_models_without_such_blocks_are_refused():
    for model, options, said in (
        (nn.Linear(2, 2), {}, "Linear has no blocks"),
        (net(), {"every": 9}, "it has 4, and every=9"),
        (net(), {"blocks": "Blok"}, "did you mean 'Block'"),
    ):
        with pytest.raises(PrepareError, match=said):
            recomputing(model, **options)
    model = net()
    model.blocks[0].gradient_checkpointing = True
    with pytest.raises(PrepareError, match=r"gradient_checkpointing_enable\(\) was called"):
        recomputing(model)


def backend(kind, config=None, **options):
    session = Session.open(device="cpu")
    return kind(Run(session, PrecisionPolicy.parse("no", device_type="cpu"), **options), config)


def trained(kind, config=None, **options):
    """Weights after three steps under a backend, and how often the first block ran forward."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    opened = backend(kind, config, **options)
    (wrapped,) = opened.prepare(Bundle([model], [optimizer])).models
    for step in range(3):
        torch.manual_seed(10 + step)
        opened.backward(wrapped(torch.randn(4, 8, dtype=torch.float64)).square().mean())
        opened.step(optimizer)
        opened.zero_grad(optimizer)
    calls = opened.unwrap(wrapped).blocks[0].calls
    values = opened.states.model(wrapped)
    full = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for name, value in values.items()
    }
    opened.close()
    return full, calls


def test_one_device_trains_as_without_it():
    (plain, once), (found, twice) = (
        trained(SingleBackend),
        trained(SingleBackend, activation_checkpointing=ActivationCheckpointing()),
    )
    assert (once, twice) == (3, 6)
    assert all(torch.equal(plain[name], found[name]) for name in plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [DDPBackend, FSDPBackend, FSDP1Backend])
@pytest.mark.sampled(1)
def test_ranks_train_as_without_it(rank, kind):
    plain, once = trained(kind)
    found, twice = trained(kind, activation_checkpointing=ActivationCheckpointing(save="matmuls"))
    assert (once, twice) == (3, 6)
    for name in plain:
        torch.testing.assert_close(found[name], plain[name], rtol=1e-12, atol=1e-12)


def test_models_without_blocks_are_left_as_they_are_beside_others():
    model, head = net(), nn.Linear(2, 2)
    backend(SingleBackend, activation_checkpointing=ActivationCheckpointing()).prepare(Bundle([model, head], []))
    assert type(head) is nn.Linear
    assert type(model.blocks[0]) is not Block


def test_the_options_of_a_backend_stand_behind_those_of_the_run():
    config = FSDPConfig(fsdp_version=2, activation_checkpointing=True, transformer_cls_names_to_wrap=["Block"])
    assert backend(FSDPBackend, config).recomputed == ActivationCheckpointing()
    other = ActivationCheckpointing(every=2)
    assert backend(FSDPBackend, config, activation_checkpointing=other).recomputed is other


def test_a_backend_that_does_not_apply_it_says_what_does():
    class Other(ModuleBackend):
        name = "other"
        capabilities = Capabilities(instead_of_recomputing="call other.checkpoint")

        def wrap(self, model):
            return model

    with pytest.raises(BackendError, match=r"'other' does not apply activation_checkpointing.*call other\.checkpoint"):
        backend(Other, activation_checkpointing=ActivationCheckpointing())


def test_released_models_are_plain_again():
    model = net()
    opened = backend(SingleBackend, activation_checkpointing=ActivationCheckpointing())
    opened.prepare(Bundle([model], []))
    opened.compile(model, TorchDynamoPlugin())
    opened.close()
    assert type(model.blocks[0]) is Block
